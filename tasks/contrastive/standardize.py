"""Every channel of a shared space to mean 0 and variance 1, before vectors are made unit length.

Vectors of one modality share a direction that tells nothing about any of them, and an image near it is near every
sentence. Batch normalisation (Ioffe & Szegedy 2015) without gain and bias takes it out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Standardize(nn.Module):
    """Channels by their running mean and variance; those of the batch in training.

    Args:
        dim: channels D.
        follow: how much of a batch's figures goes into the running ones; more over the first batches, which are
            averaged evenly.
        eps: added to variances.
    """

    def __init__(self, dim: int, follow: float = 0.02, eps: float = 1e-5) -> None:
        super().__init__()
        self.follow, self.eps = follow, eps
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """(n, D) by the running figures."""
        return (x - self.mean) * (self.var + self.eps).rsqrt()

    def of_batch(self, x: Tensor, has: Tensor) -> Tensor:
        """(n, D) by the figures of the rows in `has`, (n,) bool, which the running ones then follow.

        Fewer than two rows have no spread: they are taken by the running figures, which stay. Nothing here waits for the
        device. Other rows give zeros.
        """
        rows = has.to(x.dtype)[:, None]
        count = rows.sum()
        enough, count = count > 1, count.clamp(min=1)
        mean = (rows * x).sum(0) / count
        var = (rows * (x - mean).square()).sum(0) / count
        with torch.no_grad():
            self.batches += enough
            share = torch.where(enough, (1 / self.batches.clamp(min=1)).clamp(min=self.follow), 0.0)
            self.mean.lerp_(mean, share)
            self.var.lerp_(var, share)
        out = (x - mean) * (var + self.eps).rsqrt()
        return rows * torch.where(enough, out, self(x))
