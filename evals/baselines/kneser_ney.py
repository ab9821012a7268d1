"""Interpolated Kneser-Ney n-gram model over token ids: the baseline of the language models.

Counts and contexts are sorted arrays of packed integers, so a million tokens take seconds. Discounts are estimated from
the counts of counts, three per order (Chen and Goodman 1999, "modified" Kneser-Ney), as in KenLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class KneserNey:
    """N-gram model of documents.

    Args:
        documents: lists of token ids; the first id of each is the start token, which is never predicted.
        vocabulary: number of ids; ``vocabulary ** order`` must be below 2 ** 63.
        order: n.
        discounts: one number for each order from 1 to n, instead of three estimated ones per order.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        vocabulary: int,
        order: int = 5,
        discounts: Sequence[float] | None = None,
    ) -> None:
        self.order, self.size = order, vocabulary + 1  # one more: padding before the start token
        if self.size**order >= 2**63:
            raise ValueError(f"{order}-grams of {vocabulary} ids do not fit into 63 bits")
        grams, counts = np.unique(self._grams(documents), return_counts=True)
        self.levels = []
        for n in range(order, 0, -1):
            fixed = None if discounts is None else np.full(3, float(discounts[n - 1]))
            self.levels.insert(0, _Level(grams, counts, self.size, fixed))
            # below the highest order an n-gram counts once for each distinct id before it
            grams, counts = np.unique(grams % self.size ** (n - 1), return_counts=True)

    def _grams(self, documents: Sequence[Sequence[int]]) -> np.ndarray:
        """Every n-gram that ends in a predicted id, packed with its last id in the lowest digit."""
        out = []
        for ids in documents:
            padded = np.concatenate([np.full(self.order - 2, self.size - 1), np.asarray(ids, np.int64)])
            packed = np.zeros(max(0, len(padded) - self.order + 1), np.int64)
            for k in range(self.order):
                packed = packed * self.size + padded[k : k + len(packed)]
            out.append(packed)
        return np.concatenate(out)

    def log_probabilities(self, documents: Sequence[Sequence[int]]) -> np.ndarray:
        """Natural log-probability of every id but the first of each document."""
        grams = self._grams(documents)
        # neither padding nor the start token is ever predicted
        p = np.full(len(grams), 1.0 / (self.size - 2))
        for n, level in enumerate(self.levels, 1):
            p = level.interpolate(grams % self.size**n, p)
        return np.log(p)


class _Level:
    """N-grams of one order, with their discounts."""

    def __init__(
        self, grams: np.ndarray, counts: np.ndarray, size: int, discounts: np.ndarray | None
    ) -> None:
        self.grams, self.counts, self.size = grams, counts, size
        d = self.discounts = _estimated(counts) if discounts is None else discounts
        self.contexts, at = np.unique(grams // size, return_inverse=True)
        self.totals = np.bincount(at, counts)
        self.backoff = np.bincount(at, d[np.minimum(counts, 3) - 1])

    def interpolate(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probability of each n-gram's last id, interpolated with `lower`, the one of the order below."""
        context, known = _find(self.contexts, grams // self.size)
        gram, seen = _find(self.grams, grams)
        count = np.where(seen, self.counts[gram], 0)
        discounted = np.where(seen, count - self.discounts[np.clip(count, 1, 3) - 1], 0.0)
        total = self.totals[context]
        return np.where(known, (np.maximum(discounted, 0) + self.backoff[context] * lower) / total, lower)


def _find(table: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices into a sorted table, and whether each value is in it."""
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return at, table[at] == wanted


def _estimated(counts: np.ndarray) -> np.ndarray:
    """Discounts for counts of one, two, and three or more."""
    n = np.bincount(np.minimum(counts, 5), minlength=5).astype(float)[1:5]
    if not n.all():  # too little text to estimate from
        return np.array([0.5, 0.75, 0.9])
    y = n[0] / (n[0] + 2 * n[1])
    # never 0: unseen ids need some probability
    return np.clip([k - (k + 1) * y * n[k] / n[k - 1] for k in (1, 2, 3)], 0.05, [1.0, 2.0, 3.0])
