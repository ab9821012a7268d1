"""Cross-entropy over a vocabulary, computed in chunks so that the full logits are never in memory.

Logits are the largest activation of a language model: for 512 tokens of GPT-2 with its 50,257 tokens they take 100 MB,
their softmax another 100 MB and the gradient a third. Here each chunk of tokens gets its logits, its loss and at once its
gradient (which needs only the softmax), and the logits are freed. The backward pass only scales the stored gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # label without loss, as in torch's cross_entropy


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    chunk: int | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of `labels` under the logits ``hidden @ weight.T + bias``, summed over the tokens.

    Log-softmax is in float32; matrix products are in autocast's dtype if it is enabled. The gradient of `weight` is
    accumulated over chunks in float32.

    Args:
        hidden: (..., D) hidden states.
        weight: (V, D), the head's weight or the tied embedding.
        labels: (...) int64, 0 to V - 1, or IGNORE.
        bias: (V,) or None.
        chunk: tokens per chunk. None: logits of 2 MB per chunk on a CPU, 512 MB elsewhere, and at least 256 tokens.
        label_smoothing: share of the target that is spread evenly over the vocabulary, 0 to below 1.

    Returns:
        (sum, count): a float32 scalar, and the number of labels other than IGNORE (int64, no gradient). Without any
        label the sum is 0 with a graph. The mean is ``sum / count.clamp(min=1)``; sums of batches can be added first.

    Raises:
        ValueError: shapes or settings that do not match.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels are {tuple(labels.shape)}, hidden is {tuple(hidden.shape)}: expected one label per token"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight is {tuple(weight.shape)}, expected (V, {hidden.shape[-1]})")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing}, expected 0 to below 1")
    if chunk is None:
        # on a CPU a chunk fits into its cache: 40 % faster than one large chunk for a vocabulary of 2,000
        chunk = max(256, (1 << (19 if hidden.device.type == "cpu" else 27)) // weight.shape[0])
    flat, target = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    count = (target != IGNORE).sum()
    if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
        # reading a value is free on a CPU, and ignored tokens then cost nothing
        keep = int(count)
        index = _labelled_first(target, keep)
        if index is not None:
            flat, target = flat.index_select(0, index), target.index_select(0, index)
        masked = keep < len(target)
    else:
        masked = True
    grad = torch.is_grad_enabled()
    dtype = None
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    needs_grad = tuple(grad and t is not None and t.requires_grad for t in (flat, weight, bias))
    return _ChunkedCrossEntropy.apply(
        flat, weight, bias, target, (chunk, label_smoothing, dtype, masked, needs_grad)
    ), count


def _labelled_first(target: Tensor, keep: int) -> Tensor | None:
    """Indices of the tokens with a label, padded with ignored ones to one of few lengths; None: use all tokens.

    oneDNN generates new code for every number of rows that it has not met (see `backbone/attention.py`).
    """
    step = max(16, 1 << max(0, keep.bit_length() - 4))
    rows = -(-keep // step) * step
    if rows >= len(target):
        return None
    return torch.argsort((target == IGNORE).to(torch.uint8), stable=True)[:rows]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The summed loss; the forward pass also computes the gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, how):
        total, grads = _loss_and_grads(hidden, weight, bias, target, *how)
        ctx.how, ctx.grads = how, grads
        ctx.save_for_backward(hidden, weight, bias, target)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        # returned without a copy: the gradient is as large as the head
        grads, ctx.grads = ctx.grads, None
        if grads is None:  # a second backward pass through a retained graph
            hidden, weight, bias, target = ctx.saved_tensors
            grads = _loss_and_grads(hidden, weight, bias, target, *ctx.how)[1]
        return *(None if g is None else g.mul_(scale.to(g.dtype)) for g in grads), None, None


def _loss_and_grads(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    chunk: int,
    smoothing: float,
    dtype: torch.dtype | None,
    masked: bool,
    needs_grad: tuple[bool, bool, bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """(T, D), (V, D), (V,), (T,) -> the summed loss, and the gradients of the first three that need one."""
    total = torch.zeros((), device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad[1] else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_grad[2] else None
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(dtype or weight.dtype)
        b = None if bias is None else bias.to(w.dtype)
        for at in range(0, len(target), chunk):
            x, y = hidden[at : at + chunk].to(w.dtype), target[at : at + chunk]
            logp = F.log_softmax(F.linear(x, w, b).float(), -1)  # (chunk, V)
            counts = y != IGNORE
            y = y.masked_fill(~counts, 0)[:, None]
            loss = -logp.gather(1, y)[:, 0]
            if smoothing:
                loss = (1 - smoothing) * loss - smoothing * logp.mean(1)
            total += loss.masked_fill(~counts, 0).sum()
            if not any(needs_grad):
                continue
            grad = logp.exp_().scatter_add_(1, y, torch.full_like(y, smoothing - 1, dtype=logp.dtype))
            if smoothing:
                grad -= smoothing / len(w)
            if masked:
                grad.masked_fill_(~counts[:, None], 0)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(w.dtype)
            if grad_hidden is not None:
                grad_hidden[at : at + chunk] = grad @ w
            if grad_weight is None:
                continue
            if w.dtype == torch.float32:
                grad_weight.addmm_(grad.t(), x)
            else:
                grad_weight += grad.t() @ x
    grads = grad_hidden, grad_weight, grad_bias
    return total, [
        g if g is None else g.to(t.dtype) for g, t in zip(grads, (hidden, weight, bias), strict=True)
    ]
