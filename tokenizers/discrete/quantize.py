"""Quantizers, from vectors to ids and back: a learned codebook (VQ) and a fixed grid (FSQ).

Both have one interface: `forward` for training (straight-through, with its own loss), `ids` and `codes` for inference,
`size` for the number of codes and `width` for the width of a vector.

Shapes: M vectors, K codes, W width of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import Part


class Quantizer(Part):
    """Base class of quantizers.

    A subclass sets `size` (K) and `width` (W) and implements the three methods.
    """

    size: int
    width: int

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors (..., W) -> codes (..., W) whose gradient passes to z, ids (...) int64, a loss to add."""
        raise NotImplementedError

    def ids(self, z: Tensor) -> Tensor:
        """Vectors (..., W) -> ids (...) int64. Updates nothing."""
        raise NotImplementedError

    def codes(self, ids: Tensor) -> Tensor:
        """Ids (...) -> their vectors (..., W) float32."""
        raise NotImplementedError


class FSQ(Quantizer):
    """Finite scalar quantization (Mentzer et al. 2023): each channel is bounded and rounded to a few levels.

    Nothing is learned and no code can die. A channel of L levels is ``round(tanh(z + s) h - o)`` with h slightly above
    (L - 1) / 2, o = 1/2 for even L and 0 for odd, and s such that z = 0 gives 0; divided by L // 2 for a code in
    [-1, 1]. The id is the mixed-radix number of the levels, the first channel being the least significant.

    Args:
        levels: number of values per channel, 3 or more. (8, 5, 5, 5) are 1,000 codes; (8, 8, 8, 6, 5) are 15,360.
    """

    def __init__(self, levels: Sequence[int] = (8, 5, 5, 5)) -> None:
        super().__init__()
        if (
            not isinstance(levels, list | tuple)
            or not levels
            or any(type(v) is not int or v < 3 for v in levels)
        ):
            # with two levels the zero of the channel would be where tanh has no slope
            raise InputError(
                f"levels is {levels!r}, expected whole numbers of 3 or more; the paper has 5 or more"
            )
        self.levels = tuple(levels)
        self.size, self.width = math.prod(levels), len(levels)
        basis = [math.prod(levels[:i]) for i in range(len(levels))]
        # integers, so that no change of precision affects them
        self.register_buffer("level", torch.tensor(levels), persistent=False)
        self.register_buffer("basis", torch.tensor(basis), persistent=False)

    def bounded(self, z: Tensor) -> Tensor:
        """Vectors -> values before rounding: each channel between -L // 2 and (L - 1) // 2."""
        half = (self.level - 1) * (1 + 1e-3) / 2
        offset = (self.level % 2 == 0) * 0.5
        return torch.tanh(z.float() + torch.atanh(offset / half)) * half - offset

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        soft = self.bounded(z)
        hard = soft.round()
        codes = (soft + (hard - soft).detach()) / (self.level // 2)
        return codes.to(z.dtype), self._to_ids(hard), z.new_zeros(())

    def ids(self, z: Tensor) -> Tensor:
        return self._to_ids(self.bounded(z).round())

    def _to_ids(self, hard: Tensor) -> Tensor:
        return ((hard.long() + self.level // 2) * self.basis).sum(-1)

    def codes(self, ids: Tensor) -> Tensor:
        level = ids[..., None] // self.basis % self.level
        return (level - self.level // 2) / (self.level // 2)


class VectorQuantizer(Quantizer):
    """A learned codebook: each vector becomes its nearest code (van den Oord et al. 2017).

    The codebook is updated by moving averages of the vectors (their appendix), or by gradient. A code used much less
    than the mean is reset to a vector of the batch, so that none stays dead; this also initialises all of them in the
    first step. Distributed processes sum their counts and keep the same codebook.

    Args:
        size: number of codes K.
        width: width W of a vector; small ones (8 to 32) keep more codes in use.
        ema: decay of the moving averages, e.g. 0.99; None: the codebook is a parameter.
        commitment: weight of the loss that pulls vectors to their codes.
        dead_threshold: a code used less than this share of the mean is reset; 0: never.
    """

    def __init__(
        self,
        size: int = 1024,
        width: int = 16,
        ema: float | None = 0.99,
        commitment: float = 0.25,
        dead_threshold: float = 0.1,
    ) -> None:
        super().__init__()
        if type(size) is not int or type(width) is not int or size < 2 or width < 1:
            raise InputError(f"size={size!r}, width={width!r}: expected whole numbers, at least 2 and 1")
        if ema is not None and not 0 <= ema < 1:
            raise InputError(f"ema={ema!r}, expected 0 or more and below 1, or None")
        if not 0 <= dead_threshold < 1 or commitment < 0:
            raise InputError(
                f"dead_threshold={dead_threshold!r}, commitment={commitment!r}: expected [0, 1) and 0 or more"
            )
        self.size, self.width, self.ema, self.commitment = size, width, ema, commitment
        self.dead_threshold = dead_threshold
        book = torch.randn(size, width)
        if ema is None:
            self.codebook = nn.Parameter(book)
        else:
            self.register_buffer("codebook", book)
            self.register_buffer("sums", torch.zeros(size, width))  # moving sum of each code's vectors
        self.register_buffer("uses", torch.zeros(size))  # moving count of each code's vectors

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids = self.ids(z)
        hard = F.embedding(ids, self.codebook)
        loss = self.commitment * F.mse_loss(z.float(), hard.detach())
        if self.ema is None:
            loss = loss + F.mse_loss(hard, z.detach().float())
        if self.training:
            self._update(z.detach().float().reshape(-1, self.width), ids.flatten())
        hard = hard.to(z.dtype)
        return z + (hard - z).detach(), ids, loss

    def ids(self, z: Tensor) -> Tensor:
        z = z.detach().float()
        # |z - e|^2 without |z|^2, which is the same for all codes
        return (self.codebook.detach().square().sum(1) - 2 * (z @ self.codebook.detach().T)).argmin(-1)

    def codes(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.codebook)

    @torch.no_grad()
    def _update(self, z: Tensor, ids: Tensor) -> None:
        """Update the codebook from vectors (M, W) and reset dead codes; no value is read on the CPU (no synchronisation)."""
        counts = _sum_over_processes(torch.zeros_like(self.uses).index_add_(0, ids, torch.ones_like(z[:, 0])))
        decay = self.ema if self.ema is not None else 0.99
        self.uses.mul_(decay).add_(counts, alpha=1 - decay)
        if self.ema is not None:
            sums = _sum_over_processes(torch.zeros_like(self.sums).index_add_(0, ids, z))
            self.sums.mul_(decay).add_(sums, alpha=1 - decay)
            # codes that were never used have no average yet
            mean = self.sums / self.uses.clamp(min=1e-12)[:, None]
            self.codebook.copy_(torch.where(self.uses[:, None] > 1e-12, mean, self.codebook))
        if self.dead_threshold:
            mean_use = counts.sum() / self.size
            dead = self.uses < self.dead_threshold * mean_use
            pick = z[torch.randint(len(z), (self.size,), device=z.device)]
            if dist.is_available() and dist.is_initialized():
                dist.broadcast(pick, 0)
            self.codebook.data.copy_(torch.where(dead[:, None], pick, self.codebook))
            self.uses.copy_(torch.where(dead, mean_use, self.uses))
            if self.ema is not None:
                self.sums.copy_(torch.where(dead[:, None], pick * mean_use, self.sums))


def _sum_over_processes(x: Tensor) -> Tensor:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(x)
    return x


def codebook_use(ids: Tensor, size: int) -> dict[str, Tensor]:
    """Use of a codebook by ids.

    Args:
        ids: any shape, whole numbers below `size`.

    Returns:
        `used`, the share of codes that occur, and `perplexity`, exp of the entropy of the ids, from 1 to `size`.
    """
    counts = torch.zeros(size, device=ids.device).index_add_(
        0, ids.flatten(), torch.ones_like(ids.flatten()).float()
    )
    share = counts / counts.sum().clamp(min=1)
    return {"used": (counts > 0).float().mean(), "perplexity": torch.special.entr(share).sum().exp()}
