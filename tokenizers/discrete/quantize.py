"""From vectors to whole numbers and back: a learned codebook (VQ) and a fixed grid (FSQ).

Both have one face: `forward` for training (straight-through, with a loss of its own), `ids` and `codes` for use,
`size` for how many codes there are and `width` for how wide a vector is.

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
    """The face of a quantizer.

    A subclass sets `size` (K) and `width` (W) and writes the three verbs.
    """

    size: int
    width: int

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors (..., W) -> codes (..., W) whose gradient passes to z, ids (...) int64, a loss to be added."""
        raise NotImplementedError

    def ids(self, z: Tensor) -> Tensor:
        """Vectors (..., W) -> ids (...) int64. Learns nothing."""
        raise NotImplementedError

    def codes(self, ids: Tensor) -> Tensor:
        """Ids (...) -> their vectors (..., W) float32."""
        raise NotImplementedError


class FSQ(Quantizer):
    """Finite scalar quantization (Mentzer et al. 2023): each channel is bounded and rounded to a few levels.

    Nothing is learned and no code can die. A channel of L levels is ``round(tanh(z + s) h - o)`` with h a hair over
    (L - 1) / 2, o = 1/2 for even L and 0 for odd, and s such that z = 0 gives 0; divided by L // 2 for a code in
    [-1, 1]. The id is the mixed-radix number of the levels, the first channel counting least.

    Args:
        levels: how many values each channel has, 3 or more. (8, 5, 5, 5) are 1,000 codes; (8, 8, 8, 6, 5), 15,360.
    """

    def __init__(self, levels: Sequence[int] = (8, 5, 5, 5)) -> None:
        super().__init__()
        if (
            not isinstance(levels, list | tuple)
            or not levels
            or any(type(v) is not int or v < 3 for v in levels)
        ):
            # with two levels the even-sized channel's zero would lie where tanh has no slope
            raise InputError(
                f"levels is {levels!r}, expected whole numbers of 3 or more; the paper has 5 or more"
            )
        self.levels = tuple(levels)
        self.size, self.width = math.prod(levels), len(levels)
        basis = [math.prod(levels[:i]) for i in range(len(levels))]
        # whole numbers, so that no change of precision touches them
        self.register_buffer("level", torch.tensor(levels), persistent=False)
        self.register_buffer("basis", torch.tensor(basis), persistent=False)

    def bounded(self, z: Tensor) -> Tensor:
        """Vectors -> what is rounded: each channel between -L // 2 and (L - 1) // 2."""
        half = (self.level - 1) * (1 + 1e-3) / 2
        offset = (self.level % 2 == 0) * 0.5
        return torch.tanh(z.float() + torch.atanh(offset / half)) * half - offset

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        soft = self.bounded(z)
        hard = soft.round()
        codes = (soft + (hard - soft).detach()) / (self.level // 2)
        return codes.to(z.dtype), self._number(hard), z.new_zeros(())

    def ids(self, z: Tensor) -> Tensor:
        return self._number(self.bounded(z).round())

    def _number(self, hard: Tensor) -> Tensor:
        return ((hard.long() + self.level // 2) * self.basis).sum(-1)

    def codes(self, ids: Tensor) -> Tensor:
        level = ids[..., None] // self.basis % self.level
        return (level - self.level // 2) / (self.level // 2)


class VectorQuantizer(Quantizer):
    """A codebook: each vector becomes its nearest code (van den Oord et al. 2017).

    The codebook follows the vectors by moving averages (their appendix), or by gradient. A code that is used much
    less than its share is put where a vector of the batch is, so that none stays dead; that also places all of them
    in the first step. With several processes all count together and hold the same codebook.

    Args:
        size: number of codes K.
        width: width W of a vector; small ones (8 to 32) keep more codes in use.
        ema: how much of the average is kept at each step, e.g. 0.99; None: the codebook is a parameter.
        commitment: weight of the loss that draws vectors to their codes.
        revive: a code used less than this share of the mean use is moved; 0 never.
    """

    def __init__(
        self,
        size: int = 1024,
        width: int = 16,
        ema: float | None = 0.99,
        commitment: float = 0.25,
        revive: float = 0.1,
    ) -> None:
        super().__init__()
        if type(size) is not int or type(width) is not int or size < 2 or width < 1:
            raise InputError(f"size={size!r}, width={width!r}: expected whole numbers, at least 2 and 1")
        if ema is not None and not 0 <= ema < 1:
            raise InputError(f"ema={ema!r}, expected 0 or more and below 1, or None")
        if not 0 <= revive < 1 or commitment < 0:
            raise InputError(f"revive={revive!r}, commitment={commitment!r}: expected [0, 1) and 0 or more")
        self.size, self.width, self.ema, self.commitment, self.revive = size, width, ema, commitment, revive
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
            self._learn(z.detach().float().reshape(-1, self.width), ids.flatten())
        hard = hard.to(z.dtype)
        return z + (hard - z).detach(), ids, loss

    def ids(self, z: Tensor) -> Tensor:
        z = z.detach().float()
        # |z - e|^2 without |z|^2, which is the same for all codes
        return (self.codebook.detach().square().sum(1) - 2 * (z @ self.codebook.detach().T)).argmin(-1)

    def codes(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.codebook)

    @torch.no_grad()
    def _learn(self, z: Tensor, ids: Tensor) -> None:
        """Follow a batch's vectors (M, W), and move dead codes. Looks into no tensor, so nothing waits."""
        counts = _over_processes(torch.zeros_like(self.uses).index_add_(0, ids, torch.ones_like(z[:, 0])))
        keep = self.ema if self.ema is not None else 0.99
        self.uses.mul_(keep).add_(counts, alpha=1 - keep)
        if self.ema is not None:
            sums = _over_processes(torch.zeros_like(self.sums).index_add_(0, ids, z))
            self.sums.mul_(keep).add_(sums, alpha=1 - keep)
            # codes that were never used have no average yet
            mean = self.sums / self.uses.clamp(min=1e-12)[:, None]
            self.codebook.copy_(torch.where(self.uses[:, None] > 1e-12, mean, self.codebook))
        if self.revive:
            each = counts.sum() / self.size
            dead = self.uses < self.revive * each
            pick = z[torch.randint(len(z), (self.size,), device=z.device)]
            if dist.is_available() and dist.is_initialized():
                dist.broadcast(pick, 0)
            self.codebook.data.copy_(torch.where(dead[:, None], pick, self.codebook))
            self.uses.copy_(torch.where(dead, each, self.uses))
            if self.ema is not None:
                self.sums.copy_(torch.where(dead[:, None], pick * each, self.sums))


def _over_processes(x: Tensor) -> Tensor:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(x)
    return x


def codebook_use(ids: Tensor, size: int) -> dict[str, Tensor]:
    """How much of a codebook these ids use.

    Args:
        ids: any shape, whole numbers below `size`.

    Returns:
        `used`, the share of codes that occur at all, and `perplexity`, how many equally likely codes would spread as
        much: exp of the entropy, from 1 to `size`.
    """
    counts = torch.zeros(size, device=ids.device).index_add_(
        0, ids.flatten(), torch.ones_like(ids.flatten()).float()
    )
    share = counts / counts.sum().clamp(min=1)
    return {"used": (counts > 0).float().mean(), "perplexity": torch.special.entr(share).sum().exp()}
