"""Scores of generated texts against references."""

import pytest

from worldtokens.errors import InputError
from worldtokens.tasks.metrics.text import text_scores


def test_text_scores_by_hand():
    texts = ["the cat sat", "A  Dog", "x y"]
    references = [["the cat sat down"], ["no", "a dog"], ["x z", "q"]]
    metrics = text_scores(texts, references)
    assert metrics["exact"] == pytest.approx(1 / 3)
    # one of 4 words missing; "A Dog" against "a dog": 2 of 2 (case-sensitive), nearest "no" costs 2 of 1; 1 of 2
    assert metrics["wer"] == pytest.approx((1 + 2 + 1) / (4 + 2 + 2))
    assert text_scores(["a b c d e"], [["q", "a b c d e"]])["bleu"] == pytest.approx(100)
    with pytest.raises(InputError, match="2 answers and 1"):
        text_scores(["a", "b"], [["a"]])
