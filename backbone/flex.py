"""The one rule of visibility as FlexAttention's BlockMask, for an accelerator.

Packed rows, prefixes and windows need no N x N mask there: FlexAttention evaluates the rule per pair of tokens and skips
blocks of 128 x 128 pairs without a visible one. Where the layout determines the rule, the BlockMask is cached for later
batches of the same lengths; otherwise it is built once per forward pass, for all layers.

The kernel is compiled on first use.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from worldtokens.tokens import Tokens

MIN_LENGTH = 128  # tokens per block: up to this length a dense mask is as fast
MIN_HEAD_DIM = 16  # the kernel needs at least 16 channels per head: fewer are padded with zeros


def block_mask(tokens: Tokens, window: float | None = None) -> BlockMask:
    """The rule of visibility as a BlockMask.

    Args:
        tokens: (B, N, D).
        window: a token attends only to tokens less than this before it in t.
    """
    layout = tokens.layout
    if layout is not None and layout.order != "any" and window is None and layout.rows >= 0:
        return _mask_of_layout(layout.lengths, layout.order, tokens.shape[1], tokens.device)
    return _build_mask(tokens.valid, tokens.segment, tokens.block, tokens.pos[..., 0].contiguous(), window)


@functools.lru_cache(maxsize=64)
def _mask_of_layout(
    lengths: tuple[tuple[int, ...], ...], order: str, n: int, device: torch.device
) -> BlockMask:
    """The rule for rows of consecutive samples in one reading order."""
    segment = torch.full((len(lengths), n), -1, dtype=torch.int32)  # -1: padding, after all samples
    for row, samples in enumerate(lengths):
        numbers = torch.arange(len(samples), dtype=torch.int32)
        numbers = numbers.repeat_interleave(torch.tensor(samples, dtype=torch.int64))
        segment[row, : len(numbers)] = numbers
    index = torch.arange(n, dtype=torch.int32).expand(len(lengths), n)
    block = index if order == "causal" else torch.zeros_like(index)
    fields = ((segment >= 0), segment, block, index)
    return _build_mask(*(x.contiguous().to(device) for x in fields), None)


def _build_mask(valid: Tensor, segment: Tensor, block: Tensor, t: Tensor, window: float | None) -> BlockMask:
    def attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = valid[b, k] & (segment[b, q] == segment[b, k]) & (block[b, k] <= block[b, q])
        return seen if window is None else seen & (t[b, q] - t[b, k] < window)

    rows, n = valid.shape
    return create_block_mask(attends, rows, None, n, n, device=valid.device)


@functools.lru_cache(maxsize=1)
def _kernel():
    return torch.compile(flex_attention, dynamic=True)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """softmax(q k^T / sqrt(E)) v: (B, H, N, E), (B, Hkv, N, E) -> (B, H, N, E); zeros where no key is visible.

    On a CPU it runs uncompiled and without gradients: the reference that tests compare with the dense rule.
    """
    fast = q.is_cuda and not torch.compiler.is_compiling()
    run, width = _kernel() if fast else flex_attention, q.shape[-1]
    if width < MIN_HEAD_DIM:
        q, k, v = (F.pad(x, (0, MIN_HEAD_DIM - width)) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return run(q, k, v, block_mask=mask, scale=width**-0.5, enable_gqa=grouped)[..., :width]
