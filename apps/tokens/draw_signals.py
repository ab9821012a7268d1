"""Drawings of audio and time series with their tokens along time."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patches import ConnectionPatch, Rectangle

from worldtokens.apps.tokens.inspect import Inspected
from worldtokens.apps.tokens.panel import COLD, GAP, HEAD, MARK, PALE, SOFT, UNIT, Panel, grid_lines, number

MOST_MARKS = 80  # tokens that the whole recording can show; more are shown in a detail view
CLOSE = 24  # tokens of the detail view


def draw_audio(panel: Panel, s: Inspected) -> str:
    """The spectrogram or waveform with token boundaries; long recordings have a detail view of their loudest part."""
    t, columns = s.tokenizer, s.grid[0]
    step, few = t.token_seconds, columns <= MOST_MARKS
    inner, left = panel.width - 2 * GAP - 0.45, GAP + 0.45
    room = min(panel.height, UNIT - GAP + HEAD) - HEAD - 0.45
    ax = panel.axes(left, HEAD, inner, room if few else 0.5 * room, bare=False)
    end = _draw_signal(ax, s)
    ax.set_xlim(0, end)
    if few:
        _draw_tokens(ax, s, range(columns))
    else:
        first = _loudest(s, columns)
        low = panel.axes(left, HEAD + 0.5 * room + 0.55, inner, 0.5 * room - 0.55, bare=False)
        _draw_signal(low, s)
        low.set_xlim(first * step, (first + CLOSE) * step)
        _draw_tokens(low, s, range(first, first + CLOSE))
        bottom, top = ax.get_ylim()
        box = Rectangle(
            (first * step, bottom), CLOSE * step, top - bottom, fill=False, ec=MARK, lw=1.6, zorder=5
        )
        ax.add_patch(box)
        for start, end in ((first, 0), (first + CLOSE, 1)):
            line = ConnectionPatch(
                (start * step, bottom), (end, 1), ax.transData, low.transAxes, color=MARK, lw=1
            )
            panel.area.add_artist(line)
        for side in low.spines.values():
            side.set_color(MARK)
        ax = low
    ax.set_xlabel("seconds", size=8.5, color=PALE, labelpad=2)
    if t.spectrogram is None:
        return f"one token per {1000 * step:.3g} ms of waveform"
    what = f"one token per {1000 * step:.3g} ms"
    if len(s.grid) > 1:
        (frames, bands), (dt, dy) = t.stem.patch, t.stem.stride
        what = f"{s.grid[0]} x {s.grid[1]} patches of {frames} frames x {bands} bands, stride {dt} x {dy}"
    return f"{what}, log-mel with {t.spectrogram.n_mels} bands ({t.preset})"


def _draw_signal(ax: Any, s: Inspected) -> float:
    """Draw the spectrogram, or the waveform if the front-end has none; returns its end in seconds."""
    t = s.tokenizer
    if t.spectrogram is None:
        x = s.raw.numpy()
        step = max(1, len(x) // 4000)  # each line spans the minimum and maximum of `step` samples
        rows = x[: len(x) // step * step].reshape(-1, step)
        at = np.arange(len(rows)) * step / t.sample_rate
        ax.fill_between(at, rows.min(1), rows.max(1), color=COLD, linewidth=0.6)
        ax.set_ylim(*(np.array([-1.05, 1.05]) * max(1e-3, np.abs(x).max())))
        return max(len(x) / t.sample_rate, s.grid[0] * t.token_seconds)
    x, _ = t.features(s.batch)
    hop = t.spectrogram.hop_length / t.sample_rate
    ax.imshow(x[0].T.numpy(), extent=(0, x.shape[1] * hop, 0, x.shape[2]), origin="lower", aspect="auto",
              cmap="magma", interpolation="nearest")  # fmt: skip
    ax.set_ylabel("mel band", size=8.5, color=PALE, labelpad=1)
    return x.shape[1] * hop


def _draw_tokens(ax: Any, s: Inspected, which: range) -> None:
    """Boundaries and numbers of the tokens in a range."""
    t, step = s.tokenizer, s.tokenizer.token_seconds
    low, high = ax.get_ylim()
    if t.spectrogram is None:
        ax.vlines([k * step for k in [*which, which.stop]], low, high, color=PALE, lw=0.6, alpha=0.7)
    else:
        grid_lines(ax, [k * step for k in [*which, which.stop]], low, high, "y", 0.6)
    if len(s.grid) > 1:
        (frames, bands), (_, dy) = t.stem.patch, t.stem.stride
        grid_lines(
            ax, [k * dy for k in range(s.grid[1] + 1)], which.start * step, which.stop * step, "x", 0.6
        )
        width = frames * t.spectrogram.hop_length / t.sample_rate
        ax.add_patch(Rectangle((which.start * step, 0), width, bands, fill=False, ec=MARK, lw=1.8, zorder=5))
    else:
        for k in which[:: max(1, len(which) // 24)]:
            number(ax, (k + 0.5) * step, low + 0.965 * (high - low), str(k), 6)
    ax.set_ylim(low, high)


def _loudest(s: Inspected, columns: int) -> int:
    """First token of the loudest span of `CLOSE` tokens."""
    energy = s.raw.double().square().cumsum(0).numpy()
    edge = np.minimum(np.arange(columns + 1) * s.tokenizer.samples_per_token, len(energy) - 1)
    total = energy[edge]
    return int(np.argmax(total[CLOSE:] - total[:-CLOSE]))


# ---- series --------------------------------------------------------------------------------------------------


def draw_series(panel: Panel, s: Inspected) -> str:
    """The channels of a time series, shaded by patch; missing values are crosses."""
    t, raw = s.tokenizer, s.raw.numpy()
    channels, steps = raw.shape
    drawn = min(channels, 8)
    room = min(panel.height, UNIT - GAP + HEAD) - HEAD - 0.45
    ax = panel.axes(GAP + 0.15, HEAD, panel.width - 2 * GAP - 0.15, room, bare=False)
    ax.set_yticks([])
    patches = s.tokens.pos[0, :, 0].int().unique().tolist()
    for k in patches:  # patches overlap: a shade is one stride wide, the last one a whole patch
        end = k * t.stride + (t.patch if k == patches[-1] else t.stride) - 0.5
        ax.axvspan(k * t.stride - 0.5, end, color=SOFT[k % 2], lw=0, alpha=0.6)
    for c in range(drawn):
        low, high = np.nanmin(raw[c]), np.nanmax(raw[c])
        y = (raw[c] - low) / (high - low if high > low else 1) * 0.8 + (drawn - 1 - c) + 0.1
        ax.plot(np.arange(steps), y, color=COLD, lw=1.3, marker="o" if steps <= 60 else None, ms=2.5)
        missing = np.flatnonzero(np.isnan(raw[c]))
        ax.plot(missing, np.full(len(missing), drawn - 1 - c + 0.05), "x", color=MARK, ms=4, mew=1)
    ax.add_patch(Rectangle((-0.5, 0.01), t.patch, drawn - 0.02, fill=False, ec=MARK, lw=1.6, zorder=5))
    ax.set_xlim(-0.5, max(steps - 0.5, t.patch))
    ax.set_ylim(0, drawn)
    ax.set_xlabel("step", size=8.5, color=PALE, labelpad=2)
    return f"patches of {t.patch} steps, stride {t.stride}; {channels} channels" + (
        " (x: missing)" if np.isnan(raw).any() else ""
    )
