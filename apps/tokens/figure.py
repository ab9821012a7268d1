"""Figure of `worldtokens tokens --show`: one panel per source, drawn with matplotlib's Agg backend.

Panels are placed side by side on a page of three squares in width.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from worldtokens.apps.tokens.draw_images import cell_size, contact_sheet, draw_image, draw_video
from worldtokens.apps.tokens.draw_points import draw_points
from worldtokens.apps.tokens.draw_signals import draw_audio, draw_series
from worldtokens.apps.tokens.draw_text import LINE, draw_text, layout_lines
from worldtokens.apps.tokens.inspect import Inspected
from worldtokens.apps.tokens.panel import GAP, HEAD, UNIT, Panel
from worldtokens.errors import InputError
from worldtokens.parts import write_whole

DPI = 150
MOST_PANELS = 24

_DRAW = {
    "image": draw_image,
    "audio": draw_audio,
    "video": draw_video,
    "views": draw_video,
    "points": draw_points,
    "series": draw_series,
    "text": draw_text,
}


def save_figure(sources: Sequence[Inspected], out: str | os.PathLike) -> Path:
    """Draw one panel per source and write them as one PNG.

    Args:
        sources: at least one; of more than 24 the first 24 are drawn.
        out: path of the PNG.

    Raises:
        InputError: the file cannot be written.
    """
    data = io.BytesIO()
    FigureCanvasAgg(draw_figure(sources)).print_png(data)
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, data.getvalue())
    except OSError as e:
        raise InputError(f"{out}: cannot be written: {e.strerror}") from e
    return out


def draw_figure(sources: Sequence[Inspected]) -> Figure:
    """The figure that `save_figure` writes."""
    sources = list(sources)[:MOST_PANELS]
    rows: list[list[tuple[Inspected, int, float]]] = []
    for s in sources:
        units, height = _size(s)
        if not rows or sum(u for _, u, _ in rows[-1]) + units > 3:
            rows.append([])
        rows[-1].append((s, units, height))
    width = max(sum(u for _, u, _ in row) for row in rows)
    heights = [max(h for _, _, h in row) for row in rows]
    fig = Figure(figsize=(width * UNIT, sum(heights)), dpi=DPI, facecolor="white")
    grid = fig.add_gridspec(
        len(rows), width, height_ratios=heights, left=0, right=1, top=1, bottom=0, wspace=0, hspace=0
    )
    for i, (row, height) in enumerate(zip(rows, heights, strict=True)):
        left = 0
        for s, units, _ in row:
            area = fig.add_subfigure(grid[i, left : left + units])
            panel = Panel(area, units * UNIT, height)
            about = _DRAW[s.modality](panel, s)
            panel.heading(
                s.name if s.name.startswith('"') else os.path.basename(s.name), f"{s.count:,} tokens: {about}"
            )
            left += units
    return fig


def _size(s: Inspected) -> tuple[int, float]:
    """(width in units, height in inches) of a source's panel."""
    if s.modality in ("image", "points"):
        return 1, UNIT - GAP + HEAD
    if s.modality == "text":
        # the smallest width with at most three lines
        for units in (1, 2, 3):
            lines = len(layout_lines(s.text_tokens, units * UNIT - 2 * GAP))
            if lines <= 3:
                break
        return units, HEAD + lines * LINE + 2 * GAP
    if s.modality in ("video", "views"):
        columns, rows = contact_sheet(s)
        return 2, HEAD + rows * cell_size(s, (2 * UNIT - GAP) / columns)[2]
    return 2, UNIT - GAP + HEAD
