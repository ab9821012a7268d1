"""Concatenation of the tokens of several columns into one context, without padding in between.

Shapes: B rows, K tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worldtokens.layout import Layout
from worldtokens.tokens import Tokens


def scatter_rows(tokens: Tokens, row_indices: Sequence[int] | None, rows: int) -> Tokens:
    """Tokens of some rows -> tokens of all rows; the other rows have no valid token.

    Args:
        tokens: (len(row_indices), K, D).
        row_indices: the rows that the tokens belong to, or None for all rows in order.
        rows: number of rows.
    """
    if row_indices is None:
        return tokens
    index = torch.tensor(row_indices, device=tokens.device)
    fields = {
        name: None if v is None else v.new_zeros(rows, *v.shape[1:]).index_copy(0, index, v)
        for name, v in tokens.fields().items()
    }
    layout = tokens.layout
    if layout is not None:
        lengths = dict(zip(row_indices, layout.lengths, strict=True))
        layout = Layout(tuple(lengths.get(i, ()) for i in range(rows)), layout.order)
    return Tokens(**fields, layout=layout)


def concat_tokens(parts: Sequence[Tokens], sequential: bool = False) -> Tokens:
    """`Tokens.cat` without padding between the parts, so that attention can use its fast paths."""
    joined = Tokens.cat(*parts, sequential=sequential)
    layouts = [p.layout for p in parts]
    if joined.layout is not None or any(la is None or not la.single for la in layouts):
        return joined
    positions, start = [[] for _ in range(len(joined))], 0
    for part, layout in zip(parts, layouts, strict=True):
        for row, lengths in zip(positions, layout.lengths, strict=True):
            row += range(start, start + sum(lengths))
        start += part.shape[1]
    counts = [len(row) for row in positions]
    longest = max(counts)
    # padding repeats the row's first position and is not valid
    index = torch.tensor([row + [0] * (longest - len(row)) for row in positions], device=joined.device)
    index = index.view(len(positions), longest).long()
    fields = {}
    for name, v in joined.fields().items():
        if v is not None:
            wide = index if v.ndim == 2 else index[..., None].expand(-1, -1, v.shape[-1])
            fields[name] = v.gather(1, wide)
    fields["valid"] = torch.arange(longest, device=joined.device) < torch.tensor(
        counts, device=joined.device
    ).unsqueeze(1)
    order = "causal" if sequential else "bidirectional"  # if all parts have it
    order = order if {la.order for la in layouts} == {order} else "any"
    return Tokens(**fields, layout=Layout.simple(counts, order))
