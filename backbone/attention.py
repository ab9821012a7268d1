"""The attention primitive, and the ways in which the one rule of visibility is carried out.

`Reading` decides once for a forward pass, from static knowledge alone (`Tokens.layout`), how every layer reads:

    full     every row is one whole sample, all together: no mask
    causal   one sample a row, read left to right: SDPA's is_causal (padding stands behind, so none reads it)
    padded   one sample a row, all together, padding masked by key
    groups   padded or packed rows on a CPU: padding is taken out and samples of equal length are worked
             on together, so that neither attention nor the linear layers see a padded place
    dense    anything else: the mask of `worldtokens.tokens.visible`

All give the same numbers at valid tokens; tests hold them against `dense`.
Shapes: B rows, N tokens, H heads, E = dim / heads, T = all valid tokens.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from worldtokens.tokens import Tokens, visible


@dataclasses.dataclass(frozen=True)
class Reading:
    """How one forward pass reads: made by `plan`, handed to every layer."""

    kind: str
    mask: Tensor | None = None  # for SDPA: (B, 1, 1 | N, N) bool, True = reads
    gather: Tensor | None = None  # groups: (T,) places in the flattened (B * N) rows
    groups: tuple[tuple[int, int], ...] = ()  # groups: (samples, length of each)
    group_masks: tuple[Tensor | None, ...] = ()  # groups: (samples, 1, L, L) or None
    causal: bool = False  # groups without masks: read left to right

    def enter(self, x: Tensor) -> Tensor:
        """(B, N, ...) -> (1, T, ...) for groups; otherwise x itself."""
        if self.gather is None:
            return x
        return x.reshape(-1, *x.shape[2:]).index_select(0, self.gather)[None]

    def leave(self, x: Tensor, b: int, n: int) -> Tensor:
        """(1, T, D) -> (B, N, D) with zeros at padding, for groups; otherwise x itself."""
        if self.gather is None:
            return x
        out = x.new_zeros(b * n, x.shape[-1])
        return out.index_copy(0, self.gather, x[0]).view(b, n, -1)


def plan(tokens: Tokens, window: float | None = None, kind: str | None = None) -> Reading:
    """Choose how to read these tokens without looking into a tensor.

    Args:
        tokens: (B, N, D).
        window: a token reads only those less than this far behind it in t.
        kind: force one way (tests and benchmarks).
    """
    layout = tokens.layout
    n = tokens.shape[1]
    if kind is None:
        kind = _choose(tokens, window)
    if kind == "full":
        return Reading("full")
    if kind == "causal":
        return Reading("causal")
    if kind == "padded":
        # a row with nothing valid reads its own zeros, so that its softmax stays finite
        some = tokens.valid.any(1, keepdim=True)
        return Reading("padded", mask=(tokens.valid | ~some)[:, None, None, :])
    if kind == "groups":
        return _groups(tokens, layout, n, window)
    mask = visible(tokens, window=window)
    # padding reads itself: its output is thrown away, but a softmax over nothing would be NaN
    mask = mask | (~tokens.valid[:, :, None] & torch.eye(n, dtype=torch.bool, device=mask.device))
    return Reading("dense", mask=mask[:, None])


def _choose(tokens: Tokens, window: float | None) -> str:
    layout, n = tokens.layout, tokens.shape[1]
    if layout is None or n == 0:
        return "dense"
    if layout.full(n) and window is None and layout.order != "any":
        return "full" if layout.order == "together" else "causal"
    if layout.full(n):
        return "dense"
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        return "groups"
    if layout.single and window is None and layout.order != "any":
        return "padded" if layout.order == "together" else "causal"
    return "dense"


def _groups(tokens: Tokens, layout, n: int, window: float | None) -> Reading:
    starts: dict[int, list[int]] = {}
    for row, lengths in enumerate(layout.lengths):
        at = row * n
        for length in lengths:
            if length:
                starts.setdefault(length, []).append(at)
            at += length
    index, groups, masks = [], [], []
    device = tokens.device
    for length in sorted(starts):
        first = torch.tensor(starts[length], device=device)
        places = (first[:, None] + torch.arange(length, device=device)).flatten()
        index.append(places)
        groups.append((len(starts[length]), length))
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
    gather = torch.cat(index) if index else torch.zeros(0, dtype=torch.long, device=device)
    causal = layout.order == "causal" and window is None
    return Reading("groups", None, gather, tuple(groups), tuple(masks), causal)


def attend(q: Tensor, k: Tensor, v: Tensor, reading: Reading) -> Tensor:
    """softmax(q k^T / sqrt(E)) v under a reading.

    Args:
        q: (B, N, H, E); k, v: (B, N, Hkv, E) with H a multiple of Hkv (grouped-query attention).
            For groups, B = 1 and N = T.

    Returns:
        (B, N, H, E).
    """
    if k.shape[2] != q.shape[2]:
        k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    if reading.kind != "groups":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return _sdpa(q, k, v, reading.mask, reading.kind == "causal").transpose(1, 2)
    # split, not slices: the gradient of many slices would fill and add the whole row once for each
    sizes = [count * length for count, length in reading.groups]
    outs = []
    for *part, (count, length), mask in zip(
        *(t[0].split(sizes) for t in (q, k, v)), reading.groups, reading.group_masks, strict=True
    ):
        part = [t.unflatten(0, (count, length)).transpose(1, 2) for t in part]
        outs.append(_sdpa(*part, mask, reading.causal).transpose(1, 2).flatten(0, 1))
    return (torch.cat(outs) if outs else q[0])[None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """SDPA over (B, H, N, E), but for training in half precision on a CPU.

    There its kernel's backward pass took 3 to 10 times as long as two plain products at the lengths of pictures and
    sentences (torch 2.14, 192 x 16 and 32 x 196 tokens of 3 heads of 64; docs/LOG.md), so those are used as long as
    the weights of a head stay small.
    """
    plain = (
        q.device.type == "cpu"
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-2] * k.shape[-2] <= 512 * 512
        and torch.is_grad_enabled()
        and q.requires_grad
    )
    if not plain:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    score = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        mask = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    return score.softmax(-1).to(v.dtype) @ v
