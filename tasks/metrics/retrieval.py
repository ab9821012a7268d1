"""Retrieval figures by explicit ids: R@k, median rank, and what chance would give.

A query is a hit at k when any of its true candidates is among the first k. A wrong candidate that ties with the
best true one stands before it, so that a model that gives everything one score finds nothing; so does one that
gives NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.table import Table


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


def between(vectors: Mapping[str, Tensor], ids: Mapping[str, Sequence[Hashable]]) -> dict[str, float]:
    """Retrieval between every two kinds of things, both ways, over the ids that both have.

    Args:
        vectors: kind -> (n, D) embeddings of unit length.
        ids: kind -> the n ids of its vectors; one id may come several times (captions of one image): each is a
            query, and as candidates any of them is a hit.

    Returns:
        ``"text_to_image/R@1"`` and the other figures of `summary` for every ordered pair that shares an id, and
        ``"mean/R@10"`` over those; empty where no two kinds do.
    """
    out: dict[str, float] = {}
    for a, b in itertools.permutations(vectors, 2):
        common = set(ids[a]) & set(ids[b])
        if not common:
            continue
        (qa, qi), (cb, ci) = (_only(vectors[k], ids[k], common) for k in (a, b))
        out |= {f"{a}_to_{b}/{k}": v for k, v in summary(ranks(qa, cb, qi, ci), qi, ci).items()}
    tens = [v for k, v in out.items() if k.endswith("/R@10")]
    return out | ({"mean/R@10": sum(tens) / len(tens)} if tens else {})


def _only(vectors: Tensor, ids: Sequence[Hashable], keep: set[Hashable]) -> tuple[Tensor, list[Hashable]]:
    places = [i for i, owner in enumerate(ids) if owner in keep]
    return vectors[places], [ids[i] for i in places]


def retrieval_table(figures: Mapping[str, float], title: str | None = None) -> Table:
    """The figures of `between` or `CLIP.evaluate` as a table for a person, a line for each pair and way.

    Args:
        figures: with ``"a_to_b/R@k"``, ``"a_to_b/chance@k"``, ``"a_to_b/median_rank"`` and ``.../candidates``.
        title: above the table.

    Returns:
        A rich Table: ``rich.print(wt.retrieval_table(model.evaluate(rows)))``.
    """
    from rich.table import Table

    ways = list(dict.fromkeys(k.partition("/")[0] for k in figures if k.endswith("/median_rank")))
    at = sorted({int(k.rpartition("@")[2]) for k in figures if "/R@" in k and k.partition("/")[0] in ways})
    table = Table(title=title, caption="in percent; in brackets what a random order gives")
    table.add_column("found", no_wrap=True)
    for k in at:
        table.add_column(f"R@{k}", justify="right", no_wrap=True)
    table.add_column("median place", justify="right", no_wrap=True)
    for way in ways:
        of = int(figures[f"{way}/candidates"])
        cells = [
            f"{100 * figures[f'{way}/R@{k}']:.1f} ({100 * figures[f'{way}/chance@{k}']:.1f})" for k in at
        ]
        a, _, b = way.partition("_to_")
        table.add_row(f"{b} by {a}", *cells, f"{figures[f'{way}/median_rank']:,.0f} of {of:,}")
    return table
