"""Drawing of a text as boxes of its tokens and their ids."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import FancyBboxPatch

from worldtokens.apps.tokens.inspect import Inspected, TextToken
from worldtokens.apps.tokens.panel import GAP, HEAD, INK, PALE, SOFT, Panel, plain

LINE, SIZE, EM = 0.52, 13, 0.602  # height of a line of boxes, font size in points, character width in ems
MOST_LINES = 14


def _printable(p: TextToken) -> str:
    if p.partial:
        return p.text
    text = "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, repr(c)[1:-1]) for c in p.text)
    return plain(text.replace(" ", "␣")) or "∅"


def layout_lines(
    tokens: Sequence[TextToken], width: float
) -> list[list[tuple[TextToken, str, float, float]]]:
    """Lines of (token, its printable text, left, width), in inches."""
    letter, lines, x = SIZE / 72 * EM, [[]], 0.0
    for p in tokens:
        text = _printable(p)
        limit = int((width - 0.16) / letter)
        text = text if len(text) <= limit else text[: limit - 1] + "…"
        box_width = max(len(text) * letter + 0.12, len(str(p.id)) * 0.068 + 0.08)
        if x + box_width > width and lines[-1]:
            lines.append([])
            x = 0.0
        lines[-1].append((p, text, x, box_width))
        x += box_width + (0.13 if p.ends_word else 0.02)
    return lines[:MOST_LINES]


def draw_text(panel: Panel, s: Inspected) -> str:
    """A box per token with its text and id."""
    ax = panel.axes(GAP, HEAD, panel.width - 2 * GAP, panel.height - HEAD)
    ax.set_xlim(0, panel.width - 2 * GAP)
    ax.set_ylim(panel.height - HEAD, 0)
    lines, number = layout_lines(s.text_tokens, panel.width - 2 * GAP), 0
    for row, line in enumerate(lines):
        for p, label, left, box_width in line:
            colour = "#e3e6ea" if p.special else SOFT[number % len(SOFT)]
            box = FancyBboxPatch((left + 0.03, row * LINE + 0.03), box_width - 0.06, 0.25, boxstyle="round,pad=0.03",
                                 fc=colour, ec="none")  # fmt: skip
            ax.add_patch(box)
            ink = PALE if p.special else INK
            ax.text(left + box_width / 2, row * LINE + 0.155, label, size=SIZE, family="DejaVu Sans Mono", color=ink,
                    ha="center", va="center_baseline", parse_math=False)  # fmt: skip
            ax.text(
                left + box_width / 2,
                row * LINE + 0.385,
                str(p.id),
                size=6.5,
                color=PALE,
                ha="center",
                va="center",
            )
            number += not p.special
    shown = sum(map(len, lines))
    return s.source + (f"; first {shown:,} shown" if shown < s.count else "")
