"""`Tokens`: the one type between all components, and the one rule of visibility.

Query *i* attends to key *j* when

    valid[j]  and  segment[i] == segment[j]  and  block[j] <= block[i]

`visible` below is the reference implementation of that rule; every fast path in `backbone/attention.py` is tested against
it. What a fast path must know (lengths, reading order) is carried with the tokens as a `Layout`, made on the CPU side, so
that no forward pass reads a tensor to choose its kernel.

Shapes: B rows, N tokens per row, D width, S samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from worldtokens import packing
from worldtokens.layout import Layout, modality_id


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """A batch of tokens: seven tensors with the same first two axes.

    Args:
        x: (B, N, D) float, embeddings.
        valid: (B, N) bool, True = a real token. Default: all True.
        pos: (B, N, 3) float32, coordinates (t, y, x) in token-grid units; text uses t alone.
            Default: t counts from 0.
        segment: (B, N) int32, which sample of the row the token belongs to. Default: 0.
        block: (B, N) int32, reading order: a token attends to tokens of the same or a smaller block. Default: 0.
        modality: (B, N) int16, which front-end made it (`modality_id`). Default: -1, unknown.
        ids: (B, N) int64, the discrete id where there is one, or None.
        layout: lengths and reading order for the fast paths, or None (the dense mask is used then).

    Raises:
        ValueError: the fields' shapes or types do not fit together.
    """

    x: Tensor
    # never None once built: __post_init__ fills them in
    valid: Tensor = None  # type: ignore[assignment]
    pos: Tensor = None  # type: ignore[assignment]
    segment: Tensor = None  # type: ignore[assignment]
    block: Tensor = None  # type: ignore[assignment]
    modality: Tensor = None  # type: ignore[assignment]
    ids: Tensor | None = None
    layout: Layout | None = None

    def __post_init__(self) -> None:
        x = self.x
        if x.ndim != 3:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (B, N, D)")
        if not x.is_floating_point():
            raise ValueError(f"x is {x.dtype}, expected a float type")
        b, n, _ = x.shape
        fill = {}
        if self.valid is None:
            fill["valid"] = torch.ones(b, n, dtype=torch.bool, device=x.device)
        elif self.valid.dtype != torch.bool:
            raise ValueError(
                f"valid is {self.valid.dtype}, expected torch.bool with True = a real token; the polarity of 0/1 "
                "numbers is ambiguous: pass mask.bool()"
            )
        if self.pos is None:
            t = torch.arange(n, dtype=torch.float32, device=x.device)
            pos = torch.zeros(n, 3, dtype=torch.float32, device=x.device)
            pos[:, 0] = t
            fill["pos"] = pos.expand(b, n, 3)
        for name, dtype, default in (
            ("segment", torch.int32, 0),
            ("block", torch.int32, 0),
            ("modality", torch.int16, -1),
        ):
            value = getattr(self, name)
            if value is None:
                fill[name] = torch.full((b, n), default, dtype=dtype, device=x.device)
            elif value.dtype != dtype:
                fill[name] = value.to(dtype)
        for name, value in fill.items():
            object.__setattr__(self, name, value)
        for name in ("valid", "segment", "block", "modality", "ids"):
            value = getattr(self, name)
            if value is not None and value.shape != (b, n):
                raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {(b, n)} as x has")
        if self.pos.shape != (b, n, 3):
            raise ValueError(f"pos has shape {tuple(self.pos.shape)}, expected {(b, n, 3)}: (t, y, x)")
        if self.layout is not None and self.layout.rows >= 0 and self.layout.rows != b:
            raise ValueError(f"layout has {self.layout.rows} rows, x has {b}")

    # ---- small views -------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """(B, N, D)."""
        return self.x.shape

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def dim(self) -> int:
        return self.x.shape[-1]

    def __len__(self) -> int:
        return self.x.shape[0]

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> Tokens:
        """Select rows; an int keeps the batch axis."""
        rows = slice(rows, rows + 1 or None) if isinstance(rows, int) else rows
        layout = self.layout
        if layout is not None:
            if isinstance(rows, slice):
                layout = Layout(layout.lengths[rows], layout.order)
            elif isinstance(rows, Tensor):
                layout = None
            else:
                layout = Layout(tuple(layout.lengths[i] for i in rows), layout.order)
        fields: dict[str, Any] = {k: None if v is None else v[rows] for k, v in self.fields().items()}
        return Tokens(**fields, layout=layout)

    def fields(self) -> dict[str, Any]:
        """The seven tensors by name; `ids` may be None."""
        names = ("x", "valid", "pos", "segment", "block", "modality", "ids")
        return {k: getattr(self, k) for k in names}

    def replace(self, **changes) -> Tokens:
        """A copy with other fields; changing `valid`, `segment` or `block` drops the layout unless one is given."""
        if {"valid", "segment", "block"} & set(changes) and "layout" not in changes:
            changes["layout"] = None
        return dataclasses.replace(self, **changes)

    def to(self, *args, **kwargs) -> Tokens:
        """Move to a device and/or float dtype; `pos` stays float32 and integer fields keep their dtypes."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        out: dict[str, Any] = {}
        for name, v in self.fields().items():
            if v is None:
                out[name] = None
            elif name == "x":
                out[name] = v.to(device=device, dtype=dtype, non_blocking=non_blocking)
            else:
                out[name] = v.to(device=device, non_blocking=non_blocking)
        return Tokens(**out, layout=self.layout)

    def pin_memory(self) -> Tokens:
        out: dict[str, Any] = {k: None if v is None else v.pin_memory() for k, v in self.fields().items()}
        return Tokens(**out, layout=self.layout)

    def __repr__(self) -> str:
        b, n, d = self.x.shape
        known = "" if self.layout is None else f", {self.layout.order}, {self.layout.samples} samples"
        return f"Tokens(B={b}, N={n}, D={d}, {self.x.dtype}, {self.device}{known})"

    # ---- reading order -----------------------------------------------------------------------------------

    def causal(self) -> Tokens:
        """The same tokens in causal order: block = 0, 1, 2, ... in each row."""
        block = torch.arange(self.shape[1], dtype=torch.int32, device=self.device).expand(self.shape[:2])
        layout = self.layout and dataclasses.replace(self.layout, order="causal")
        return self.replace(block=block, layout=layout)

    def bidirectional(self) -> Tokens:
        """The same tokens, all visible to each other: block = 0."""
        layout = self.layout and dataclasses.replace(self.layout, order="bidirectional")
        return self.replace(block=torch.zeros_like(self.block), layout=layout)

    def infer_layout(self) -> Tokens:
        """The same tokens with their layout found from the tensors (waits for the device once).

        Tokens built by hand have no layout and use the dense mask; a layout enables the fast paths. If valid tokens are
        not contiguous from the left by segment, the layout stays None.
        """
        valid, segment, block = self.valid.cpu(), self.segment.cpu(), self.block.cpu()
        counts = valid.sum(1).tolist()
        lengths, bidirectional, causal = [], True, True
        for row, n in enumerate(counts):
            if not bool(valid[row, :n].all()):
                return self.replace(layout=None)
            seg, runs = torch.unique_consecutive(segment[row, :n], return_counts=True)
            if seg.unique().numel() != seg.numel():
                return self.replace(layout=None)
            lengths.append(tuple(runs.tolist()))
            for part in block[row, :n].split(runs.tolist()):
                step = part.diff()
                bidirectional = bidirectional and bool((step == 0).all())
                causal = causal and bool((step == 1).all())
        order = "bidirectional" if bidirectional else "causal" if causal else "any"
        return self.replace(layout=Layout(tuple(lengths), order))

    # ---- joining -----------------------------------------------------------------------------------------

    @staticmethod
    def cat(*parts: Tokens, sequential: bool = False) -> Tokens:
        """Concatenate sequences row by row: (B, Na, D), (B, Nb, D) -> (B, Na + Nb, D).

        Args:
            parts: Tokens with the same number of rows and the same width.
            sequential: False keeps positions and reading order, so that bidirectional parts attend to each other. True
                offsets the block and t of each part by those before it: it attends to earlier parts, not they to it.

        Raises:
            ValueError: rows or widths differ.
        """
        parts = parts[0] if len(parts) == 1 and isinstance(parts[0], list | tuple) else parts
        if not parts:
            raise ValueError("cat needs at least one Tokens")
        rows, dims = {len(p) for p in parts}, {p.dim for p in parts}
        if len(rows) > 1 or len(dims) > 1:
            raise ValueError(
                f"parts have {sorted(rows)} rows and widths {sorted(dims)}: cat joins rows of equal number and "
                "width; batch first with Tokens.stack, or give the front-ends one `dim`"
            )
        layout = packing.cat_layout([p.layout for p in parts], [p.shape[1] for p in parts], sequential)
        return Tokens(**packing.cat([p.fields() for p in parts], sequential), layout=layout)

    @staticmethod
    def stack(items: Sequence[Tokens]) -> Tokens:
        """Batch Tokens of different lengths, shorter ones padded on the right.

        Args:
            items: each (Bi, Ni, D).

        Returns:
            (sum of Bi, max of Ni, D), with padding not valid.
        """
        items = list(items)
        if not items:
            raise ValueError("stack needs at least one Tokens")
        dims = {t.dim for t in items}
        if len(dims) > 1:
            raise ValueError(f"widths differ: {sorted(dims)}; give the front-ends one `dim`")
        layout = packing.stack_layout([t.layout for t in items])
        return Tokens(**packing.stack([t.fields() for t in items]), layout=layout)

    # ---- packing -----------------------------------------------------------------------------------------

    def split(self) -> list[Tokens]:
        """Split into samples without padding, each (1, n, D), in their order before packing."""
        order = self.layout.order if self.layout is not None else "any"
        parts = []
        for row, index in packing.samples(self.layout, self.valid, self.segment):
            fields: dict[str, Any] = {
                k: None if v is None else v[row][index][None] for k, v in self.fields().items()
            }
            fields["segment"] = torch.zeros_like(fields["segment"])
            n = fields["x"].shape[1]
            parts.append(Tokens(**fields, layout=Layout.simple([n], order)))
        origin = self.layout.origin if self.layout is not None else None
        if origin is not None:
            parts = [parts[i] for i in sorted(range(len(parts)), key=origin.__getitem__)]
        return parts

    def pack(self, max_len: int) -> Tokens:
        """Pack many short samples into few rows, first fit; `unpack` restores them in order.

        Args:
            max_len: maximum number of tokens per row.

        Raises:
            InputError: a sample is longer than `max_len`.
        """
        return pack(self.split(), max_len)

    def unpack(self) -> Tokens:
        """One sample per row, in their order before `pack`; padding on the right."""
        return Tokens.stack(self.split())

    # ---- selection and pooling ------------------------------------------------------------------------------

    def select(self, modality: str) -> Tokens:
        """Only the tokens of one modality, e.g. ``select("image")``, aligned to the left.

        Returns:
            (B, n, D) where n is the largest count of a row. Segments, blocks and positions are kept.
        """
        keep = self.valid & (self.modality == modality_id(modality))
        counts = keep.sum(1)
        n = int(counts.max()) if len(self) else 0
        # a stable sort moves the selected ones to the left in their order
        order = torch.argsort((~keep).to(torch.uint8), dim=1, stable=True)[:, :n]
        fields = {}
        for name, v in self.fields().items():
            if v is not None:
                index = order if v.ndim == 2 else order[..., None].expand(-1, -1, v.shape[-1])
                v = v.gather(1, index)
            fields[name] = v
        fields["valid"] = torch.arange(n, device=self.device) < counts[:, None]
        return Tokens(**fields)

    def pool(self, how: str = "mean") -> Tensor:
        """One vector per sample, from its valid tokens only.

        Args:
            how: ``"mean"``, ``"first"`` or ``"last"``.

        Returns:
            (B, D), or (S, D) for rows with several samples, in their order before packing. A row without valid tokens
            gives zeros.
        """
        if how not in ("mean", "first", "last"):
            raise ValueError(f"pool({how!r}): expected 'mean', 'first' or 'last'")
        if self.layout is not None and self.layout.full(self.shape[1]):
            return self.x.mean(1) if how == "mean" else self.x[:, 0 if how == "first" else -1]
        if self.shape[1] == 0 or (self.layout is not None and self.layout.single):
            return self._pool_rows(how)
        if self.layout is None:
            # waits for the device once: does a row hold more than one sample?
            low = self.segment.masked_fill(~self.valid, torch.iinfo(torch.int32).max).amin(1)
            if bool(((self.segment == low[:, None]) | ~self.valid).all()):
                return self._pool_rows(how)
        parts = self.split()
        zero = self.x.new_zeros(self.dim)
        pick = {"mean": lambda x: x.mean(0), "first": lambda x: x[0], "last": lambda x: x[-1]}[how]
        return torch.stack([pick(p.x[0]) if p.shape[1] else zero for p in parts])

    def _pool_rows(self, how: str) -> Tensor:
        n = self.shape[1]
        if n == 0:
            return self.x.new_zeros(len(self), self.dim)
        some = self.valid.any(1)
        if how == "mean":
            x = self.x.masked_fill(~self.valid[..., None], 0)
            return x.sum(1) / self.valid.sum(1).clamp(min=1)[:, None].to(x.dtype)
        index = torch.arange(n, device=self.device)
        if how == "first":
            at = index.masked_fill(~self.valid, n).amin(1).clamp(max=n - 1)
        else:
            at = index.masked_fill(~self.valid, -1).amax(1).clamp(min=0)
        x = self.x.gather(1, at[:, None, None].expand(-1, 1, self.dim)).squeeze(1)
        return x.masked_fill(~some[:, None], 0)


