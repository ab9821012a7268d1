"""Drawings of images, videos and scenes with their patches and tubelets."""

from __future__ import annotations

import numpy as np
from matplotlib.patches import Rectangle

from worldtokens.apps.tokens.inspect import Inspected
from worldtokens.apps.tokens.panel import GAP, HEAD, MARK, PALE, UNIT, Panel, grid_lines, number, to_pixels

MOST_CELLS = 12  # frames of a contact sheet
SHIFT = 0.1  # offset between the frames of a tubelet


def draw_image(panel: Panel, s: Inspected) -> str:
    """The image with the grid of its patches; what the crop removes is pale."""
    from worldtokens.tokenizers.patches import unpatchify

    t, raw = s.tokenizer, to_pixels(s.raw)
    (ph, pw), (rows, columns) = t.patch, s.grid
    h, w = rows * ph, columns * pw
    full_h, full_w = t.resized_size(*raw.shape[:2])  # size of the whole image after resizing
    if t.size is None:
        top = left = 0
        inside = to_pixels(unpatchify(s.batch["patches"], t.patch, s.grid)[0])
    else:
        top, left = round((full_h - t.size[0]) / 2), round((full_w - t.size[1]) / 2)
        inside = to_pixels(s.batch["pixels"][0])
    ax = panel.axes(GAP, HEAD, panel.width - 2 * GAP, min(panel.height, UNIT - GAP + HEAD) - HEAD - GAP)
    pale = (0.3 * raw + 0.7 * 255).astype(np.uint8)
    ax.imshow(pale, extent=(-left, full_w - left, full_h - top, -top), interpolation="antialiased")
    ax.imshow(inside, extent=(0, inside.shape[1], inside.shape[0], 0), interpolation="antialiased")
    thin = 0.8 if rows * columns <= 400 else 0.4
    grid_lines(ax, np.arange(columns + 1) * pw, 0, h, "y", thin)
    grid_lines(ax, np.arange(rows + 1) * ph, 0, w, "x", thin)
    if max(rows, columns) <= 16:
        for k in [*range(columns), rows * columns - 1] if rows > 1 else range(columns):
            number(ax, (k % columns + 0.5) * pw, (k // columns + 0.5) * ph, str(k), 6.2)
    ax.set_anchor("NW")
    ax.set_xlim(min(0, -left), max(w, full_w - left))
    ax.set_ylim(max(h, full_h - top), min(0, -top))
    about = f"{rows} x {columns} patches of {ph} x {pw} px"
    cropped = 1 - min(1, t.size[0] / full_h) * min(1, t.size[1] / full_w) if t.size else 0
    if cropped > 0.005:
        about += f", {100 * cropped:.0f}% cropped"
    if (h, w) != inside.shape[:2] or (t.size is None and (h, w) != (full_h, full_w)):
        about += ", edges padded by repetition"
    return about


# ---- videos and scenes ----------------------------------------------------------------------------------------


def _cells(s: Inspected) -> list[int]:
    """Indices of the time steps of a video, or views of a scene, that are drawn."""
    n = s.grid[0]
    return sorted({round(i * (n - 1) / max(1, min(n, MOST_CELLS) - 1)) for i in range(min(n, MOST_CELLS))})


def contact_sheet(s: Inspected) -> tuple[int, int]:
    """(columns, rows) of the contact sheet of a video or scene."""
    n = len(_cells(s))
    columns = min(4, n) if n != 5 and n != 6 else 3
    return max(columns, 2), -(-n // max(columns, 2))


def cell_size(s: Inspected, width: float) -> tuple[float, float, float]:
    """(width and height of a frame, height of its cell with the label) in a cell of `width` inches."""
    h, w = s.raw.shape[2:] if s.modality == "video" else s.tokenizer.size
    behind = SHIFT * (min(s.tokenizer.tubelet[0], 4) - 1) if s.modality == "video" else 0.0
    inner = width - GAP - behind
    high = inner * min(2.0, max(0.4, h / w))
    return inner, high, high + behind + 0.34


def draw_video(panel: Panel, s: Inspected) -> str:
    """Frames of a video or views of a scene with the grid of their patches; the frames of a tubelet are stacked."""
    t, (_, rows, columns) = s.tokenizer, s.grid
    video = s.modality == "video"
    pt, ph, pw = t.tubelet if video else (1, *t.patch)
    frames = s.raw if video else t.images(s.raw)
    columns_drawn, _ = contact_sheet(s)
    cell_w = (panel.width - GAP) / columns_drawn
    behind = min(pt, 4) - 1  # frames of a tubelet visible behind its first one
    inner_w, inner_h, cell_h = cell_size(s, cell_w)
    chosen = _cells(s)
    for i, step in enumerate(chosen):
        left, top = GAP + i % columns_drawn * cell_w, HEAD + i // columns_drawn * cell_h
        for k in reversed(range(behind + 1)):
            frame = to_pixels(frames[min(step * pt + k, len(frames) - 1)])
            h, w = frame.shape[:2]
            ax = panel.axes(left + SHIFT * k, top + SHIFT * (behind - k), inner_w, inner_h)
            ax.imshow(frame, interpolation="antialiased", aspect="auto")
            ax.add_patch(Rectangle((0, 0), w, h, fill=False, ec="white", lw=2.5))
            if k == 0:
                thin = 0.5 if rows * columns <= 400 else 0.15
                grid_lines(ax, np.arange(1, columns) * pw, 0, h, "y", thin)
                grid_lines(ax, np.arange(1, rows) * ph, 0, w, "x", thin)
                y, x = rows // 2, columns // 2
                ax.add_patch(Rectangle((x * pw, y * ph), pw, ph, fill=False, ec=MARK, lw=1.8, zorder=5))
            ax.set_xlim(0, w)
            ax.set_ylim(h, 0)
        if video:
            stamp = float(s.batch["micros"][0, step * rows * columns]) / 1e6
            label = f"step {step}, {stamp:.2f} s"
        else:
            label = f"view {step}"
        y = top + SHIFT * behind + inner_h + 0.04
        panel.area.text(left / panel.width, 1 - y / panel.height, label, size=8, color=PALE, va="top")
    some = f" ({len(chosen)} of {s.grid[0]} steps shown)" if len(chosen) < s.grid[0] else ""
    if not video:
        return f"{s.grid[0]} view{'s' * (s.grid[0] != 1)} of {rows} x {columns} patches with their rays{some}"
    return f"{s.grid[0]} x {rows} x {columns} tubelets of {pt} frames x {ph} x {pw} px{some}"
