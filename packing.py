"""Several samples in one `Tokens`: one after another, row under row, many in few rows, and each by itself again.

`Tokens` has these as its methods. Shapes: B rows, N tokens in a row, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokens import Layout, Tokens


def cat(parts: Sequence[Tokens], follow: bool = False) -> Tokens:
    """One sequence after another, row by row; see `Tokens.cat`."""
    if not parts:
        raise ValueError("cat needs at least one Tokens")
    rows, dims = {len(p) for p in parts}, {p.dim for p in parts}
    if len(rows) > 1 or len(dims) > 1:
        raise ValueError(
            f"parts have {sorted(rows)} rows and widths {sorted(dims)}: cat joins rows of equal number and "
            "width; batch first with Tokens.stack, or give the front-ends one `dim`"
        )
    if follow:
        parts = _following(parts)
    out = {}
    for name, _ in parts[0]._tensors():
        values = [getattr(p, name) for p in parts]
        if name == "ids" and any(v is not None for v in values):
            values = [
                v if v is not None else torch.full(p.shape[:2], -1, dtype=torch.int64, device=p.device)
                for v, p in zip(values, parts, strict=True)
            ]
        out[name] = None if values[0] is None else torch.cat(values, 1)
    return Tokens(**out, layout=_cat_layout(parts, follow))


def _following(parts: Sequence[Tokens]) -> list[Tokens]:
    out, block_end, t_end = [], None, None
    for p in parts:
        if block_end is not None:
            pos = p.pos.clone()
            pos[..., 0] += t_end[:, None]
            p = p.replace(block=p.block + block_end[:, None], pos=pos, layout=p.layout)
        out.append(p)
        low = torch.iinfo(torch.int32).min
        if p.shape[1]:
            ends = p.block.masked_fill(~p.valid, low).amax(1) + 1
            times = p.pos[..., 0].masked_fill(~p.valid, -torch.inf).amax(1).floor() + 1
            some = p.valid.any(1)
            was = (
                (torch.zeros_like(ends), torch.zeros_like(times)) if block_end is None else (block_end, t_end)
            )
            block_end, t_end = torch.where(some, ends, was[0]), torch.where(some, times, was[1])
        elif block_end is None:
            block_end = torch.zeros(len(p), dtype=torch.int32, device=p.device)
            t_end = torch.zeros(len(p), dtype=torch.float32, device=p.device)
    return out


def _cat_layout(parts: Sequence[Tokens], follow: bool) -> Layout | None:
    """The layout of parts set side by side: known when only the last part can have padding."""
    layouts = [p.layout for p in parts]
    if any(la is None or la.open or not la.single for la in layouts):
        return None
    if not all(la.full(p.shape[1]) for la, p in zip(layouts[:-1], parts[:-1], strict=True)):
        return None
    orders = {la.order for la in layouts}
    if len(parts) == 1:
        order = layouts[0].order
    elif follow:
        order = "causal" if orders == {"causal"} else "any"
    else:
        order = "any"
        # `together` means one number in a part; only parts known to share it stay together, and front-ends
        # that read together all number their tokens 0
        if orders == {"together"}:
            order = "together"
    return Layout.simple(
        [sum(sum(r) for r in rows) for rows in zip(*(la.lengths for la in layouts), strict=True)], order
    )


def stack(items: Sequence[Tokens]) -> Tokens:
    """Rows under rows, shorter ones padded; see `Tokens.stack`."""
    items = list(items)
    if not items:
        raise ValueError("stack needs at least one Tokens")
    dims = {t.dim for t in items}
    if len(dims) > 1:
        raise ValueError(f"widths differ: {sorted(dims)}; give the front-ends one `dim`")
    n = max(t.shape[1] for t in items)
    has_ids = any(t.ids is not None for t in items)
    out = {}
    for name, _ in items[0]._tensors():
        if name == "ids" and not has_ids:
            out[name] = None
            continue
        grown = []
        for t in items:
            v = getattr(t, name)
            if v is None:
                v = torch.full(t.shape[:2], -1, dtype=torch.int64, device=t.device)
            short = n - t.shape[1]
            if short:
                tail = [0, 0] * (v.ndim - 2) + [0, short]
                v = torch.nn.functional.pad(v, tail, value=-1 if name in ("ids", "modality") else 0)
            grown.append(v)
        out[name] = torch.cat(grown)
    layout = None
    if all(t.layout is not None for t in items):
        orders = {t.layout.order for t in items}
        lengths = tuple(row for t in items for row in t.layout.lengths)
        layout = Layout(lengths, orders.pop() if len(orders) == 1 else "any")
    return Tokens(**out, layout=layout)


def samples(tokens: Tokens) -> list[tuple[int, Tensor | slice]]:
    """(row, places in the row) of every sample, row by row; an empty row is one empty sample."""
    found = []
    if tokens.layout is not None:
        for row, lengths in enumerate(tokens.layout.lengths):
            at = 0
            for n in lengths:
                found.append((row, slice(at, at + n)))
                at += n
            if not lengths:
                found.append((row, slice(0, 0)))
        return found
    valid, segment = tokens.valid.cpu(), tokens.segment.cpu()
    for row in range(len(tokens)):
        places = valid[row].nonzero().flatten()
        seen: dict[int, list[int]] = {}
        for place, seg in zip(places.tolist(), segment[row, places].tolist(), strict=True):
            seen.setdefault(seg, []).append(place)
        if not seen:
            found.append((row, slice(0, 0)))
        found += [(row, torch.tensor(p, device=tokens.device)) for p in seen.values()]
    return found


def split(tokens: Tokens) -> list[Tokens]:
    """Every sample by itself; see `Tokens.split`."""
    order = tokens.layout.order if tokens.layout is not None else "any"
    parts = []
    for row, places in samples(tokens):
        fields = {k: v[row][places][None] if v is not None else None for k, v in tokens._tensors()}
        fields["segment"] = torch.zeros_like(fields["segment"])
        n = fields["x"].shape[1]
        parts.append(Tokens(**fields, layout=Layout.simple([n], order)))
    origin = tokens.layout.origin if tokens.layout is not None else None
    if origin is not None:
        parts = [parts[i] for i in sorted(range(len(parts)), key=origin.__getitem__)]
    return parts


def pack(items: Sequence[Tokens], max_len: int) -> Tokens:
    """Put samples of any length and modality into few rows of at most `max_len` tokens, first fit.

    Args:
        items: Tokens of one width; each row of each is a sample (or several, if already packed).
        max_len: the longest row allowed, in tokens.

    Returns:
        (rows, longest row, D) with one segment number for each sample of a row. `unpack` and `pool` give the
        samples back in the order of `items`.

    Raises:
        InputError: a sample is longer than `max_len`.
    """
    samples = [s for t in items for s in (t.split() if len(t) != 1 or t.layout is None else _as_samples(t))]
    if not samples:
        raise ValueError("pack needs at least one sample")
    room: list[int] = []
    rows: list[list[int]] = []
    for i, s in enumerate(samples):
        n = s.shape[1]
        if n > max_len:
            raise InputError(
                f"sample {i} has {n} tokens and a packed row takes {max_len}: raise max_len, or make the "
                "front-end give fewer tokens (max_tokens, frames, context)"
            )
        row = next((r for r, free in enumerate(room) if free >= n and n > 0), None)
        if row is None:
            room.append(max_len)
            rows.append([])
            row = len(room) - 1
        room[row] -= n if n else max_len
        rows[row].append(i)
    packed = []
    orders = {s.layout.order if s.layout is not None else "any" for s in samples}
    order = orders.pop() if len(orders) == 1 else "any"
    for row in rows:
        parts = [samples[i] for i in row]
        joined = Tokens.cat(*parts)
        number = [torch.full((1, p.shape[1]), k, dtype=torch.int32) for k, p in enumerate(parts)]
        lengths = (tuple(p.shape[1] for p in parts if p.shape[1]),)
        packed.append(
            joined.replace(segment=torch.cat(number, 1).to(joined.device), layout=Layout(lengths, order))
        )
    out = Tokens.stack(packed)
    origin = tuple(i for row in rows for i in row)
    return out.replace(layout=dataclasses.replace(out.layout, origin=origin))


def _as_samples(t: Tokens) -> list[Tokens]:
    return [t] if t.layout.full(t.shape[1]) else t.split()
