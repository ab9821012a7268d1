"""Linear baseline of contrastive models: canonical correlation analysis (CCA) of pooled raw features, per pair of modalities.

Each sample becomes one vector without learning (colours on a coarse grid, counts of character n-grams, mean log-mel of
four time spans, occupied cells of a point cloud). Regularised CCA (Hotelling 1936; Vinod 1976) of two modalities finds the
linear maps under which matching vectors correlate most. The regularisation of each side and the number of directions are
chosen on validation rows.

Shapes: n samples, F features, R principal directions, K canonical directions.
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

from worldtokens.tasks.metrics.retrieval import retrieval_metrics

Features = tuple[Tensor, list[Hashable]]  # (n, F), and the id of each row
REGULARISATIONS = (0.01, 0.1, 1.0, 10.0, 100.0)
DIRECTIONS = (8, 16, 32, 64, 128)


# ---- raw features --------------------------------------------------------------------------------------------


def image_features(pixels: Tensor) -> Tensor:
    """(3, H, W) uint8 -> (256,): mean colours of an 8 x 8 grid, and a histogram of 64 colours."""
    x = pixels.float() / 255
    grid = F.adaptive_avg_pool2d(x, 8).flatten()
    cells = (pixels // 64).long()
    histogram = (cells[0] * 16 + cells[1] * 4 + cells[2]).flatten().bincount(minlength=64)
    return torch.cat([grid, (histogram / histogram.sum()).sqrt()])


def text_features(text: str, size: int = 1024) -> Tensor:
    """Square roots of the counts of words and character 2- and 3-grams, hashed into `size` bins."""
    out = torch.zeros(size)
    for word in text.casefold().split():
        marked = f"<{word}>"
        grams = [marked] + [marked[i : i + n] for n in (2, 3) for i in range(len(marked) - n + 1)]
        for gram in grams:
            out[zlib.crc32(gram.encode()) % size] += 1
    return out.sqrt()


def audio_features(spectrogram: Tensor) -> Tensor:
    """(frames, bands) log-mel -> (6 bands + 1,): mean, standard deviation, means of four time spans, length."""
    parts = [p.mean(0) for p in np.array_split(spectrogram, min(4, len(spectrogram)))]
    parts += parts[-1:] * (4 - len(parts))
    length = torch.tensor([len(spectrogram) / 100])
    return torch.cat([spectrogram.mean(0), spectrogram.std(0, correction=0), *parts, length])


def point_features(points: Tensor, cells: int = 8) -> Tensor:
    """(n, 3) points -> (cells^3 + 3,): shares of points per cell of the bounding cube, and log sides of the bounding box."""
    low, high = points.amin(0), points.amax(0)
    sides = (high - low).clamp(min=1e-6)
    unit = ((points - (low + high) / 2) / sides.max() + 0.5).clamp(0, 1 - 1e-6)
    cell = (unit * cells).long()
    flat = (cell[:, 0] * cells + cell[:, 1]) * cells + cell[:, 2]
    shares = flat.bincount(minlength=cells**3) / len(points)
    return torch.cat([shares.float().sqrt(), (sides / sides.max()).log()])


# ---- canonical correlations -----------------------------------------------------------------------------------


@dataclasses.dataclass
class _Side:
    """Principal directions of one modality's features."""

    mean: Tensor  # (F,)
    directions: Tensor  # (F, R)
    variance: Tensor  # (R,) along each direction

    @classmethod
    def of(cls, x: Tensor) -> _Side:
        mean = x.mean(0)
        variance, directions = torch.linalg.eigh((x - mean).T @ (x - mean) / len(x))
        nonzero = variance > 1e-9 * variance.max()
        return cls(mean, directions[:, nonzero], variance[nonzero])

    def project(self, x: Tensor) -> Tensor:
        """(n, F) -> (n, R)."""
        return (x.double() - self.mean) @ self.directions

    def gain(self, regularisation: float) -> Tensor:
        """(R,): ridge-regularised whitening; `regularisation` is relative to the mean variance."""
        return (self.variance + regularisation * self.variance.mean()).rsqrt()


def linear_pairs(
    train: Mapping[str, Features],
    validation: Mapping[str, Features],
    test: Mapping[str, Features],
    match: Callable[[Hashable], Hashable] = lambda i: i,
    log: Callable[[str], None] = print,
) -> dict[str, float]:
    """Fit a CCA for every pair of modalities and evaluate retrieval on the test rows, with the metrics of `CLIP.evaluate`.

    Args:
        train, validation, test: modality -> features and ids. Training rows with one id are pairs.
        match: maps an id to the one compared in validation and test, e.g. a caption's (object, language) to its object.
        log: called with a line on the chosen hyper-parameters.

    Returns:
        The metrics of `tasks.metrics.retrieval.retrieval_metrics` for every ordered pair, and ``"mean/R@10"``.
    """
    out: dict[str, float] = {}
    for a, b in itertools.combinations(train, 2):
        xa, xb = _paired(train[a], train[b])
        sides = _Side.of(xa), _Side.of(xb)
        cross = sides[0].project(xa).T @ sides[1].project(xb) / len(xa)
        held_out, tested = (
            [
                (side.project(s[k][0]), [match(i) for i in s[k][1]])
                for side, k in zip(sides, (a, b), strict=True)
            ]
            for s in (validation, test)
        )
        best: tuple = (-1.0,)
        for ra, rb in itertools.product(REGULARISATIONS, REGULARISATIONS):
            ga, gb = sides[0].gain(ra), sides[1].gain(rb)
            u, s, v = torch.linalg.svd(ga[:, None] * cross * gb, full_matrices=False)
            for k in DIRECTIONS:
                maps = [ga[:, None] * u[:, :k] * s[:k], gb[:, None] * v[:k].T * s[:k]]
                found = _measure(maps, held_out, (a, b))["mean/R@10"]
                if found > best[0]:
                    best = (found, maps, (ra, rb, k))
        log(f"CCA of {a} and {b}: regularisation {best[2][0]:g} and {best[2][1]:g}, {best[2][2]} directions, "
            f"{len(xa):,} pairs")  # fmt: skip
        out |= _measure(best[1], tested, (a, b))
    tens = [v for k, v in out.items() if k.endswith("/R@10") and k != "mean/R@10"]
    return out | {"mean/R@10": sum(tens) / len(tens)}


def _measure(maps: Sequence[Tensor], features: Sequence[Features], names: Sequence[str]) -> dict[str, float]:
    vectors = {n: F.normalize(x @ m, dim=-1) for n, m, (x, _) in zip(names, maps, features, strict=True)}
    return retrieval_metrics(vectors, {n: ids for n, (_, ids) in zip(names, features, strict=True)})


def _paired(a: Features, b: Features) -> tuple[Tensor, Tensor]:
    """All pairs of rows with the same id."""
    indices: dict[Hashable, list[int]] = {}
    for j, i in enumerate(b[1]):
        indices.setdefault(i, []).append(j)
    pairs = [(i, j) for i, owner in enumerate(a[1]) for j in indices.get(owner, ())]
    left, right = (torch.tensor(side) for side in zip(*pairs, strict=True))
    return a[0].double()[left], b[0].double()[right]
