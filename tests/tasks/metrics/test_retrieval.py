"""Retrieval metrics: ranks, R@k, chance and median rank by hand, ties, the table."""

import io
import math

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.tasks.metrics.retrieval import chance, rank_metrics, ranks, retrieval_metrics


def test_ranks_by_hand():
    candidates = F.normalize(torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]))
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert ranks(queries, candidates, ["a", "a", "c"], ["a", "b", "c"]).tolist() == [0, 2, 2]
    # two true candidates: the better one counts
    assert ranks(queries[:1], candidates, ["a"], ["b", "a", "a"]).tolist() == [1]
    with pytest.raises(ValueError, match="no true candidate"):
        ranks(queries[:1], candidates, ["z"], ["a", "b", "c"])


def test_a_collapsed_model_has_no_hits():
    """Ties and NaN do not count as found: one vector for everything gives the last rank, not the first."""
    same = torch.ones(5, 4) / 2
    assert ranks(same, same, range(5), range(5)).tolist() == [4] * 5
    assert ranks(same * torch.nan, same, range(5), range(5)).tolist() == [4] * 5


def test_rank_metrics_and_chance():
    metrics = rank_metrics(torch.tensor([0, 3, 11, 5]), [0, 1, 2, 3], list(range(20)))
    assert metrics["R@1"] == 0.25 and metrics["R@5"] == 0.5 and metrics["R@10"] == 0.75
    assert metrics["chance@10"] == pytest.approx(0.5)
    assert metrics["median_rank"] == 4
    assert chance(5, 2, 1) == pytest.approx(0.4)
    # two of five true, two drawn: 1 - 3/5 * 2/4
    assert chance(5, 2, 2) == pytest.approx(0.7)
    assert chance(3, 1, 10) == 1.0
    assert chance(100_000, 5, 10) == pytest.approx(1 - math.comb(99_995, 10) / math.comb(100_000, 10))


def test_retrieval_table_lists_the_metrics_of_both_directions():
    from rich.console import Console

    vectors = {k: torch.eye(3)[order] for k, order in (("image", [0, 1, 2]), ("text", [0, 2, 1]))}
    metrics = retrieval_metrics(vectors, {"image": range(3), "text": range(3)})
    assert metrics["text_to_image/R@1"] == metrics["image_to_text/R@1"] == pytest.approx(1 / 3)
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(wt.retrieval_table(metrics, "three rows"))
    text = console.export_text()
    assert "image-to-text" in text and "text-to-image" in text and "median rank" in text
    assert text.count("33.3 (33.3)") == 2 and text.count("of 3") == 2
