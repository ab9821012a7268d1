"""`Panel`, a sub-figure with a size in inches, and what all drawings of `worldtokens tokens --show` share.

Sizes are in inches, so that text and patches can be laid out by length. Every `draw_*` function draws one source with its
tokens into a panel and returns its description.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.patheffects import withStroke

INK, PALE, MARK, COLD = "#181c24", "#687078", "#e4572e", "#2b6cb0"
SOFT = ("#cfe3f7", "#fbdcc7", "#d5efd3", "#e6d9f5", "#fdeeb5", "#d3eff0", "#f8d3de")
UNIT, HEAD, GAP = 4.2, 0.62, 0.16  # width of a square panel, height of a heading, margin


class Panel:
    """A sub-figure of `width` x `height` inches, with its origin at the top left."""

    def __init__(self, area: Any, width: float, height: float) -> None:
        self.area, self.width, self.height = area, width, height

    def axes(self, left: float, top: float, width: float, height: float, bare: bool = True) -> Any:
        """Axes at a position in inches; `bare` hides ticks and spines."""
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
        """Title, truncated to the width, and a line of description."""
        letters = int((self.width - 2 * GAP) / 0.112)
        title = title if len(title) <= letters else title[: letters - 1] + "…"
        x, y = GAP / self.width, 1 - 0.15 / self.height
        self.area.text(x, y, plain(title), size=12.5, weight="bold", color=INK, va="top", parse_math=False)
        y = 1 - 0.37 / self.height
        self.area.text(x, y, about, size=9.5, color=PALE, va="top", parse_math=False)


def plain(text: str) -> str:
    """The text with characters that the font lacks replaced by code points (``U+1F34E``)."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap()
    return "".join(c if ord(c) in known else f"U+{ord(c):X}" for c in text)


def grid_lines(ax: Any, at: Sequence[float], low: float, high: float, along: str, width: float = 0.8) -> None:
    """White lines with a dark shadow, visible on bright and dark images."""
    draw = ax.vlines if along == "y" else ax.hlines
    draw(at, low, high, colors="black", linewidth=2.2 * width, alpha=0.22)
    draw(at, low, high, colors="white", linewidth=width, alpha=0.9)


def number(ax: Any, x: float, y: float, text: str, size: float, **options) -> None:
    """A number in white with a dark outline."""
    stroke = [withStroke(linewidth=1.6, foreground="black", alpha=0.75)]
    ax.text(x, y, text, size=size, color="white", va="center", ha="center", path_effects=stroke, **options)


def to_pixels(x: Any) -> np.ndarray:
    """(3, H, W) uint8 tensor -> (H, W, 3)."""
    return np.ascontiguousarray(x.permute(1, 2, 0).numpy())
