"""The attention primitive, and the ways in which the one rule of visibility is carried out.

`Reading` decides once for a forward pass, from static knowledge alone (`Tokens.layout`), how every layer reads:

    full     every row is one whole sample, all together: no mask
    causal   one sample a row, read left to right: SDPA's is_causal (padding stands behind, so none reads it)
    padded   one sample a row, all together, padding masked by key
    groups   padded or packed rows on a CPU: padding is taken out and samples of equal length are worked
             on together, so that neither attention nor the linear layers see a padded place
    flex     packed rows, prefixes, windows on a CUDA device: FlexAttention with a BlockMask (`backbone/flex.py`)
    dense    anything else: the mask of `worldtokens.tokens.visible`

Cross-attention has the same ways but `causal`; its groups hold the samples whose queries and whose contexts are of
equal length. All give the same numbers at valid tokens; tests hold them against `dense`.

Compiling: `torch.compile(trunk, dynamic=True)`, or the whole model, gives one graph for each way of reading and none
for other lengths, because a plan then looks only at `Layout.single`, `uniform` and `order`; `groups`, whose sizes are
numbers in the graph, is not chosen.

Shapes: B rows, N tokens, K tokens of a context, H heads, E = dim / heads, T = all valid tokens.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from worldtokens.backbone import flex
from worldtokens.tokens import Tokens, visible

KINDS = ("full", "causal", "padded", "groups", "flex", "dense")


@dataclasses.dataclass(frozen=True)
class Reading:
    """How one forward pass reads: made by `plan`, handed to every layer."""

    kind: str
    mask: Tensor | None = None  # for SDPA: (B | 1, 1, 1 | N, N | K) bool, True = reads; flex: its BlockMask
    shape: tuple[int, int] = (0, 0)  # groups: the rows (B, N) that `gather` points into
    gather: Tensor | None = None  # groups: (T,) places in the flattened (B * N) rows
    groups: tuple[tuple[int, int], ...] = ()  # groups: (samples, queries of each)
    group_masks: tuple[Tensor | None, ...] = ()  # groups: (samples, 1, L, L) or None
    keys: tuple[int, ...] | None = None  # groups of a context: keys of each sample; None: as many as queries
    filler: int = 0  # groups: zero rows behind the T tokens, see `_filler`
    causal: bool = False  # groups without masks: read left to right
    blind: Tensor | None = None  # cross: (B | 1, 1 | N | T, 1) bool, True = has nothing to read
    past: bool = False  # keys are all that a cache holds, not the tokens' own alone
    cross: Reading | None = None  # how the context is read

    def enter(self, x: Tensor) -> Tensor:
        """(B, N, ...) -> (1, T + filler, ...) for groups; otherwise x itself."""
        if self.gather is None:
            return x
        x = x.reshape(-1, *x.shape[2:]).index_select(0, self.gather)
        return self.fill(x)[None]

    def fill(self, x: Tensor) -> Tensor:
        """(T, ...) -> (T + filler, ...)"""
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, self.filler)) if self.filler else x

    def leave(self, x: Tensor) -> Tensor:
        """(1, T + filler, ...) -> (B, N, ...) with zeros at padding, for groups; otherwise x itself."""
        if self.gather is None:
            return x
        b, n = self.shape
        out = x.new_zeros(b * n, *x.shape[2:])
        return out.index_copy(0, self.gather, x[0, : len(self.gather)]).unflatten(0, (b, n))


def plan(
    tokens: Tokens, window: float | None = None, kind: str | None = None, context: Tokens | None = None
) -> Reading:
    """Choose how to read these tokens, and a context, without looking into a tensor of an accelerator.

    Args:
        tokens: (B, N, D).
        window: a token reads only those less than this far behind it in t.
        kind: force one way (tests and benchmarks); a context is then read the same way where it has that way.
        context: (B, K, any) for cross-attention, read by segment alone.
    """
    known = [t for t in (tokens, context) if t is not None]
    # an open layout (rows < 0) tells of no sample's place
    sortable = all(t.device.type == "cpu" and t.layout is not None and t.layout.rows >= 0 for t in known)
    sortable = sortable and not torch.compiler.is_compiling()
    # tokens and context share one order of samples, so both go by groups or neither does
    ragged = any(not t.layout.full(t.shape[1]) for t in known) if sortable and tokens.shape[1] else False
    if kind == "groups" or (kind is None and ragged):
        return _groups(tokens, window, context)
    cross = None
    if context is not None:
        cross = plan_cross(tokens, context, kind if kind in ("padded", "dense") else None)
    return dataclasses.replace(_self(tokens, window, kind or _choose(tokens, window)), cross=cross)


def _self(tokens: Tokens, window: float | None, kind: str) -> Reading:
    if kind in ("full", "causal"):
        return Reading(kind)
    if kind == "padded":
        # a row with nothing valid reads its own zeros, so that its softmax stays finite
        some = tokens.valid.any(1, keepdim=True)
        return Reading("padded", mask=(tokens.valid | ~some)[:, None, None, :])
    if kind == "flex":
        return Reading("flex", mask=flex.block_mask(tokens, window))
    if kind != "dense":
        raise ValueError(f"kind={kind!r}, expected one of {', '.join(KINDS)}")
    # padding reads anything: its output is thrown away, but a softmax over nothing would be NaN
    mask = visible(tokens, window=window) | ~tokens.valid[:, :, None]
    return Reading("dense", mask=mask[:, None])


def _choose(tokens: Tokens, window: float | None) -> str:
    layout, n = tokens.layout, tokens.shape[1]
    masked = "flex" if tokens.device.type == "cuda" and n > flex.SHORT else "dense"
    if layout is None or window is not None or layout.order == "any":
        return masked
    if layout.full(n):
        return "full" if layout.order == "bidirectional" else "causal"
    if layout.single:
        return "padded" if layout.order == "bidirectional" else "causal"
    return masked


def plan_cross(tokens: Tokens, context: Tokens, kind: str | None = None) -> Reading:
    """How a context is read, without groups: no mask, a mask of its padding, or the dense rule.

    Args:
        tokens: (B, N, any) that read.
        context: (B, K, any) that is read.
        kind: force ``"full"``, ``"padded"`` or ``"dense"``.
    """
    a, b = tokens.layout, context.layout
    if kind is None:
        single = a is not None and b is not None and a.single and b.single
        whole = single and b.full(context.shape[1]) and tokens.shape[1]
        kind = "full" if whole else "padded" if single and tokens.shape[1] and context.shape[1] else "dense"
    if kind == "dense":
        mask = visible(tokens, context)
        blind = ~mask.any(-1, keepdim=True)
        return Reading("dense", mask=(mask | blind)[:, None], blind=blind)
    # a row is one sample on both sides; the first place tells its number
    apart = tokens.segment[:, :1] != context.segment[:, :1]  # (B, 1)
    if kind == "full":
        looks = tokens.device.type == "cpu" and not torch.compiler.is_compiling()  # costs nothing on a CPU
        return Reading("full", blind=None if looks and not bool(apart.any()) else apart[..., None])
    blind = apart | ~context.valid.any(1, keepdim=True)
    return Reading("padded", mask=(context.valid | blind)[:, None, None, :], blind=blind[..., None])


def _starts(tokens: Tokens) -> list[tuple[int, int, int]]:
    """(row, place in the flattened rows, length) of every sample."""
    found, n = [], tokens.shape[1]
    for row, lengths in enumerate(tokens.layout.lengths):
        at = row * n
        for length in lengths:
            found.append((row, at, length))
            at += length
    return found


def _pairs(tokens: Tokens, context: Tokens | None) -> list[tuple[int, int, int, int]]:
    """(queries, keys, first query's place, first key's place) of every sample, sorted: equal sizes lie together."""
    reads = _starts(tokens)
    if context is None:
        return sorted((n, n, at, at) for _, at, n in reads if n)
    there = {}
    for t, samples, put in ((context, _starts(context), True), (tokens, reads, False)):
        number = t.segment.flatten()[[at for _, at, n in samples if n]].tolist() if samples else []
        keyed = zip(number, (s for s in samples if s[2]), strict=True)
        if put:
            there = {(row, seg): (at, n) for seg, (row, at, n) in keyed}
        else:
            pairs = [(n, at, *there.get((row, seg), (0, 0))) for seg, (row, at, n) in keyed]
    return sorted((n, m, at, key_at) for n, at, key_at, m in pairs)


def _places(starts: list[int], length: int, device: torch.device) -> Tensor:
    return (torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)).flatten()


def _filler(total: int) -> int:
    """Rows to add so that batches have few different totals: up to 1/16 more.

    For every shape that it has not met, oneDNN writes a matrix product's code anew, about 9 ms for one linear layer: as
    much as the product itself takes (docs/LOG.md).
    """
    step = max(1, 1 << max(0, total.bit_length() - 5))
    return -total % step


def _groups(tokens: Tokens, window: float | None, context: Tokens | None) -> Reading:
    device, layout = tokens.device, tokens.layout
    if layout is None or (context is not None and context.layout is None):
        raise ValueError("kind='groups' needs tokens with a layout: tokens.infer_layout() finds it")
    own: dict[int, list[int]] = {}
    other: dict[tuple[int, int], list[int]] = {}
    for n, m, at, key_at in _pairs(tokens, context):
        own.setdefault(n, []).append(at)
        other.setdefault((n, m), []).append(key_at)
    index, masks = [torch.zeros(0, dtype=torch.long, device=device)], []
    for length, starts in own.items():
        places = _places(starts, length, device)
        index.append(places)
        mask = None
        if layout.order == "any":
            block = tokens.block.flatten()[places].view(-1, length)
            mask = block[:, None, :] <= block[:, :, None]
        elif window is not None and layout.order == "causal":
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]
        if window is not None:
            t = tokens.pos[..., 0].flatten()[places].view(-1, length)
            near = t[:, :, None] - t[:, None, :] < window
            mask = near if mask is None else mask & near
        masks.append(mask if mask is None else mask[:, None])
    cross = None
    if context is not None:
        sizes = [(len(starts), n, m) for (n, m), starts in other.items()]
        gather = [_places(starts, m, device) for (_, m), starts in other.items()]
        blind = None
        if any(m == 0 for _, _, m in sizes):
            blind = torch.cat([torch.full((c * n,), m == 0, device=device) for c, n, m in sizes])[
                None, :, None
            ]
        cross = Reading(
            "groups",
            shape=context.shape[:2],
            gather=torch.cat([index[0], *gather]),
            groups=tuple((c, n) for c, n, _ in sizes),
            group_masks=(None,) * len(sizes),
            keys=tuple(m for _, _, m in sizes),
            blind=blind,
        )
    gather = torch.cat(index)
    return Reading(
        "groups",
        shape=tokens.shape[:2],
        gather=gather,
        filler=_filler(len(gather)) if context is None else 0,
        groups=tuple((len(starts), length) for length, starts in own.items()),
        group_masks=tuple(masks),
        causal=layout.order == "causal" and window is None,
        cross=cross,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, reading: Reading) -> Tensor:
    """softmax(q k^T / sqrt(E)) v under a reading.

    Args:
        q: (B, N, H, E); k, v: (B, K, Hkv, E) with H a multiple of Hkv (grouped-query attention).
            For groups, B = 1 and N, K = T of either side.

    Returns:
        (B, N, H, E).
    """
    if reading.kind != "groups":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if reading.kind == "flex":
            return flex.attend_flex(q, k, v, reading.mask).transpose(1, 2)
        return _sdpa(q, k, v, reading.mask, reading.kind == "causal").transpose(1, 2)
    # split, not slices: the gradient of many slices would fill and add the whole row once for each
    keys = reading.keys or [n for _, n in reading.groups]
    sizes = [count * n for count, n in reading.groups]
    key_sizes = [count * m for (count, _), m in zip(reading.groups, keys, strict=True)]
    rest = [reading.filler] if reading.filler else []
    queries, (ks, vs) = q[0].split(sizes + rest), (t[0].split(key_sizes + rest) for t in (k, v))
    outs = []
    for (count, n), m, mask, *part in zip(
        reading.groups, keys, reading.group_masks, queries, ks, vs, strict=False
    ):
        own, *read = (
            t.unflatten(0, (count, x)).transpose(1, 2) for t, x in zip(part, (n, m, m), strict=True)
        )
        out = _sdpa(own, *read, mask, reading.causal, varied=True) if m else torch.zeros_like(own)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return reading.fill(torch.cat(outs) if outs else q[0])[None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, varied: bool = False) -> Tensor:
    """(B, H, N, E), (B, Hkv, K, E) -> (B, H, N, E).

    Training in half precision on a CPU goes another way, since SDPA's backward pass takes 2 to 10 times as long there at
    the lengths of images and sentences (torch 2.14; figures in docs/LOG.md): by two plain products, or, where sizes
    differ from batch to batch (`varied`), in float32, whose kernel is not written anew for each size.
    """
    grouped = q.shape[1] != k.shape[1]
    half = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    if half and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        if not varied and not grouped and q.shape[-2] * k.shape[-2] <= 512 * 512:
            return _products(q, k, v, mask, causal)
        if varied:
            with torch.autocast("cpu", enabled=False):
                return _sdpa(q.float(), k.float(), v.float(), mask, causal).to(q.dtype)
    if grouped and mask is not None and q.is_cuda:
        # of CUDA's kernels only the one that takes no mask knows grouped heads: repeated keys cost less than its stand-in
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """SDPA as it is written on paper."""
    score = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        mask = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    return score.softmax(-1).to(v.dtype) @ v
