"""`Tokens`: the one type between rooms, and the one rule of visibility.

Query *i* reads key *j* when

    valid[j]  and  segment[i] == segment[j]  and  block[j] <= block[i]

`visible` below is that rule, written plainly; every fast path in `backbone/attention.py` is tested against
it. What a fast path must know (lengths, reading order) is static knowledge that travels with the tokens as a
`Layout` made on the CPU side, so that no forward pass has to look into a tensor to choose its kernel.

Shapes: B rows, N tokens in a row, D width, S samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from worldtokens import packing
from worldtokens.layout import Layout, modality_id


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """A batch of tokens: seven tensors that share their first two axes.

    Args:
        x: (B, N, D) float, embeddings.
        valid: (B, N) bool, True = a real token. Default: all True.
        pos: (B, N, 3) float32, coordinates (t, y, x) in token-grid units; text uses t alone.
            Default: t counts from 0.
        segment: (B, N) int32, which sample of the row the token belongs to. Default: 0.
        block: (B, N) int32, reading order: a token reads those whose block is not larger. Default: 0.
        modality: (B, N) int16, which front-end made it (`modality_id`). Default: -1, unknown.
        ids: (B, N) int64, the discrete id where there is one, or None.
        layout: static knowledge for the fast paths, or None (the dense rule is used then).

    Raises:
        ValueError: the fields' shapes or types do not fit together.
    """

    x: Tensor
    valid: Tensor | None = None
    pos: Tensor | None = None
    segment: Tensor | None = None
    block: Tensor | None = None
    modality: Tensor | None = None
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
                f"valid is {self.valid.dtype}, expected torch.bool with True = a real token; 0/1 numbers are "
                "refused because their polarity cannot be told: pass mask.bool()"
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
            raise ValueError(f"layout tells of {self.layout.rows} rows, x has {b}")

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
        """Some of the rows; an int keeps the batch axis."""
        rows = slice(rows, rows + 1 or None) if isinstance(rows, int) else rows
        layout = self.layout
        if layout is not None:
            if isinstance(rows, slice):
                layout = Layout(layout.lengths[rows], layout.order)
            elif isinstance(rows, Tensor):
                layout = None
            else:
                layout = Layout(tuple(layout.lengths[i] for i in rows), layout.order)
        return Tokens(
            **{k: v[rows] if v is not None else None for k, v in self.fields().items()}, layout=layout
        )

    def fields(self) -> dict[str, Tensor | None]:
        """The seven tensors by name; `ids` may be None."""
        names = ("x", "valid", "pos", "segment", "block", "modality", "ids")
        return {k: getattr(self, k) for k in names}

    def replace(self, **changes) -> Tokens:
        """A copy with other fields; changing `valid`, `segment` or `block` forgets the layout unless given."""
        if {"valid", "segment", "block"} & set(changes) and "layout" not in changes:
            changes["layout"] = None
        return dataclasses.replace(self, **changes)

    def to(self, *args, **kwargs) -> Tokens:
        """Move to a device and/or float type; `pos` stays float32 and the whole numbers keep their types."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        out = {}
        for name, v in self.fields().items():
            if v is None:
                out[name] = None
            elif name == "x":
                out[name] = v.to(device=device, dtype=dtype, non_blocking=non_blocking)
            else:
                out[name] = v.to(device=device, non_blocking=non_blocking)
        return Tokens(**out, layout=self.layout)

    def pin_memory(self) -> Tokens:
        out = {k: v.pin_memory() if v is not None else None for k, v in self.fields().items()}
        return Tokens(**out, layout=self.layout)

    def __repr__(self) -> str:
        b, n, d = self.x.shape
        known = "" if self.layout is None else f", {self.layout.order}, {self.layout.samples} samples"
        return f"Tokens(B={b}, N={n}, D={d}, {self.x.dtype}, {self.device}{known})"

    # ---- reading order -----------------------------------------------------------------------------------

    def causal(self) -> Tokens:
        """The same tokens read left to right: block = 0, 1, 2, ... in each row."""
        block = torch.arange(self.shape[1], dtype=torch.int32, device=self.device).expand(self.shape[:2])
        layout = self.layout and dataclasses.replace(self.layout, order="causal")
        return self.replace(block=block, layout=layout)

    def bidirectional(self) -> Tokens:
        """The same tokens, all reading each other: block = 0."""
        layout = self.layout and dataclasses.replace(self.layout, order="bidirectional")
        return self.replace(block=torch.zeros_like(self.block), layout=layout)

    def infer_layout(self) -> Tokens:
        """The same tokens with their layout read from the tensors (waits for the device once).

        Tokens built by hand have no layout and take the dense path; this gives them the fast ones. Where valid
        tokens are not contiguous from the left by segment, the layout stays None.
        """
        valid, segment, block = self.valid.cpu(), self.segment.cpu(), self.block.cpu()
        counts = valid.sum(1).tolist()
        lengths, together, causal = [], True, True
        for row, n in enumerate(counts):
            if not bool(valid[row, :n].all()):
                return self.replace(layout=None)
            seg, runs = torch.unique_consecutive(segment[row, :n], return_counts=True)
            if seg.unique().numel() != seg.numel():
                return self.replace(layout=None)
            lengths.append(tuple(runs.tolist()))
            for part in block[row, :n].split(runs.tolist()):
                step = part.diff()
                together = together and bool((step == 0).all())
                causal = causal and bool((step == 1).all())
        order = "bidirectional" if together else "causal" if causal else "any"
        return self.replace(layout=Layout(tuple(lengths), order))

    # ---- joining -----------------------------------------------------------------------------------------

    @staticmethod
    def cat(*parts: Tokens, follow: bool = False) -> Tokens:
        """One sequence after another, row by row: (B, Na, D), (B, Nb, D) -> (B, Na + Nb, D).

        Args:
            parts: Tokens with the same number of rows and the same width.
            follow: False keeps positions and reading order as they are (an encoder reads all parts
                together). True makes each part come after the last: its `block` and its t count on, so that it
                reads the parts before and they do not read it.

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
        layout = packing.cat_layout([p.layout for p in parts], [p.shape[1] for p in parts], follow)
        return Tokens(**packing.cat([p.fields() for p in parts], follow), layout=layout)

    @staticmethod
    def stack(items: Sequence[Tokens]) -> Tokens:
        """Batch Tokens of unequal length: rows under rows, shorter ones padded on the right.

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
        """Every sample by itself, padding dropped, each (1, n, D), in the order in which they were packed."""
        order = self.layout.order if self.layout is not None else "any"
        parts = []
        for row, places in packing.samples(self.layout, self.valid, self.segment):
            fields = {k: v[row][places][None] if v is not None else None for k, v in self.fields().items()}
            fields["segment"] = torch.zeros_like(fields["segment"])
            n = fields["x"].shape[1]
            parts.append(Tokens(**fields, layout=Layout.simple([n], order)))
        origin = self.layout.origin if self.layout is not None else None
        if origin is not None:
            parts = [parts[i] for i in sorted(range(len(parts)), key=origin.__getitem__)]
        return parts

    def pack(self, max_len: int) -> Tokens:
        """Put many short samples in few rows, first fit; `unpack` gives them back in their order.

        Args:
            max_len: the longest row allowed, in tokens.

        Raises:
            InputError: a sample is longer than `max_len`.
        """
        return pack(self.split(), max_len)

    def unpack(self) -> Tokens:
        """One sample a row again, in the order that they had before `pack`; padding on the right."""
        return Tokens.stack(self.split())

    # ---- reading out -------------------------------------------------------------------------------------

    def select(self, modality: str) -> Tokens:
        """Only the tokens of one front-end, e.g. ``select("image")``, moved together to the left.

        Returns:
            (B, n, D) where n is the largest count of any row. Segments, blocks and positions are kept.
        """
        keep = self.valid & (self.modality == modality_id(modality))
        counts = keep.sum(1)
        n = int(counts.max()) if len(self) else 0
        # a stable sort puts the kept ones first without changing their order
        places = torch.argsort((~keep).to(torch.uint8), dim=1, stable=True)[:, :n]
        fields = {}
        for name, v in self.fields().items():
            if v is not None:
                index = places if v.ndim == 2 else places[..., None].expand(-1, -1, v.shape[-1])
                v = v.gather(1, index)
            fields[name] = v
        fields["valid"] = torch.arange(n, device=self.device) < counts[:, None]
        return Tokens(**fields)

    def pool(self, how: str = "mean") -> Tensor:
        """One vector for every sample, from its valid tokens only.

        Args:
            how: ``"mean"``, ``"first"`` or ``"last"``.

        Returns:
            (B, D), or (S, D) for rows that hold several samples, in the order that they had before packing.
            A row with nothing valid gives zeros.
        """
        if how not in ("mean", "first", "last"):
            raise ValueError(f"pool({how!r}): expected 'mean', 'first' or 'last'")
        if self.layout is not None and self.layout.full(self.shape[1]):
            return self.x.mean(1) if how == "mean" else self.x[:, 0 if how == "first" else -1]
        if self.shape[1] == 0 or (self.layout is not None and self.layout.single):
            return self._pool_rows(how)
        if self.layout is None:
            # one look at the device tells whether rows hold more than one sample
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
        places = torch.arange(n, device=self.device)
        if how == "first":
            at = places.masked_fill(~self.valid, n).amin(1).clamp(max=n - 1)
        else:
            at = places.masked_fill(~self.valid, -1).amax(1).clamp(min=0)
        x = self.x.gather(1, at[:, None, None].expand(-1, 1, self.dim)).squeeze(1)
        return x.masked_fill(~some[:, None], 0)


def visible(query: Tokens, key: Tokens | None = None, window: float | None = None) -> Tensor:
    """The rule of visibility as a dense mask: the reference that every fast path is tested against.

    Args:
        query: Tokens that read, (B, Nq, D).
        key: Tokens that are read in cross-attention (same segment; block ignored), (B, Nk, D). Default: the
            query's own tokens, by the whole rule.
        window: with it, a token also reads only those less than `window` behind it in t.

    Returns:
        (B, Nq, Nk) bool, True = reads.
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
    return out.replace(layout=dataclasses.replace(out.layout, origin=origin))


def _as_samples(t: Tokens) -> list[Tokens]:
    return [t] if t.layout.full(t.shape[1]) else t.split()
