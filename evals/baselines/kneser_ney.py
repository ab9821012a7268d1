"""Interpolated Kneser-Ney n-grams over whole numbers, by sorting: the baseline of the language models.

Counts and contexts are sorted arrays of packed numbers, so that a million tokens take seconds. Discounts are estimated from
the counts of counts, three for each order (Chen and Goodman 1999, "modified" Kneser-Ney), as KenLM does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class KneserNey:
    """An n-gram model of documents.

    Args:
        documents: lists of ids, the first of which is the start token, which is never predicted.
        vocabulary: how many ids there are; ``vocabulary ** order`` must stay below 2 ** 63.
        order: n.
        discounts: one number for each order from 1 to n instead of the three estimated ones.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        vocabulary: int,
        order: int = 5,
        discounts: Sequence[float] | None = None,
    ) -> None:
        self.order, self.size = order, vocabulary + 1  # one more: what stands before the start
        if self.size**order >= 2**63:
            raise ValueError(f"{vocabulary} ids do not fit {order}-grams into 63 bits")
        grams, counts = np.unique(self._grams(documents), return_counts=True)
        self.levels = []
        for n in range(order, 0, -1):
            given = None if discounts is None else np.full(3, float(discounts[n - 1]))
            self.levels.insert(0, _Level(grams, counts, self.size, given))
            # below the top an n-gram counts as often as there are different ids before it
            grams, counts = np.unique(grams % self.size ** (n - 1), return_counts=True)

    def _grams(self, documents: Sequence[Sequence[int]]) -> np.ndarray:
        """Every n-gram that ends in a predicted id, packed with its last id lowest."""
        out = []
        for ids in documents:
            padded = np.concatenate([np.full(self.order - 2, self.size - 1), np.asarray(ids, np.int64)])
            packed = np.zeros(max(0, len(padded) - self.order + 1), np.int64)
            for k in range(self.order):
                packed = packed * self.size + padded[k : k + len(packed)]
            out.append(packed)
        return np.concatenate(out)

    def log_probabilities(self, documents: Sequence[Sequence[int]]) -> np.ndarray:
        """The natural logarithm of the probability of every id but the first of each document."""
        grams = self._grams(documents)
        p = np.full(
            len(grams), 1.0 / (self.size - 2)
        )  # neither the filler nor the start token is ever predicted
        for n, level in enumerate(self.levels, 1):
            p = level.over(grams % self.size**n, p)
        return np.log(p)


class _Level:
    """The n-grams of one length, with their discounts."""

    def __init__(
        self, grams: np.ndarray, counts: np.ndarray, size: int, discounts: np.ndarray | None
    ) -> None:
        self.grams, self.counts, self.size = grams, counts, size
        d = self.discounts = _estimated(counts) if discounts is None else discounts
        self.contexts, at = np.unique(grams // size, return_inverse=True)
        self.totals = np.bincount(at, counts)
        self.freed = np.bincount(at, d[np.minimum(counts, 3) - 1])

    def over(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probabilities of these n-grams' last ids, given those of the order below."""
        context, known = _find(self.contexts, grams // self.size)
        gram, seen = _find(self.grams, grams)
        count = np.where(seen, self.counts[gram], 0)
        kept = np.where(seen, count - self.discounts[np.clip(count, 1, 3) - 1], 0.0)
        total = self.totals[context]
        return np.where(known, (np.maximum(kept, 0) + self.freed[context] * lower) / total, lower)


def _find(table: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in a sorted table, and whether each is there."""
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return at, table[at] == wanted


def _estimated(counts: np.ndarray) -> np.ndarray:
    """Discounts for counts of one, two, and three or more."""
    n = np.bincount(np.minimum(counts, 5), minlength=5).astype(float)[1:5]
    if not n.all():  # too little text to tell
        return np.array([0.5, 0.75, 0.9])
    y = n[0] / (n[0] + 2 * n[1])
    return np.clip(
        [k - (k + 1) * y * n[k] / n[k - 1] for k in (1, 2, 3)], 0.05, [1.0, 2.0, 3.0]
    )  # never 0: what is new gets some
