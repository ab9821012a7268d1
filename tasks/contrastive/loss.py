"""The contrastive loss of two columns, over the rows of all processes: softmax (CLIP) or sigmoid (SigLIP).

Notable: nothing here waits for the device, but one exchange of row counts where several processes train. Rows that lack a
column stay in their places with zeros and are masked, so shapes do not follow from which rows have what.

Shapes: n rows, C columns, D width of the space, K keys of a row.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def key_of(value: Any) -> int:
    """A 63-bit number for a value, the same in every process; a raw tensor by its type, shape and content."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        data = (
            f"{plain.dtype}{tuple(plain.shape)}".encode()
            + plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    else:
        data = repr(value).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 | 1


def alike(keys: Tensor) -> Tensor:
    """(n, K) int64 keys, 0 = none -> (n, n) bool, True where two rows share a key."""
    out = torch.zeros(len(keys), len(keys), dtype=torch.bool, device=keys.device)
    for column in keys.unbind(1):
        out |= (column[:, None] == column) & (column != 0)
    return out


def pair_loss(
    a: Tensor,
    b: Tensor,
    has: Tensor,
    same: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """How well each row's two vectors find each other among the rows that have both: the mean over those rows.

    With no two rows alike this is open_clip's `ClipLoss` (Radford et al. 2021), or with a bias its `SigLipLoss` (Zhai et
    al. 2023). Rows that are alike are neither match nor mismatch of each other: they are left out.

    Args:
        a, b: (n, D) float32, unit length; anything finite where a row lacks one.
        has: (n,) bool, which rows have both.
        same: (n, n) bool, which rows show the same thing.
        scale: factor of the cosines.
        bias: added to the logits; given, the loss is the sigmoid one.
        label_smoothing: share of each row's target that is spread evenly over all its candidates, its own among them, as
            `torch.nn.functional.cross_entropy` does; of the softmax loss.

    Returns:
        A scalar, 0 with a graph where no row has both.
    """
    with torch.autocast(a.device.type, enabled=False):  # half precision rounds logits of 100 to steps of 0.5
        logits = scale.float() * a.float() @ b.float().T
    out = same | ~has[:, None] | ~has
    own = torch.eye(len(a), dtype=torch.bool, device=a.device)
    if bias is None:
        found = logits.masked_fill(out & ~own, -torch.inf)
        each = found.logsumexp(1) + found.logsumexp(0) - 2 * logits.diagonal()
        if label_smoothing:  # what the row's own logit stands above the mean of its candidates'
            count = (~out | own).sum(1)
            left = logits.masked_fill(out & ~own, 0)
            above = 2 * logits.diagonal() - (left.sum(1) + left.sum(0)) / count
            each = each + label_smoothing * above
        each = each.masked_fill(~has, 0) / 2
    else:
        signed = torch.where(own, 1.0, -1.0) * (logits + bias.float())
        each = -F.logsigmoid(signed).masked_fill((out & ~own) | (own & ~has), 0).sum(1)
    return each.sum() / has.sum().clamp(min=1)


# ---- several processes -----------------------------------------------------------------------------------


def gather_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The rows of all processes, in the order of their ranks, with gradients back to each; they may differ in number.

    Every process then has the loss of the whole batch, as one process would: DDP's mean over equal losses is right.

    Args:
        tensors: of the same number of rows.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return tensors
    world = torch.distributed.get_world_size()
    if world == 1:
        return tensors
    mine = torch.tensor([len(tensors[0])], device=tensors[0].device)
    counts = torch.empty(world, dtype=mine.dtype, device=mine.device)
    torch.distributed.all_gather_into_tensor(counts, mine)
    counts = counts.tolist()
    return tuple(_Gather.apply(t, counts, torch.distributed.get_rank()) for t in tensors)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, counts: list[int], rank: int) -> Tensor:
        ctx.first, ctx.count = sum(counts[:rank]), counts[rank]
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(parts, padded)
        return torch.cat([p[:c] for p, c in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        torch.distributed.all_reduce(grad)
        return grad[ctx.first : ctx.first + ctx.count], None, None
