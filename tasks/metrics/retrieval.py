"""Retrieval metrics by explicit ids: R@k, median rank, and their values for a random ranking.

A query is a hit at k when any of its true candidates is among the first k. A wrong candidate that ties with the best
true one ranks before it, so a model that gives every candidate the same score, or NaN, has no hits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.table import Table


def ranks(
    queries: Tensor, candidates: Tensor, query_ids: Sequence[Hashable], candidate_ids: Sequence[Hashable]
) -> Tensor:
    """For every query, the number of wrong candidates ranked before its best true one.

    Args:
        queries: (Q, D) embeddings, unit length.
        candidates: (C, D) embeddings, unit length.
        query_ids: Q ids; a candidate is true for a query when their ids are equal.
        candidate_ids: C ids.

    Returns:
        (Q,) int64 on the CPU, 0 = ranked first.

    Raises:
        ValueError: a query has no true candidate.
    """
    number: dict[Any, int] = {}
    for i in candidate_ids:
        number.setdefault(i, len(number))
    unmatched = [q for q in query_ids if q not in number]
    if unmatched:
        raise ValueError(f"{len(unmatched)} queries have no true candidate, the first is {unmatched[0]!r}")
    device = queries.device
    q = torch.tensor([number[i] for i in query_ids], device=device)
    c = torch.tensor([number[i] for i in candidate_ids], device=device)
    out = []
    for part, ids in zip(queries.split(1024), q.split(1024), strict=True):
        score = part.float() @ candidates.float().T  # (q, C)
        score = score.nan_to_num(nan=-torch.inf)
        true = ids[:, None] == c
        best = score.masked_fill(~true, -torch.inf).amax(1, keepdim=True)
        out.append(((score >= best) & ~true).sum(1).cpu())
    return torch.cat(out) if out else torch.zeros(0, dtype=torch.long)


def rank_metrics(
    rank: Tensor,
    query_ids: Sequence[Hashable],
    candidate_ids: Sequence[Hashable],
    at: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """Metrics of a ranking, each with its expected value for a random order.

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
    """Probability that a random order of the candidates has one of the true ones in the first k."""
    k = min(k, candidates)
    if candidates - true < k:
        return 1.0
    miss = math.comb(candidates - true, k) / math.comb(candidates, k)
    return 1.0 - miss


def retrieval_metrics(
    vectors: Mapping[str, Tensor], ids: Mapping[str, Sequence[Hashable]]
) -> dict[str, float]:
    """Retrieval metrics between every two columns, in both directions, over the ids that both have.

    Args:
        vectors: column -> (n, D) embeddings of unit length.
        ids: column -> the n ids of its vectors; an id may occur several times (captions of one image): each is a
            query, and as candidates any of them is a hit.

    Returns:
        ``"text_to_image/R@1"`` and the other metrics of `rank_metrics` for every ordered pair that shares an id, and
        ``"mean/R@10"`` over those; empty where no two columns share one.
    """
    out: dict[str, float] = {}
    for a, b in itertools.permutations(vectors, 2):
        common = set(ids[a]) & set(ids[b])
        if not common:
            continue
        (qa, qi), (cb, ci) = (_select(vectors[k], ids[k], common) for k in (a, b))
        out |= {f"{a}_to_{b}/{k}": v for k, v in rank_metrics(ranks(qa, cb, qi, ci), qi, ci).items()}
    tens = [v for k, v in out.items() if k.endswith("/R@10")]
    return out | ({"mean/R@10": sum(tens) / len(tens)} if tens else {})


def _select(vectors: Tensor, ids: Sequence[Hashable], keep: set[Hashable]) -> tuple[Tensor, list[Hashable]]:
    indices = [i for i, owner in enumerate(ids) if owner in keep]
    return vectors[indices], [ids[i] for i in indices]


def retrieval_table(metrics: Mapping[str, float], title: str | None = None) -> Table:
    """A table of the metrics of `retrieval_metrics` or `CLIP.evaluate`, one row per pair of columns and direction.

    Args:
        metrics: with ``"a_to_b/R@k"``, ``"a_to_b/chance@k"``, ``"a_to_b/median_rank"`` and ``.../candidates``.
        title: title of the table.

    Returns:
        A rich Table: ``rich.print(wt.retrieval_table(model.evaluate(rows)))``.
    """
    from rich.table import Table

    directions = list(dict.fromkeys(k.partition("/")[0] for k in metrics if k.endswith("/median_rank")))
    at = sorted(
        {int(k.rpartition("@")[2]) for k in metrics if "/R@" in k and k.partition("/")[0] in directions}
    )
    table = Table(title=title, caption="in percent; in brackets: expected for a random order")
    table.add_column("retrieval", no_wrap=True)
    for k in at:
        table.add_column(f"R@{k}", justify="right", no_wrap=True)
    table.add_column("median rank", justify="right", no_wrap=True)
    for direction in directions:
        candidates = int(metrics[f"{direction}/candidates"])
        cells = [
            f"{100 * metrics[f'{direction}/R@{k}']:.1f} ({100 * metrics[f'{direction}/chance@{k}']:.1f})"
            for k in at
        ]
        rank = f"{metrics[f'{direction}/median_rank']:,.0f} of {candidates:,}"
        table.add_row(direction.replace("_to_", "-to-"), *cells, rank)
    return table
