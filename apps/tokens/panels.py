"""The panels of `worldtokens tokens --show`: how each kind of source is drawn with its tokens.

All sizes here are inches; a panel is a sub-figure that knows its own, so that text and patches can be laid out by
length. Every `draw_*` returns what is to be said of it under its title.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.patches import ConnectionPatch, FancyBboxPatch, Rectangle
from matplotlib.patheffects import withStroke

from worldtokens.apps.tokens.inspect import Piece, Seen

INK, PALE, MARK, COLD = "#181c24", "#687078", "#e4572e", "#2b6cb0"
SOFT = ("#cfe3f7", "#fbdcc7", "#d5efd3", "#e6d9f5", "#fdeeb5", "#d3eff0", "#f8d3de")
UNIT, HEAD, GAP = 4.2, 0.62, 0.16  # width of a square panel, height of a heading, space around
MOST_MARKS = 80  # boundaries that a whole sound can show; more are shown by a cut-out of it
CLOSE = 24  # tokens of that cut-out


class Panel:
    """A part of the page, `width` x `height` inches, with its origin at the top left."""

    def __init__(self, area: Any, width: float, height: float) -> None:
        self.area, self.width, self.height = area, width, height

    def axes(self, left: float, top: float, width: float, height: float, bare: bool = True) -> Any:
        ax = self.area.add_axes(
            [left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height]
        )
        if bare:
            ax.set_axis_off()
        else:
            ax.tick_params(labelsize=8, colors=PALE, length=3)
            for side in ax.spines.values():
                side.set_color("#c5cad1")
        return ax

    def heading(self, title: str, about: str) -> None:
        letters = int((self.width - 2 * GAP) / 0.112)
        title = title if len(title) <= letters else title[: letters - 1] + "…"
        x, y = GAP / self.width, 1 - 0.15 / self.height
        self.area.text(x, y, plain(title), size=12.5, weight="bold", color=INK, va="top", parse_math=False)
        y = 1 - 0.37 / self.height
        self.area.text(x, y, about, size=9.5, color=PALE, va="top", parse_math=False)


def plain(text: str) -> str:
    """The text with what the font lacks spelled as code points, so that no empty box stands for it."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap()
    return "".join(c if ord(c) in known else f"U+{ord(c):X}" for c in text)


def _cut_lines(ax: Any, at: Sequence[float], low: float, high: float, along: str, width: float = 0.8) -> None:
    """White lines on a dark shadow, to be seen on bright and dark images alike."""
    draw = ax.vlines if along == "y" else ax.hlines
    draw(at, low, high, colors="black", linewidth=2.2 * width, alpha=0.22)
    draw(at, low, high, colors="white", linewidth=width, alpha=0.9)


def _number(ax: Any, x: float, y: float, text: str, size: float, **options) -> None:
    stroke = [withStroke(linewidth=1.6, foreground="black", alpha=0.75)]
    ax.text(x, y, text, size=size, color="white", va="center", ha="center", path_effects=stroke, **options)


def _pixels(x: Any) -> np.ndarray:
    """(3, H, W) uint8 tensor -> (H, W, 3)."""
    return np.ascontiguousarray(x.permute(1, 2, 0).numpy())


# ---- images ------------------------------------------------------------------------------------------------


