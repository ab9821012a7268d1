"""The n-gram baseline: parity with nltk, normalised probabilities; and the dim of the LSTM baseline."""

import numpy as np
import pytest

import worldtokens as wt
from worldtokens.evals.baselines.kneser_ney import KneserNey
from worldtokens.evals.language.base import lstm_overrides

RNG = np.random.default_rng(0)


def documents(n, length):
    """Zipf-distributed ids 1 to 9 after a start token 0."""
    return [[0, *(int(x) for x in RNG.zipf(1.3, length) % 9 + 1)] for _ in range(n)]


TRAIN, TEST = documents(20, 60), documents(3, 40)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_equals_nltk_with_a_fixed_discount(order):
    nltk = pytest.importorskip("nltk.lm")
    from nltk.util import ngrams

    def grams(docs):
        return [g for d in docs for g in ngrams(["x"] * (order - 2) + [str(i) for i in d], order)]

    peer = nltk.KneserNeyInterpolated(order, discount=0.1)
    text = [g[-k:] for g in grams(TRAIN) for k in range(1, order + 1)]
    peer.fit([text], vocabulary_text=["x", *map(str, range(10))])
    expected = [peer.score(g[-1], g[:-1]) for g in grams(TEST)]
    ours = KneserNey(
        TRAIN, 10, order, discounts=[0.0] + [0.1] * (order - 1)
    )  # nltk's lowest order is undiscounted
    assert np.abs(np.exp(ours.log_probabilities(TEST)) - expected).max() < 1e-12


def test_probabilities_sum_to_one_after_any_context_and_unseen_ids_are_above_zero():
    model = KneserNey(TRAIN, 12, 4)  # ids 10 and 11 do not occur in training
    for context in ([0], [0, 1], [0, 3, 1, 2], [0, 10, 11, 1]):
        p = [np.exp(model.log_probabilities([[*context, i]])[-1]) for i in range(1, 12)]
        assert sum(p) == pytest.approx(1, abs=1e-12) and min(p) > 0


def test_estimated_discounts_have_a_higher_likelihood_than_a_fixed_one():
    fixed = KneserNey(TRAIN, 10, 4, discounts=[0.0, 0.1, 0.1, 0.1]).log_probabilities(TEST).mean()
    assert KneserNey(TRAIN, 10, 4).log_probabilities(TEST).mean() > fixed


def test_the_lstm_baseline_has_as_many_parameters_as_the_model():
    target = 3_704_320
    overrides = lstm_overrides(2000, target)
    dim = int(overrides[-3])
    count = 2000 * dim + sum(p.numel() for p in wt.Recurrent("lstm", dim, 1).parameters())
    assert abs(count - target) / target < 0.03