def visible(query: Tokens, key: Tokens | None = None, window: float | None = None) -> Tensor:
    """The rule of visibility as a dense mask: the reference for every fast path.

    Args:
        query: (B, Nq, D).
        key: (B, Nk, D), the keys of cross-attention (same segment; block ignored). Default: self-attention of `query`.
        window: a token attends only to tokens less than this before it in t (sliding window).

    Returns:
        (B, Nq, Nk) bool, True = attends.
    """
    cross = key is not None
    key = key if cross else query
    mask = key.valid[:, None, :] & (query.segment[:, :, None] == key.segment[:, None, :])
    if not cross:
        mask = mask & (key.block[:, None, :] <= query.block[:, :, None])
    if window is not None:
        mask = mask & (query.pos[:, :, None, 0] - key.pos[:, None, :, 0] < window)
    return mask


def pack(items: Sequence[Tokens], max_len: int) -> Tokens:
    """Pack samples of any length and modality into few rows of at most `max_len` tokens, first fit.

    Args:
        items: Tokens of one width; each of their rows is a sample (or several, if already packed).
        max_len: maximum number of tokens per row.

    Returns:
        (rows, longest row, D) with one segment number per sample of a row. `unpack` and `pool` return the samples in the
        order of `items`.

    Raises:
        InputError: a sample is longer than `max_len`.
    """
    samples = [s for t in items for s in (t.split() if len(t) != 1 or t.layout is None else _as_samples(t))]
    if not samples:
        raise ValueError("pack needs at least one sample")
    rows = packing.first_fit([s.shape[1] for s in samples], max_len)
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
    assert out.layout is not None
    return out.replace(layout=dataclasses.replace(out.layout, origin=origin))


def _as_samples(t: Tokens) -> list[Tokens]:
    return [t] if t.layout.full(t.shape[1]) else t.split()