def draw_image(panel: Panel, s: Seen) -> str:
    from worldtokens.tokenizers.patches import unpatchify

    t, raw = s.tokenizer, _pixels(s.raw)
    (ph, pw), (rows, columns) = t.patch, s.grid
    h, w = rows * ph, columns * pw
    tall, wide = t.resized_size(*raw.shape[:2])  # the whole image at the scale of the patches
    if t.size is None:
        top = left = 0
        inside = _pixels(unpatchify(s.batch["patches"], t.patch, s.grid)[0])
    else:
        top, left = round((tall - t.size[0]) / 2), round((wide - t.size[1]) / 2)
        inside = _pixels(s.batch["pixels"][0])
    ax = panel.axes(GAP, HEAD, panel.width - 2 * GAP, min(panel.height, UNIT - GAP + HEAD) - HEAD - GAP)
    pale = (0.3 * raw + 0.7 * 255).astype(np.uint8)
    ax.imshow(pale, extent=(-left, wide - left, tall - top, -top), interpolation="antialiased")
    ax.imshow(inside, extent=(0, inside.shape[1], inside.shape[0], 0), interpolation="antialiased")
    thin = 0.8 if rows * columns <= 400 else 0.4
    _cut_lines(ax, np.arange(columns + 1) * pw, 0, h, "y", thin)
    _cut_lines(ax, np.arange(rows + 1) * ph, 0, w, "x", thin)
    if max(rows, columns) <= 16:
        for k in [*range(columns), rows * columns - 1] if rows > 1 else range(columns):
            _number(ax, (k % columns + 0.5) * pw, (k // columns + 0.5) * ph, str(k), 6.2)
    ax.set_anchor("NW")
    ax.set_xlim(min(0, -left), max(w, wide - left))
    ax.set_ylim(max(h, tall - top), min(0, -top))
    about = f"{rows} x {columns} patches of {ph} x {pw} px"
    lost = 1 - min(1, t.size[0] / tall) * min(1, t.size[1] / wide) if t.size else 0
    if lost > 0.005:
        about += f", {100 * lost:.0f}% cut off"
    if (h, w) != inside.shape[:2] or (t.size is None and (h, w) != (tall, wide)):
        about += ", edge repeated"
    return about


# ---- sound ---------------------------------------------------------------------------------------------------


def draw_audio(panel: Panel, s: Seen) -> str:
    t, columns = s.tokenizer, s.grid[0]
    step, few = t.token_seconds, columns <= MOST_MARKS
    inner, left = panel.width - 2 * GAP - 0.45, GAP + 0.45
    room = min(panel.height, UNIT - GAP + HEAD) - HEAD - 0.45
    ax = panel.axes(left, HEAD, inner, room if few else 0.5 * room, bare=False)
    end = _sound(ax, s)
    ax.set_xlim(0, end)
    if few:
        _tokens_of_sound(ax, s, range(columns))
    else:
        first = _loudest(s, columns)
        low = panel.axes(left, HEAD + 0.5 * room + 0.55, inner, 0.5 * room - 0.55, bare=False)
        _sound(low, s)
        low.set_xlim(first * step, (first + CLOSE) * step)
        _tokens_of_sound(low, s, range(first, first + CLOSE))
        bottom, top = ax.get_ylim()
        box = Rectangle(
            (first * step, bottom), CLOSE * step, top - bottom, fill=False, ec=MARK, lw=1.6, zorder=5
        )
        ax.add_patch(box)
        for here, there in ((first, 0), (first + CLOSE, 1)):
            line = ConnectionPatch(
                (here * step, bottom), (there, 1), ax.transData, low.transAxes, color=MARK, lw=1
            )
            panel.area.add_artist(line)
        for side in low.spines.values():
            side.set_color(MARK)
        ax = low
    ax.set_xlabel("seconds", size=8.5, color=PALE, labelpad=2)
    if t.spectrogram is None:
        return f"one every {1000 * step:.3g} ms, from the wave itself"
    what = f"one every {1000 * step:.3g} ms"
    if len(s.grid) > 1:
        (frames, bands), (dt, dy) = t.stem.patch, t.stem.stride
        what = f"{s.grid[0]} x {s.grid[1]} patches of {frames} frames x {bands} bands, every {dt} x {dy}"
    return f"{what}, log-mel of {t.spectrogram.n_mels} bands ({t.preset})"


def _sound(ax: Any, s: Seen) -> float:
    """The spectrum that the stem sees, or the wave; returns where it ends, in seconds."""
    t = s.tokenizer
    if t.spectrogram is None:
        x = s.raw.numpy()
        step = max(1, len(x) // 4000)  # each stroke from the lowest to the highest of its samples
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


def _tokens_of_sound(ax: Any, s: Seen, which: range) -> None:
    t, step = s.tokenizer, s.tokenizer.token_seconds
    low, high = ax.get_ylim()
    if t.spectrogram is None:
        ax.vlines([k * step for k in [*which, which.stop]], low, high, color=PALE, lw=0.6, alpha=0.7)
    else:
        _cut_lines(ax, [k * step for k in [*which, which.stop]], low, high, "y", 0.6)
    if len(s.grid) > 1:
        (frames, bands), (_, dy) = t.stem.patch, t.stem.stride
        _cut_lines(
            ax, [k * dy for k in range(s.grid[1] + 1)], which.start * step, which.stop * step, "x", 0.6
        )
        wide = frames * t.spectrogram.hop_length / t.sample_rate
        ax.add_patch(Rectangle((which.start * step, 0), wide, bands, fill=False, ec=MARK, lw=1.8, zorder=5))
    else:
        for k in which[:: max(1, len(which) // 24)]:
            _number(ax, (k + 0.5) * step, low + 0.965 * (high - low), str(k), 6)
    ax.set_ylim(low, high)


def _loudest(s: Seen, columns: int) -> int:
    """Where a cut-out of the sound shows most: its loudest stretch."""
    energy = s.raw.double().square().cumsum(0).numpy()
    edge = np.minimum(np.arange(columns + 1) * s.tokenizer.samples_per_token, len(energy) - 1)
    total = energy[edge]
    return int(np.argmax(total[CLOSE:] - total[:-CLOSE]))


# ---- clips and scenes ----------------------------------------------------------------------------------------

MOST_CELLS = 12
SHIFT = 0.1  # how far the frames of a tubelet stand behind each other


def _cells(s: Seen) -> list[int]:
    """Which steps of a clip, or views of a scene, are drawn."""
    n = s.grid[0]
    return sorted({round(i * (n - 1) / max(1, min(n, MOST_CELLS) - 1)) for i in range(min(n, MOST_CELLS))})


def sheet(s: Seen) -> tuple[int, int]:
    """(columns, rows) of the contact sheet."""
    n = len(_cells(s))
    columns = min(4, n) if n != 5 and n != 6 else 3
    return max(columns, 2), -(-n // max(columns, 2))


def cell_size(s: Seen, width: float) -> tuple[float, float, float]:
    """(width and height of a frame, height of its cell with the line below) in a cell of a width."""
    h, w = s.raw.shape[2:] if s.modality == "video" else s.tokenizer.size
    behind = SHIFT * (min(s.tokenizer.tubelet[0], 4) - 1) if s.modality == "video" else 0.0
    inner = width - GAP - behind
    high = inner * min(2.0, max(0.4, h / w))
    return inner, high, high + behind + 0.34


def draw_clip(panel: Panel, s: Seen) -> str:
    t, (_, rows, columns) = s.tokenizer, s.grid
    video = s.modality == "video"
    pt, ph, pw = t.tubelet if video else (1, *t.patch)
    frames = s.raw if video else t.images(s.raw)
    wide, _ = sheet(s)
    cell_w = (panel.width - GAP) / wide
    behind = min(pt, 4) - 1  # frames of a tubelet that look out from behind its first
    inner_w, inner_h, cell_h = cell_size(s, cell_w)
    chosen = _cells(s)
    for place, step in enumerate(chosen):
        left, top = GAP + place % wide * cell_w, HEAD + place // wide * cell_h
        for k in reversed(range(behind + 1)):
            frame = _pixels(frames[min(step * pt + k, len(frames) - 1)])
            h, w = frame.shape[:2]
            ax = panel.axes(left + SHIFT * k, top + SHIFT * (behind - k), inner_w, inner_h)
            ax.imshow(frame, interpolation="antialiased", aspect="auto")
            ax.add_patch(Rectangle((0, 0), w, h, fill=False, ec="white", lw=2.5))
            if k == 0:
                thin = 0.5 if rows * columns <= 400 else 0.15
                _cut_lines(ax, np.arange(1, columns) * pw, 0, h, "y", thin)
                _cut_lines(ax, np.arange(1, rows) * ph, 0, w, "x", thin)
                y, x = rows // 2, columns // 2
                ax.add_patch(Rectangle((x * pw, y * ph), pw, ph, fill=False, ec=MARK, lw=1.8, zorder=5))
            ax.set_xlim(0, w)
            ax.set_ylim(h, 0)
        if video:
            stamp = float(s.batch["micros"][0, step * rows * columns]) / 1e6
            label = f"step {step} at {stamp:.2f} s"
        else:
            label = f"view {step}"
        y = top + SHIFT * behind + inner_h + 0.04
        panel.area.text(left / panel.width, 1 - y / panel.height, label, size=8, color=PALE, va="top")
    some = f" ({len(chosen)} of {s.grid[0]} steps shown)" if len(chosen) < s.grid[0] else ""
    if not video:
        return (
            f"{s.grid[0]} view{'s' * (s.grid[0] != 1)} of {rows} x {columns} patches, with their rays{some}"
        )
    return f"{s.grid[0]} x {rows} x {columns} tubelets of {pt} frames x {ph} x {pw} px{some}"


# ---- points --------------------------------------------------------------------------------------------------


def draw_points(panel: Panel, s: Seen) -> str:
    xyz, centres, owner = owners(s)
    patches = len(centres)
    up = [0, 2, 1] if s.name.lower().endswith(".stl") else [0, 1, 2]  # printers' files have z upward
    mirror = np.array([1, 1, -1 if up == [0, 2, 1] else 1])
    flat = _turned(np.concatenate([xyz, centres])[:, up] * mirror)
    dots, hubs = flat[: len(xyz)], flat[len(xyz) :]
    hues = np.arange(patches) * 0.61803398875 % 1  # neighbours in number far apart in colour
    colours = _hsv(hues, 0.72, np.where(np.arange(patches) % 2, 0.88, 0.7))[owner]
    depth = (dots[:, 2] - dots[:, 2].min()) / max(1e-6, np.ptp(dots[:, 2]))
    colours = colours * (0.35 + 0.65 * depth[:, None]) + 0.65 * (1 - depth[:, None])
    ax = panel.axes(GAP, HEAD, panel.width - 2 * GAP, min(panel.height, UNIT - GAP + HEAD) - HEAD - GAP)
    seen = _in_front(dots)
    order = np.flatnonzero(seen)[np.argsort(dots[seen, 2])]  # from the back to the front
    spokes = np.stack([dots[order, :2], hubs[owner[order], :2]], 1)
    ax.add_collection(LineCollection(spokes, colors=colours[order], linewidths=0.9, alpha=0.55))
    ax.scatter(
        dots[order, 0], dots[order, 1], s=9 + 13 * depth[order], c=colours[order], linewidths=0, zorder=3
    )
    at_hub = ((dots[:, None] - hubs) ** 2).sum(-1).argmin(0)  # a centre is one of the points
    near = np.flatnonzero(seen[at_hub])
    ax.scatter(
        hubs[near, 0], hubs[near, 1], s=24, facecolors="white", edgecolors=INK, linewidths=1.1, zorder=5
    )
    ax.set_aspect("equal")
    ax.margins(0.04)
    return f"each {s.grid[1]} of {len(xyz):,} points; colour: nearest centre"


def owners(s: Seen) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The cloud as the front-end has it (n, 3), its patches' centres (G, 3), and each point's nearest centre (n,)."""
    import torch

    xyz = s.batch["bits"].view(torch.float32)[0, :, :3].numpy()
    centres = s.tokens.pos[0].flip(-1).numpy() / s.tokenizer.pos_scale  # pos is (z, y, x)
    return xyz, centres, ((xyz[:, None] - centres) ** 2).sum(-1).argmin(1)


def _in_front(dots: np.ndarray) -> np.ndarray:
    """Which points are not hidden by the surface in front of them: (n,) bool."""
    size = np.ptp(dots, axis=0).max() or 1.0
    apart = np.hypot(*(dots[:, None, :2] - dots[None, :, :2]).transpose(2, 0, 1))
    covers = (apart < 0.05 * size) & (dots[None, :, 2] - dots[:, None, 2] > 0.1 * size)
    return covers.sum(1) < 2


def _turned(xyz: np.ndarray) -> np.ndarray:
    """Seen from the front, a little from the right and above: (n, 3) with depth last, near is high."""
    a, b = np.radians(-28), np.radians(18)
    x, z = np.cos(a) * xyz[:, 0] + np.sin(a) * xyz[:, 2], -np.sin(a) * xyz[:, 0] + np.cos(a) * xyz[:, 2]
    return np.stack([x, np.cos(b) * xyz[:, 1] - np.sin(b) * z, np.sin(b) * xyz[:, 1] + np.cos(b) * z], 1)


def _hsv(h: np.ndarray, s: float, v: np.ndarray) -> np.ndarray:
    from matplotlib.colors import hsv_to_rgb

    return hsv_to_rgb(np.stack([h, np.full_like(h, s), v], -1))


# ---- series --------------------------------------------------------------------------------------------------


def draw_series(panel: Panel, s: Seen) -> str:
    t, raw = s.tokenizer, s.raw.numpy()
    channels, steps = raw.shape
    drawn = min(channels, 8)
    room = min(panel.height, UNIT - GAP + HEAD) - HEAD - 0.45
    ax = panel.axes(GAP + 0.15, HEAD, panel.width - 2 * GAP - 0.15, room, bare=False)
    ax.set_yticks([])
    patches = s.tokens.pos[0, :, 0].int().unique().tolist()
    for k in patches:  # patches overlap, so a shade is what one adds; the last goes on to its end
        end = k * t.stride + (t.patch if k == patches[-1] else t.stride) - 0.5
        ax.axvspan(k * t.stride - 0.5, end, color=SOFT[k % 2], lw=0, alpha=0.6)
    for c in range(drawn):
        low, high = np.nanmin(raw[c]), np.nanmax(raw[c])
        y = (raw[c] - low) / (high - low if high > low else 1) * 0.8 + (drawn - 1 - c) + 0.1
        ax.plot(np.arange(steps), y, color=COLD, lw=1.3, marker="o" if steps <= 60 else None, ms=2.5)
        gone = np.flatnonzero(np.isnan(raw[c]))
        ax.plot(gone, np.full(len(gone), drawn - 1 - c + 0.05), "x", color=MARK, ms=4, mew=1)
    ax.add_patch(Rectangle((-0.5, 0.01), t.patch, drawn - 0.02, fill=False, ec=MARK, lw=1.6, zorder=5))
    ax.set_xlim(-0.5, max(steps - 0.5, t.patch))
    ax.set_ylim(0, drawn)
    ax.set_xlabel("step", size=8.5, color=PALE, labelpad=2)
    return f"patches of {t.patch} steps, every {t.stride}; {channels} channels" + (
        " (x: missing)" if np.isnan(raw).any() else ""
    )


# ---- text ----------------------------------------------------------------------------------------------------

LINE, SIZE, EM = 0.52, 13, 0.602  # height of a line of boxes, font size in points, width of a letter in ems
MOST_LINES = 14


def _words(p: Piece) -> str:
    if p.part:
        return p.text
    text = "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, repr(c)[1:-1]) for c in p.text)
    return plain(text.replace(" ", "␣")) or "∅"


def set_lines(pieces: Sequence[Piece], width: float) -> list[list[tuple[Piece, str, float, float]]]:
    """Lines of (piece, its words, left, width), in inches."""
    letter, lines, x = SIZE / 72 * EM, [[]], 0.0
    for p in pieces:
        text = _words(p)
        most = int((width - 0.16) / letter)
        text = text if len(text) <= most else text[: most - 1] + "…"
        wide = max(len(text) * letter + 0.12, len(str(p.id)) * 0.068 + 0.08)
        if x + wide > width and lines[-1]:
            lines.append([])
            x = 0.0
        lines[-1].append((p, text, x, wide))
        x += wide + (0.13 if p.ends else 0.02)
    return lines[:MOST_LINES]


def draw_text(panel: Panel, s: Seen) -> str:
    ax = panel.axes(GAP, HEAD, panel.width - 2 * GAP, panel.height - HEAD)
    ax.set_xlim(0, panel.width - 2 * GAP)
    ax.set_ylim(panel.height - HEAD, 0)
    lines, number = set_lines(s.pieces, panel.width - 2 * GAP), 0
    for row, line in enumerate(lines):
        for p, words, left, wide in line:
            colour = "#e3e6ea" if p.special else SOFT[number % len(SOFT)]
            box = FancyBboxPatch((left + 0.03, row * LINE + 0.03), wide - 0.06, 0.25, boxstyle="round,pad=0.03",
                                 fc=colour, ec="none")  # fmt: skip
            ax.add_patch(box)
            ink = PALE if p.special else INK
            ax.text(left + wide / 2, row * LINE + 0.155, words, size=SIZE, family="DejaVu Sans Mono", color=ink,
                    ha="center", va="center_baseline", parse_math=False)  # fmt: skip
            ax.text(
                left + wide / 2, row * LINE + 0.385, str(p.id), size=6.5, color=PALE, ha="center", va="center"
            )
            number += not p.special
    shown = sum(map(len, lines))
    return s.source + (f"; the first {shown:,} are shown" if shown < s.count else "")
