"""Concatenating, stacking, splitting and packing of samples: the implementation of `Tokens.cat`, `stack`, `split`, `pack`.

Functions work on the tensors of `Tokens.fields` and on layouts. Shapes: B rows, N tokens per row, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.layout import Layout

Fields = dict[str, Any]  # tensors by name; `ids` may be None


def cat(parts: Sequence[Fields], sequential: bool = False) -> Fields:
    """Concatenate sequences row by row; see `Tokens.cat`."""
    if sequential:
        parts = _renumber(parts)
    out: Fields = {}
    for name in parts[0]:
        values = [p[name] for p in parts]
        if name == "ids" and any(v is not None for v in values):
            values = [v if v is not None else _no_ids(p["x"]) for v, p in zip(values, parts, strict=True)]
        out[name] = None if values[0] is None else torch.cat(values, 1)
    return out


def _no_ids(x: Tensor) -> Tensor:
    return torch.full(x.shape[:2], -1, dtype=torch.int64, device=x.device)


def _renumber(parts: Sequence[Fields]) -> list[Fields]:
    """Offset the block and t of each part by those of the parts before it."""
    out, block_end, t_end = [], None, None
    for p in parts:
        if block_end is not None:
            pos = p["pos"].clone()
            pos[..., 0] += t_end[:, None]
            p = {**p, "block": p["block"] + block_end[:, None], "pos": pos}
        out.append(p)
        low = torch.iinfo(torch.int32).min
        if p["x"].shape[1]:
            ends = p["block"].masked_fill(~p["valid"], low).amax(1) + 1
            times = p["pos"][..., 0].masked_fill(~p["valid"], -torch.inf).amax(1).floor() + 1
            some = p["valid"].any(1)
            if block_end is None:
                block_end, t_end = torch.zeros_like(ends), torch.zeros_like(times)
            block_end, t_end = torch.where(some, ends, block_end), torch.where(some, times, t_end)
        elif block_end is None:
            block_end = torch.zeros(len(p["x"]), dtype=torch.int32, device=p["x"].device)
            t_end = torch.zeros(len(p["x"]), dtype=torch.float32, device=p["x"].device)
    return out


def cat_layout(
    layouts: Sequence[Layout | None], widths: Sequence[int], sequential: bool = False
) -> Layout | None:
    """The layout of concatenated parts: known if only the last part can have padding."""
    if any(la is None or la.dynamic or not la.single for la in layouts):
        return None
    if not all(la.full(n) for la, n in zip(layouts[:-1], widths[:-1], strict=True)):
        return None
    orders = {la.order for la in layouts}
    # bidirectional front-ends all number their blocks 0, so their parts share one block unless renumbered
    same = {"causal"} if sequential else {"bidirectional"}
    order = layouts[0].order if len(layouts) == 1 or orders == same else "any"
    return Layout.simple(
        [sum(sum(r) for r in rows) for rows in zip(*(la.lengths for la in layouts), strict=True)], order
    )


def stack(items: Sequence[Fields]) -> Fields:
    """Batch rows, shorter ones padded; see `Tokens.stack`."""
    n = max(t["x"].shape[1] for t in items)
    has_ids = any(t["ids"] is not None for t in items)
    out: Fields = {}
    for name in items[0]:
        if name == "ids" and not has_ids:
            out[name] = None
            continue
        grown = []
        for t in items:
            v = t[name] if t[name] is not None else _no_ids(t["x"])
            short = n - v.shape[1]
            if short:
                tail = [0, 0] * (v.ndim - 2) + [0, short]
                v = torch.nn.functional.pad(v, tail, value=-1 if name in ("ids", "modality") else 0)
            grown.append(v)
        out[name] = torch.cat(grown)
    return out


def stack_layout(layouts: Sequence[Layout | None]) -> Layout | None:
    """The layout of stacked rows: known if every item's is."""
    if any(la is None for la in layouts):
        return None
    orders = {la.order for la in layouts}
    lengths = tuple(row for la in layouts for row in la.lengths)
    return Layout(lengths, orders.pop() if len(orders) == 1 else "any")


def samples(layout: Layout | None, valid: Tensor, segment: Tensor) -> list[tuple[int, Tensor | slice]]:
    """(row, indices in the row) of every sample, row by row; an empty row is one empty sample."""
    found = []
    if layout is not None:
        for row, lengths in enumerate(layout.lengths):
            start = 0
            for n in lengths:
                found.append((row, slice(start, start + n)))
                start += n
            if not lengths:
                found.append((row, slice(0, 0)))
        return found
    device = valid.device
    valid, segment = valid.cpu(), segment.cpu()
    for row in range(len(valid)):
        indices = valid[row].nonzero().flatten()
        by_segment: dict[int, list[int]] = {}
        for index, seg in zip(indices.tolist(), segment[row, indices].tolist(), strict=True):
            by_segment.setdefault(seg, []).append(index)
        if not by_segment:
            found.append((row, slice(0, 0)))
        found += [(row, torch.tensor(i, device=device)) for i in by_segment.values()]
    return found


def first_fit(lengths: Sequence[int], max_len: int) -> list[list[int]]:
    """First-fit bin packing: each sample goes into the first row with enough space.

    Args:
        lengths: tokens of each sample.
        max_len: tokens per row.

    Returns:
        The sample indices of each row. A sample without tokens has a row of its own.

    Raises:
        InputError: a sample is longer than `max_len`.
    """
    space: list[int] = []
    rows: list[list[int]] = []
    for i, n in enumerate(lengths):
        if n > max_len:
            raise InputError(
                f"sample {i} has {n} tokens and a packed row holds {max_len}: raise max_len, or let the front-end "
                "make fewer tokens (max_tokens, frames, context)"
            )
        row = next((r for r, free in enumerate(space) if free >= n and n > 0), None)
        if row is None:
            space.append(max_len)
            rows.append([])
            row = len(space) - 1
        space[row] -= n if n else max_len
        rows[row].append(i)
    return rows
