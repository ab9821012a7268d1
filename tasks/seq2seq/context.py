"""Tokens of several columns made one context: rows that lack a column, and no padding between the parts.

Shapes: B rows, K tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worldtokens.layout import Layout
from worldtokens.tokens import Tokens


def spread(tokens: Tokens, places: Sequence[int] | None, rows: int) -> Tokens:
    """Tokens of some rows -> of all `rows`, nothing valid in the others.

    Args:
        tokens: (len(places), K, D).
        places: which rows they are, or None for all in order.
    """
    if places is None:
        return tokens
    at = torch.tensor(places, device=tokens.device)
    fields = {
        name: None if v is None else v.new_zeros(rows, *v.shape[1:]).index_copy(0, at, v)
        for name, v in tokens.fields().items()
    }
    layout = tokens.layout
    if layout is not None:
        lengths = dict(zip(places, layout.lengths, strict=True))
        layout = Layout(tuple(lengths.get(i, ()) for i in range(rows)), layout.order)
    return Tokens(**fields, layout=layout)


def beside(parts: Sequence[Tokens], follow: bool = False) -> Tokens:
    """`Tokens.cat` with the padding between the parts taken out, so that the fast ways of reading stay open."""
    joined = Tokens.cat(*parts, follow=follow)
    layouts = [p.layout for p in parts]
    if joined.layout is not None or any(la is None or not la.single for la in layouts):
        return joined
    places, at = [[] for _ in range(len(joined))], 0
    for part, layout in zip(parts, layouts, strict=True):
        for row, lengths in zip(places, layout.lengths, strict=True):
            row += range(at, at + sum(lengths))
        at += part.shape[1]
    counts = [len(row) for row in places]
    longest = max(counts)
    # what fills a row up is taken from its own first place and is not valid
    index = torch.tensor([row + [0] * (longest - len(row)) for row in places], device=joined.device)
    index = index.view(len(places), longest).long()
    fields = {}
    for name, v in joined.fields().items():
        if v is not None:
            wide = index if v.ndim == 2 else index[..., None].expand(-1, -1, v.shape[-1])
            fields[name] = v.gather(1, wide)
    fields["valid"] = torch.arange(longest, device=joined.device) < torch.tensor(
        counts, device=joined.device
    ).unsqueeze(1)
    kept = "causal" if follow else "bidirectional"  # the order that all parts' own add up to
    order = kept if {la.order for la in layouts} == {kept} else "any"
    return Tokens(**fields, layout=Layout.simple(counts, order))
