"""The one rule of visibility as FlexAttention's BlockMask, for an accelerator.

Packed rows, prefixes and windows need no mask of N x N there: FlexAttention asks the rule token by token, and passes over
blocks of 128 x 128 in which nobody reads anybody. Where a row's lengths and order say all, the BlockMask is kept and
meets the next batch of the same lengths; otherwise it is made once a forward pass, for all layers.

The kernel is compiled on first use.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from worldtokens.tokens import Tokens

SHORT = 128  # tokens of one block: up to here a plain mask is as good
LEAST = 16  # heads narrower than this get zeros at their end, since the kernel takes none


def block_mask(tokens: Tokens, window: float | None = None) -> BlockMask:
    """Who reads whom, by the one rule.

    Args:
        tokens: (B, N, D).
        window: a token reads only those less than this far behind it in t.
    """
    layout = tokens.layout
    if layout is not None and layout.order != "any" and window is None and layout.rows >= 0:
        return _by_layout(layout.lengths, layout.order, tokens.shape[1], tokens.device)
    return _made(tokens.valid, tokens.segment, tokens.block, tokens.pos[..., 0].contiguous(), window)


@functools.lru_cache(maxsize=64)
def _by_layout(lengths: tuple[tuple[int, ...], ...], order: str, n: int, device: torch.device) -> BlockMask:
    """The rule of rows whose samples lie one after another, each read in one order."""
    segment = torch.full(
        (len(lengths), n), -1, dtype=torch.int32
    )  # padding, behind all samples, is read by none
    for row, samples in enumerate(lengths):
        numbers = torch.arange(len(samples), dtype=torch.int32).repeat_interleave(
            torch.tensor(samples, dtype=torch.int64)
        )
        segment[row, : len(numbers)] = numbers
    place = torch.arange(n, dtype=torch.int32).expand(len(lengths), n)
    block = place if order == "causal" else torch.zeros_like(place)
    parts = ((segment >= 0), segment, block, place)
    return _made(*(p.contiguous().to(device) for p in parts), None)


def _made(valid: Tensor, segment: Tensor, block: Tensor, t: Tensor, window: float | None) -> BlockMask:
    def reads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = valid[b, k] & (segment[b, q] == segment[b, k]) & (block[b, k] <= block[b, q])
        return seen if window is None else seen & (t[b, q] - t[b, k] < window)

    rows, n = valid.shape
    return create_block_mask(reads, rows, None, n, n, device=valid.device)


@functools.lru_cache(maxsize=1)
def _kernel():
    return torch.compile(flex_attention, dynamic=True)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """softmax(q k^T / sqrt(E)) v: (B, H, N, E), (B, Hkv, N, E) -> (B, H, N, E); zeros where nothing is read.

    On a CPU it runs uncompiled and without gradients: the reference that tests hold against the dense rule.
    """
    fast = q.is_cuda and not torch.compiler.is_compiling()
    run, width = _kernel() if fast else flex_attention, q.shape[-1]
    if width < LEAST:
        q, k, v = (F.pad(x, (0, LEAST - width)) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return run(q, k, v, block_mask=mask, scale=width**-0.5, enable_gqa=grouped)[..., :width]
