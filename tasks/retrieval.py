"""Retrieval figures by explicit ids: R@k, median rank, and what chance would give.

A query is a hit at k when any of its true candidates is among the first k. A wrong candidate that ties with the
best true one stands before it, so that a model that gives everything one score finds nothing; so does one that
gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def ranks(
    queries: Tensor, candidates: Tensor, query_ids: Sequence[Hashable], candidate_ids: Sequence[Hashable]
) -> Tensor:
    """For every query, how many wrong candidates stand before its best true one.

    Args:
        queries: (Q, D) embeddings, unit length.
        candidates: (C, D) embeddings, unit length.
        query_ids: Q ids; a candidate is true for a query when their ids are equal.
        candidate_ids: C ids.

    Returns:
        (Q,) int64 on the CPU, 0 = found first.

    Raises:
        ValueError: a query has no true candidate.
    """
    number = {}
    for i in candidate_ids:
        number.setdefault(i, len(number))
    lost = [q for q in query_ids if q not in number]
    if lost:
        raise ValueError(f"{len(lost)} queries have no true candidate, the first is {lost[0]!r}")
    device = queries.device
    q = torch.tensor([number[i] for i in query_ids], device=device)
    c = torch.tensor([number[i] for i in candidate_ids], device=device)
    found = []
    for part, ids in zip(queries.split(1024), q.split(1024), strict=True):
        score = part.float() @ candidates.float().T  # (q, C)
        score = score.nan_to_num(nan=-torch.inf)
        true = ids[:, None] == c
        best = score.masked_fill(~true, -torch.inf).amax(1, keepdim=True)
        found.append(((score >= best) & ~true).sum(1).cpu())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long)


def summary(
    rank: Tensor,
    query_ids: Sequence[Hashable],
    candidate_ids: Sequence[Hashable],
    at: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """Figures of a ranking, each beside what a random order would give.

    Returns:
        ``R@k`` (share of queries, 0 to 1), ``chance@k``, ``median_rank`` (1 = first), ``queries``, ``candidates``.
    """
    n = len(candidate_ids)
    counts: dict[Hashable, int] = {}
    for i in candidate_ids:
        counts[i] = counts.get(i, 0) + 1
    out = {f"R@{k}": float((rank < k).double().mean()) for k in at}
    for k in at:
        out[f"chance@{k}"] = sum(chance(n, counts[i], k) for i in query_ids) / max(1, len(query_ids))
    out["median_rank"] = float(rank.double().median()) + 1 if len(rank) else math.nan
    return out | {"queries": float(len(query_ids)), "candidates": float(n)}


def chance(candidates: int, true: int, k: int) -> float:
    """Chance that a random order of the candidates has one of the true ones in the first k."""
    k = min(k, candidates)
    if candidates - true < k:
        return 1.0
    miss = math.comb(candidates - true, k) / math.comb(candidates, k)
    return 1.0 - miss
