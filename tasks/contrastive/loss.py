"""The contrastive loss of two columns over the rows of all processes: softmax (CLIP) or sigmoid (SigLIP).

Notable: nothing here synchronises with the device, except one exchange of row counts in distributed training. Rows that
lack a column keep their index, hold zeros and are masked, so shapes do not depend on which rows have which column.

Shapes: n rows, C columns, D width of the shared space, K keys per row.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def hash_value(value: Any) -> int:
    """Hashes a value to 63 bits, above 0 and equal in every process; a tensor by its dtype, shape and content."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        data = (
            f"{plain.dtype}{tuple(plain.shape)}".encode()
            + plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    else:
        data = repr(value).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 | 1


def share_key(keys: Tensor) -> Tensor:
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
    """The symmetric contrastive loss between two columns: the mean over the rows that have both.

    Without entries in `same` this equals open_clip's `ClipLoss` (Radford et al. 2021), or with a bias its `SigLipLoss`
    (Zhai et al. 2023). Pairs of rows in `same` are neither positives nor negatives: they are masked.

    Args:
        a, b: (n, D) float32 embeddings of unit length; any finite values where a row lacks one.
        has: (n,) bool, the rows that have both columns.
        same: (n, n) bool, pairs of rows that are not negatives of each other.
        scale: factor of the cosines.
        bias: added to the logits; if given, the loss is the sigmoid one.
        label_smoothing: share of each row's target that is spread evenly over all its candidates, the positive included,
            as in `torch.nn.functional.cross_entropy`. Softmax loss only.

    Returns:
        A scalar; 0 with a graph where no row has both columns.
    """
    with torch.autocast(a.device.type, enabled=False):  # half precision rounds logits of 100 to steps of 0.5
        logits = scale.float() * a.float() @ b.float().T
    masked = same | ~has[:, None] | ~has
    diagonal = torch.eye(len(a), dtype=torch.bool, device=a.device)
    if bias is None:
        kept = logits.masked_fill(masked & ~diagonal, -torch.inf)
        each = kept.logsumexp(1) + kept.logsumexp(0) - 2 * logits.diagonal()
        if label_smoothing:  # the positive's logit minus the mean logit of the row's candidates
            count = (~masked | diagonal).sum(1)
            finite = logits.masked_fill(masked & ~diagonal, 0)
            margin = 2 * logits.diagonal() - (finite.sum(1) + finite.sum(0)) / count
            each = each + label_smoothing * margin
        each = each.masked_fill(~has, 0) / 2
    else:
        signed = torch.where(diagonal, 1.0, -1.0) * (logits + bias.float())
        each = -F.logsigmoid(signed).masked_fill((masked & ~diagonal) | (diagonal & ~has), 0).sum(1)
    return each.sum() / has.sum().clamp(min=1)


# ---- several processes -----------------------------------------------------------------------------------


def gather_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Gathers the rows of all processes in rank order, with gradients to each process; row counts may differ.

    Every process then computes the loss of the whole batch, so DDP's mean over equal losses is correct.

    Args:
        tensors: with the same number of rows.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return tensors
    world = torch.distributed.get_world_size()
    if world == 1:
        return tensors
    own_count = torch.tensor([len(tensors[0])], device=tensors[0].device)
    counts = torch.empty(world, dtype=own_count.dtype, device=own_count.device)
    torch.distributed.all_gather_into_tensor(counts, own_count)
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
