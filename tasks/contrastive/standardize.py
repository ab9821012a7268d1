"""Standardises each channel of the shared space to mean 0 and variance 1, before embeddings are normalised.

Embeddings of one modality share a common direction that carries no information about the sample, and an image close to
it ranks high for every caption. Batch normalisation (Ioffe & Szegedy 2015) without gain and bias removes it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Standardize(nn.Module):
    """Standardises channels by their running mean and variance, in training by the batch's.

    Args:
        dim: channels D.
        momentum: weight of a batch's statistics in the running ones; more for the first batches, which are averaged
            evenly.
        eps: added to variances.
    """

    def __init__(self, dim: int, momentum: float = 0.02, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Standardises (n, D) by the running statistics."""
        return (x - self.mean) * (self.var + self.eps).rsqrt()

    def forward_batch(self, x: Tensor, has: Tensor) -> Tensor:
        """Standardises (n, D) by the statistics of the rows in `has`, (n,) bool, and updates the running ones.

        Fewer than two rows have no variance: they use the running statistics, which then stay unchanged. Nothing here
        synchronises with the device. Rows outside `has` give zeros.
        """
        rows = has.to(x.dtype)[:, None]
        count = rows.sum()
        enough, count = count > 1, count.clamp(min=1)
        mean = (rows * x).sum(0) / count
        var = (rows * (x - mean).square()).sum(0) / count
        with torch.no_grad():
            self.batches += enough
            weight = torch.where(enough, (1 / self.batches.clamp(min=1)).clamp(min=self.momentum), 0.0)
            self.mean.lerp_(mean, weight)
            self.var.lerp_(var, weight)
        out = (x - mean) * (var + self.eps).rsqrt()
        return rows * torch.where(enough, out, self(x))
