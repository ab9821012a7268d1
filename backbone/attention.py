"""The attention primitive, and how the one rule of visibility is carried out.

`plan_attention` chooses a mode once per forward pass, from static knowledge alone (`Tokens.layout`), for all layers:

    full     each row is one sample without padding, bidirectional: no mask
    causal   one sample per row, causal: SDPA's is_causal (padding comes last, so no valid token attends to it)
    padded   one sample per row, bidirectional, with a key padding mask
    groups   padded or packed rows on a CPU: padding is removed and samples of equal length are processed as one batch,
             so that neither attention nor the linear layers compute padding
    flex     packed rows, prefixes, windows on a CUDA device: FlexAttention with a BlockMask (`backbone/flex.py`)
    dense    anything else: the mask of `worldtokens.tokens.visible`

Cross-attention has the same modes except `causal` and `flex`; its groups hold samples with equal numbers of queries and
of keys. All modes give the same numbers at valid tokens; tests compare each with `dense`.

Compiling: `torch.compile(trunk, dynamic=True)`, or the whole model, gives one graph per mode and none for other lengths,
because planning then looks only at `Layout.single`, `uniform` and `order`; `groups`, whose sizes would be constants of
the graph, is not chosen.

Shapes: B rows, N tokens, K context tokens, H heads, E channels per head, T = all valid tokens.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from worldtokens.backbone import flex
from worldtokens.tokens import Tokens, visible

MODES = ("full", "causal", "padded", "groups", "flex", "dense")


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """How one forward pass attends: made by `plan_attention`, used by every layer."""

    mode: str
    mask: Tensor | None = None  # SDPA: (B | 1, 1, 1 | N, N | K) bool, True = attends; flex: its BlockMask
    shape: tuple[int, int] = (0, 0)  # groups: the rows (B, N) that `indices` points into
    indices: Tensor | None = None  # groups: (T,) indices of valid tokens in the flattened (B * N) rows
    groups: tuple[tuple[int, int], ...] = ()  # groups: (samples, queries of each)
    group_masks: tuple[Tensor | None, ...] = ()  # groups: (samples, 1, L, L) or None
    group_keys: tuple[int, ...] | None = None  # groups of a context: keys of each sample; None: as queries
    extra_rows: int = 0  # groups: zero rows after the T tokens, see `_extra_rows`
    causal: bool = False  # groups without masks: causal attention
    no_keys: Tensor | None = None  # cross: (B | 1, 1 | N | T, 1) bool, True = no key to attend to
    cached: bool = False  # keys are all that a cache holds, not the new tokens' own alone
    cross: AttentionPlan | None = None  # how the tokens attend to the context

    def unpad(self, x: Tensor) -> Tensor:
        """(B, N, ...) -> (1, T + extra_rows, ...) for groups; otherwise x itself."""
        if self.indices is None:
            return x
        x = x.reshape(-1, *x.shape[2:]).index_select(0, self.indices)
        return self.add_rows(x)[None]

    def add_rows(self, x: Tensor) -> Tensor:
        """(T, ...) -> (T + extra_rows, ...)"""
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, self.extra_rows)) if self.extra_rows else x

    def pad(self, x: Tensor) -> Tensor:
        """(1, T + extra_rows, ...) -> (B, N, ...) with zeros at padding, for groups; otherwise x itself."""
        if self.indices is None:
            return x
        b, n = self.shape
        out = x.new_zeros(b * n, *x.shape[2:])
        return out.index_copy(0, self.indices, x[0, : len(self.indices)]).unflatten(0, (b, n))


def plan_attention(
    tokens: Tokens, window: float | None = None, mode: str | None = None, context: Tokens | None = None
) -> AttentionPlan:
    """Choose the attention mode for tokens and a context, without reading a tensor of an accelerator.

    Args:
        tokens: (B, N, D).
        window: a token attends only to tokens less than this before it in t.
        mode: force a mode (tests and benchmarks); cross-attention uses it too where it has that mode.
        context: (B, K, any) for cross-attention, visible by segment alone.
    """
    known = [t for t in (tokens, context) if t is not None]
    # a dynamic layout (rows < 0) does not hold the lengths of samples
    sortable = all(t.device.type == "cpu" and t.layout is not None and t.layout.rows >= 0 for t in known)
    sortable = sortable and not torch.compiler.is_compiling()
    # tokens and context share one order of samples, so both use groups or neither does
    ragged = any(not t.layout.full(t.shape[1]) for t in known) if sortable and tokens.shape[1] else False
    if mode == "groups" or (mode is None and ragged):
        return _plan_groups(tokens, window, context)
    cross = None
    if context is not None:
        cross = plan_cross_attention(tokens, context, mode if mode in ("padded", "dense") else None)
    plan = _plan_self_attention(tokens, window, mode or _choose(tokens, window))
    return dataclasses.replace(plan, cross=cross)


def _plan_self_attention(tokens: Tokens, window: float | None, mode: str) -> AttentionPlan:
    if mode in ("full", "causal"):
        return AttentionPlan(mode)
    if mode == "padded":
        # a row without valid tokens attends to its own zeros, so that its softmax stays finite
        some = tokens.valid.any(1, keepdim=True)
        return AttentionPlan("padded", mask=(tokens.valid | ~some)[:, None, None, :])
    if mode == "flex":
        return AttentionPlan("flex", mask=flex.block_mask(tokens, window))
    if mode != "dense":
        raise ValueError(f"mode={mode!r}, expected one of {', '.join(MODES)}")
    # padding attends to everything: its output is discarded, but a softmax over no key would be NaN
    mask = visible(tokens, window=window) | ~tokens.valid[:, :, None]
    return AttentionPlan("dense", mask=mask[:, None])


def _choose(tokens: Tokens, window: float | None) -> str:
    layout, n = tokens.layout, tokens.shape[1]
    masked = "flex" if tokens.device.type == "cuda" and n > flex.MIN_LENGTH else "dense"
    if layout is None or window is not None or layout.order == "any":
        return masked
    if layout.full(n):
        return "full" if layout.order == "bidirectional" else "causal"
    if layout.single:
        return "padded" if layout.order == "bidirectional" else "causal"
    return masked


def plan_cross_attention(tokens: Tokens, context: Tokens, mode: str | None = None) -> AttentionPlan:
    """Choose the mode of cross-attention, without groups: no mask, a key padding mask, or the dense rule.

    Args:
        tokens: (B, N, any), the queries.
        context: (B, K, any), the keys.
        mode: force ``"full"``, ``"padded"`` or ``"dense"``.
    """
    a, b = tokens.layout, context.layout
    if mode is None:
        single = a is not None and b is not None and a.single and b.single
        whole = single and b.full(context.shape[1]) and tokens.shape[1]
        mode = "full" if whole else "padded" if single and tokens.shape[1] and context.shape[1] else "dense"
    if mode == "dense":
        mask = visible(tokens, context)
        no_keys = ~mask.any(-1, keepdim=True)
        return AttentionPlan("dense", mask=(mask | no_keys)[:, None], no_keys=no_keys)
    # a row is one sample on both sides; its first token has its segment number
    differ = tokens.segment[:, :1] != context.segment[:, :1]  # (B, 1)
    if mode == "full":
        check = tokens.device.type == "cpu" and not torch.compiler.is_compiling()  # no wait on a CPU
        return AttentionPlan("full", no_keys=None if check and not bool(differ.any()) else differ[..., None])
    no_keys = differ | ~context.valid.any(1, keepdim=True)
    return AttentionPlan(
        "padded", mask=(context.valid | no_keys)[:, None, None, :], no_keys=no_keys[..., None]
    )


def _starts(tokens: Tokens) -> list[tuple[int, int, int]]:
    """(row, start in the flattened rows, length) of every sample."""
    found, n = [], tokens.shape[1]
    for row, lengths in enumerate(tokens.layout.lengths):
        start = row * n
        for length in lengths:
            found.append((row, start, length))
            start += length
    return found


def _pairs(tokens: Tokens, context: Tokens | None) -> list[tuple[int, int, int, int]]:
    """(queries, keys, start of the queries, start of the keys) of every sample, sorted so that equal sizes are adjacent."""
    queries = _starts(tokens)
    if context is None:
        return sorted((n, n, start, start) for _, start, n in queries if n)

    def by_segment(t: Tokens, samples: list[tuple[int, int, int]]):
        samples = [s for s in samples if s[2]]
        numbers = t.segment.flatten()[[start for _, start, _ in samples]].tolist() if samples else []
        return zip(numbers, samples, strict=True)

    keys = {(row, seg): (start, n) for seg, (row, start, n) in by_segment(context, _starts(context))}
    pairs = []
    for seg, (row, start, n) in by_segment(tokens, queries):
        key_start, m = keys.get((row, seg), (0, 0))
        pairs.append((n, m, start, key_start))
    return sorted(pairs)


def _ranges(starts: list[int], length: int, device: torch.device) -> Tensor:
    return (torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)).flatten()


def _extra_rows(total: int) -> int:
    """Rows to add so that batches have few different totals: up to 1/16 more.

    oneDNN generates a matrix product's code for every new shape, about 9 ms for one linear layer: as much as the product
    itself takes (docs/LOG.md).
    """
    step = max(1, 1 << max(0, total.bit_length() - 5))
    return -total % step


def _plan_groups(tokens: Tokens, window: float | None, context: Tokens | None) -> AttentionPlan:
    device, layout = tokens.device, tokens.layout
    if layout is None or (context is not None and context.layout is None):
        raise ValueError("mode='groups' needs tokens with a layout: tokens.infer_layout() finds it")
    query_starts: dict[int, list[int]] = {}
    key_starts: dict[tuple[int, int], list[int]] = {}
    for n, m, start, key_start in _pairs(tokens, context):
        query_starts.setdefault(n, []).append(start)
        key_starts.setdefault((n, m), []).append(key_start)
    empty = torch.zeros(0, dtype=torch.long, device=device)
    indices, masks = [empty], []
    for length, starts in query_starts.items():
        index = _ranges(starts, length, device)
        indices.append(index)
        mask = None
        if layout.order == "any":
            block = tokens.block.flatten()[index].view(-1, length)
            mask = block[:, None, :] <= block[:, :, None]
        elif window is not None and layout.order == "causal":
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]
        if window is not None:
            t = tokens.pos[..., 0].flatten()[index].view(-1, length)
            near = t[:, :, None] - t[:, None, :] < window
            mask = near if mask is None else mask & near
        masks.append(mask if mask is None else mask[:, None])
    cross = None
    if context is not None:
        sizes = [(len(starts), n, m) for (n, m), starts in key_starts.items()]
        no_keys = None
        if any(m == 0 for _, _, m in sizes):
            no_keys = torch.cat([torch.full((c * n,), m == 0, device=device) for c, n, m in sizes])
            no_keys = no_keys[None, :, None]
        cross = AttentionPlan(
            "groups",
            shape=context.shape[:2],
            indices=torch.cat(
                [empty, *(_ranges(starts, m, device) for (_, m), starts in key_starts.items())]
            ),
            groups=tuple((c, n) for c, n, _ in sizes),
            group_masks=(None,) * len(sizes),
            group_keys=tuple(m for _, _, m in sizes),
            no_keys=no_keys,
        )
    indices = torch.cat(indices)
    return AttentionPlan(
        "groups",
        shape=tokens.shape[:2],
        indices=indices,
        extra_rows=_extra_rows(len(indices)) if context is None else 0,
        groups=tuple((len(starts), length) for length, starts in query_starts.items()),
        group_masks=tuple(masks),
        causal=layout.order == "causal" and window is None,
        cross=cross,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """softmax(q k^T / sqrt(E)) v, masked as planned.

    Args:
        q: (B, N, H, E); k, v: (B, K, Hkv, E) with H a multiple of Hkv (grouped-query attention).
            For groups, B = 1 and N, K = T of either side.

    Returns:
        (B, N, H, E).
    """
    if plan.mode != "groups":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if plan.mode == "flex":
            return flex.attend_flex(q, k, v, plan.mask).transpose(1, 2)
        return _sdpa(q, k, v, plan.mask, plan.mode == "causal").transpose(1, 2)
    # split, not slices: the backward pass of each slice would allocate and add a gradient of full size
    keys = plan.group_keys or [n for _, n in plan.groups]
    sizes = [count * n for count, n in plan.groups]
    key_sizes = [count * m for (count, _), m in zip(plan.groups, keys, strict=True)]
    rest = [plan.extra_rows] if plan.extra_rows else []
    queries, (ks, vs) = q[0].split(sizes + rest), (t[0].split(key_sizes + rest) for t in (k, v))
    outs = []
    for (count, n), m, mask, *qkv in zip(plan.groups, keys, plan.group_masks, queries, ks, vs, strict=False):
        qg, kg, vg = (t.unflatten(0, (count, x)).transpose(1, 2) for t, x in zip(qkv, (n, m, m), strict=True))
        out = _sdpa(qg, kg, vg, mask, plan.causal, varied=True) if m else torch.zeros_like(qg)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return plan.add_rows(torch.cat(outs) if outs else q[0])[None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, varied: bool = False) -> Tensor:
    """(B, H, N, E), (B, Hkv, K, E) -> (B, H, N, E).

    Training in half precision on a CPU avoids SDPA, whose backward pass takes 2 to 10 times as long there at the lengths
    of images and sentences (torch 2.14; figures in docs/LOG.md). It uses two plain products, or, where sizes differ from
    batch to batch (`varied`), float32, whose kernel is not generated anew for each size.
    """
    grouped = q.shape[1] != k.shape[1]
    half = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    if half and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        if not varied and not grouped and q.shape[-2] * k.shape[-2] <= 512 * 512:
            return _plain_attention(q, k, v, mask, causal)
        if varied:
            with torch.autocast("cpu", enabled=False):
                return _sdpa(q.float(), k.float(), v.float(), mask, causal).to(q.dtype)
    if grouped and mask is not None and q.is_cuda:
        # CUDA's only kernel with grouped heads takes no mask: repeating keys costs less than SDPA's fallback
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """SDPA by its formula."""
    score = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        mask = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    return score.softmax(-1).to(v.dtype) @ v
