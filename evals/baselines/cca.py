"""A linear baseline for matching modalities: canonical correlations of pooled raw features, pair by pair.

Each kind of thing becomes one vector without any learning (colours on a coarse grid, counts of character n-grams, mean
log-mel over four stretches of time, occupied cells of a cloud). Regularised CCA (Hotelling 1936; Vinod 1976) of two kinds
finds the linear maps under which matching vectors agree best. How strongly each side is regularised and how many
directions are kept is chosen on validation rows.

Shapes: n samples, F features, K directions.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from worldtokens.tasks.metrics.retrieval import between

Things = tuple[Tensor, list[Hashable]]  # (n, F) features, and the id of each
STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
DIRECTIONS = (8, 16, 32, 64, 128)


# ---- raw features --------------------------------------------------------------------------------------------


def picture_features(pixels: Tensor) -> Tensor:
    """(3, H, W) uint8 -> (256,): mean colours of an 8 x 8 grid, and the shares of 64 colours."""
    x = pixels.float() / 255
    grid = F.adaptive_avg_pool2d(x, 8).flatten()
    cells = (pixels // 64).long()
    histogram = (cells[0] * 16 + cells[1] * 4 + cells[2]).flatten().bincount(minlength=64)
    return torch.cat([grid, (histogram / histogram.sum()).sqrt()])


def text_features(text: str, size: int = 1024) -> Tensor:
    """Words, and character 2- and 3-grams, counted in `size` places by hash, the square root of each."""
    out = torch.zeros(size)
    for word in text.casefold().split():
        marked = f"<{word}>"
        grams = [marked] + [marked[i : i + n] for n in (2, 3) for i in range(len(marked) - n + 1)]
        for gram in grams:
            out[zlib.crc32(gram.encode()) % size] += 1
    return out.sqrt()


def sound_features(spectrum: Tensor) -> Tensor:
    """(frames, bands) log-mel -> (6 bands + 1,): mean and deviation, means of four stretches of time, the length."""
    parts = [p.mean(0) for p in np.array_split(spectrum, min(4, len(spectrum)))]
    parts += parts[-1:] * (4 - len(parts))
    length = torch.tensor([len(spectrum) / 100])
    return torch.cat([spectrum.mean(0), spectrum.std(0, correction=0), *parts, length])


def cloud_features(points: Tensor, cells: int = 8) -> Tensor:
    """(n, 3) points -> (cells^3 + 3,): shares of the cells of the bounding cube, and the sides of the box in logs."""
    low, high = points.amin(0), points.amax(0)
    sides = (high - low).clamp(min=1e-6)
    place = ((points - (low + high) / 2) / sides.max() + 0.5).clamp(0, 1 - 1e-6)
    place = (place * cells).long()
    flat = (place[:, 0] * cells + place[:, 1]) * cells + place[:, 2]
    shares = flat.bincount(minlength=cells**3) / len(points)
    return torch.cat([shares.float().sqrt(), (sides / sides.max()).log()])


# ---- canonical correlations -----------------------------------------------------------------------------------


@dataclasses.dataclass
class _Side:
    """One side's features, centred and turned onto their principal directions."""

    mean: Tensor  # (F,)
    turn: Tensor  # (F, R)
    power: Tensor  # (R,) variance along each

    @classmethod
    def of(cls, x: Tensor) -> _Side:
        mean = x.mean(0)
        power, turn = torch.linalg.eigh((x - mean).T @ (x - mean) / len(x))
        kept = power > 1e-9 * power.max()
        return cls(mean, turn[:, kept], power[kept])

    def turned(self, x: Tensor) -> Tensor:
        """(n, F) -> (n, R)."""
        return (x.double() - self.mean) @ self.turn

    def gain(self, strength: float) -> Tensor:
        """(R,): what makes the variances 1, directions weaker than `strength` times the mean variance held down."""
        return (self.power + strength * self.power.mean()).rsqrt()


def linear_pairs(
    train: Mapping[str, Things],
    validation: Mapping[str, Things],
    test: Mapping[str, Things],
    mate: Callable[[Hashable], Hashable] = lambda i: i,
    say: Callable[[str], None] = print,
) -> dict[str, float]:
    """Fit a CCA for every two kinds and measure retrieval on the test things, as `CLIP.evaluate` counts it.

    Args:
        train, validation, test: kind -> features and ids. Training things of one id are matched with each other.
        mate: the id that counts in validation and test, from a thing's id there, e.g. the object of a caption in a language.
        say: told what was chosen.

    Returns:
        The figures of `tasks.retrieval.between` for every ordered pair, and ``"mean/R@10"``.
    """
    out: dict[str, float] = {}
    for a, b in itertools.combinations(train, 2):
        xa, xb = _matched(train[a], train[b])
        sides = _Side.of(xa), _Side.of(xb)
        cross = sides[0].turned(xa).T @ sides[1].turned(xb) / len(xa)
        held, asked = (
            [
                (side.turned(s[k][0]), [mate(i) for i in s[k][1]])
                for side, k in zip(sides, (a, b), strict=True)
            ]
            for s in (validation, test)
        )
        best: tuple = (-1.0,)
        for ra, rb in itertools.product(STRENGTHS, STRENGTHS):
            ga, gb = sides[0].gain(ra), sides[1].gain(rb)
            u, s, v = torch.linalg.svd(ga[:, None] * cross * gb, full_matrices=False)
            for k in DIRECTIONS:
                maps = [ga[:, None] * u[:, :k] * s[:k], gb[:, None] * v[:k].T * s[:k]]
                found = _measure(maps, held, (a, b))["mean/R@10"]
                if found > best[0]:
                    best = (found, maps, (ra, rb, k))
        say(f"linear model of {a} and {b}: regularised by {best[2][0]:g} and {best[2][1]:g}, {best[2][2]} directions, "
            f"{len(xa):,} pairs")  # fmt: skip
        out |= _measure(best[1], asked, (a, b))
    tens = [v for k, v in out.items() if k.endswith("/R@10") and k != "mean/R@10"]
    return out | {"mean/R@10": sum(tens) / len(tens)}


def _measure(maps: Sequence[Tensor], things: Sequence[Things], names: Sequence[str]) -> dict[str, float]:
    vectors = {n: F.normalize(x @ m, dim=-1) for n, m, (x, _) in zip(names, maps, things, strict=True)}
    return between(vectors, {n: ids for n, (_, ids) in zip(names, things, strict=True)})


def _matched(a: Things, b: Things) -> tuple[Tensor, Tensor]:
    """All pairs of things of one id, row by row."""
    places: dict[Hashable, list[int]] = {}
    for j, i in enumerate(b[1]):
        places.setdefault(i, []).append(j)
    pairs = [(i, j) for i, owner in enumerate(a[1]) for j in places.get(owner, ())]
    left, right = (torch.tensor(side) for side in zip(*pairs, strict=True))
    return a[0].double()[left], b[0].double()[right]
