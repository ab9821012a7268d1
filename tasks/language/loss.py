"""Cross-entropy over a vocabulary, worked through in chunks so that all logits are never held at once.

The head of a language model is its widest place: 512 tokens of GPT-2 against 50,257 pieces are 100 MB of logits, their
softmax another 100 and its gradient a third. Here a chunk of tokens gets its logits, its loss and, at once, its gradient
(which needs nothing but the softmax just made), and the logits are forgotten. The backward pass only scales what is there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # the label of a place that is not predicted, as in torch's cross_entropy


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    chunk: int | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of `labels` under the logits ``hidden @ weight.T + bias``, summed over the tokens.

    Log-sums are in float32; the products are in autocast's type where it is on. The gradient for `weight` is summed
    over chunks in float32.

    Args:
        hidden: (..., D), what the head reads.
        weight: (V, D), a free head or the embedding itself.
        labels: (...) int64, 0 to V - 1, or IGNORE for places that do not count.
        bias: (V,) or None.
        chunk: tokens whose logits are held at a time. None: as many as take 2 MB on a CPU, 512 MB
            elsewhere, and 256 at least.
        label_smoothing: share of the target spread evenly over the vocabulary, 0 to below 1.

    Returns:
        (sum, count): a float32 scalar, and how many labels counted (int64, no gradient). Nothing to predict gives 0 with
        a graph. The mean is ``sum / count.clamp(min=1)``; sums of several batches may be added first.

    Raises:
        ValueError: shapes or settings that do not fit together.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels are {tuple(labels.shape)}, hidden is {tuple(hidden.shape)}: one label a token"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight is {tuple(weight.shape)}, expected (V, {hidden.shape[-1]})")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing}, expected 0 to below 1")
    if chunk is None:
        # on a CPU as much as its cache holds: 40 % faster than one large chunk for 2,000 pieces
        chunk = max(256, (1 << (19 if hidden.device.type == "cpu" else 27)) // weight.shape[0])
    flat, target = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    count = (target != IGNORE).sum()
    if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
        # a look costs nothing here, and places that do not count then cost nothing either
        keep = int(count)
        places = _counting_first(target, keep)
        if places is not None:
            flat, target = flat.index_select(0, places), target.index_select(0, places)
        masked = keep < len(target)
    else:
        masked = True
    grad = torch.is_grad_enabled()
    dtype = None
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    wanted = tuple(grad and t is not None and t.requires_grad for t in (flat, weight, bias))
    return _Sum.apply(flat, weight, bias, target, (chunk, label_smoothing, dtype, masked, wanted)), count


def _counting_first(target: Tensor, keep: int) -> Tensor | None:
    """Places of the labels that count, and a few others so that their number is one of few; None: take all.

    oneDNN writes its code anew for every number of rows that it has not met (see `backbone/attention.py`).
    """
    step = max(16, 1 << max(0, keep.bit_length() - 4))
    rows = -(-keep // step) * step
    if rows >= len(target):
        return None
    return torch.argsort((target == IGNORE).to(torch.uint8), stable=True)[:rows]


class _Sum(torch.autograd.Function):
    """The sum, with its gradients made on the way."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, how):
        total, grads = _work(hidden, weight, bias, target, *how)
        ctx.how, ctx.grads = how, grads
        ctx.save_for_backward(hidden, weight, bias, target)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        grads, ctx.grads = (
            ctx.grads,
            None,
        )  # handed over, not copied: a head's gradient is as large as the head
        if grads is None:  # a second backward pass through a kept graph
            hidden, weight, bias, target = ctx.saved_tensors
            grads = _work(hidden, weight, bias, target, *ctx.how)[1]
        return *(None if g is None else g.mul_(scale.to(g.dtype)) for g in grads), None, None


def _work(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    chunk: int,
    smoothing: float,
    dtype: torch.dtype | None,
    masked: bool,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """(T, D), (V, D), (V,), (T,) -> the summed loss, and the gradients for the first three that are wanted."""
    total = torch.zeros((), device=hidden.device)
    for_hidden = torch.empty_like(hidden) if wanted[0] else None
    for_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
    for_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None
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
            if not any(wanted):
                continue
            grad = logp.exp_().scatter_add_(1, y, torch.full_like(y, smoothing - 1, dtype=logp.dtype))
            if smoothing:
                grad -= smoothing / len(w)
            if masked:
                grad.masked_fill_(~counts[:, None], 0)
            if for_bias is not None:
                for_bias += grad.sum(0)
            grad = grad.to(w.dtype)
            if for_hidden is not None:
                for_hidden[at : at + chunk] = grad @ w
            if for_weight is None:
                continue
            if w.dtype == torch.float32:
                for_weight.addmm_(grad.t(), x)
            else:
                for_weight += grad.t() @ x
    grads = for_hidden, for_weight, for_bias
    return total, [
        g if g is None else g.to(t.dtype) for g, t in zip(grads, (hidden, weight, bias), strict=True)
    ]
