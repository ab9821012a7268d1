"""Sampling against Hugging Face's logits processors; the decoding loop: stopping, streaming, batch invariance."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import logits_process as hf

import worldtokens as wt
from worldtokens.tasks.language.decoding import Sampling, TokenSampler, decode, decode_stream

V = 50


def logits(rows=4, seed=0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 7, 500])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.6, 0.95])
@pytest.mark.parametrize("min_p", [None, 0.02, 0.5, 1.0])
def test_filtered_logits_equal_transformers(temperature, top_k, top_p, min_p):
    want = hf.TemperatureLogitsWarper(temperature)(None, logits())
    if top_k:
        want = hf.TopKLogitsWarper(top_k)(None, want)
    if top_p:
        want = hf.TopPLogitsWarper(top_p)(None, want)
    if min_p:
        want = hf.MinPLogitsWarper(min_p)(None, want)
    ours = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).filtered(logits())
    torch.testing.assert_close(ours, want)


def test_repetition_penalty_equals_transformers():
    past = torch.tensor([[3, 3, 7], [1, 2, 49], [0, 0, 0], [5, 6, 7]])
    want = hf.RepetitionPenaltyLogitsProcessor(1.3)(past, logits())
    seen = torch.zeros(4, V, dtype=torch.bool).scatter_(1, past, True)
    torch.testing.assert_close(Sampling(repetition_penalty=1.3).penalised(logits(), seen), want)


@pytest.mark.parametrize("seed", [None, 3])
def test_samples_follow_the_distribution(seed):
    torch.manual_seed(0)
    some = logits(1)
    draw = TokenSampler(Sampling(temperature=1.5, top_k=6, seed=seed), 1)
    counts = torch.zeros(V)
    for _ in range(4000):
        counts[draw(some, [0])] += 1
    want = (some[0] / 1.5).masked_fill(some[0] < some[0].topk(6).values[-1], -torch.inf).softmax(0)
    assert float((counts / 4000 - want).abs().max()) < 0.03
    assert not counts[want == 0].any()


def test_settings_out_of_range_raise():
    for wrong in (
        {"temperature": -1},
        {"top_k": 0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
    ):
        with pytest.raises(wt.InputError, match=next(iter(wrong))):
            Sampling(**wrong)
    with pytest.raises(wt.InputError, match="2 numbers for 3 rows"):
        TokenSampler(Sampling(temperature=1, seed=[1, 2]), 3)


# ---- the loop, with a "model" that generates a fixed text ------------------------------------------------


@pytest.fixture(scope="module")
def front():
    """A tokenizer of the 256 bytes and one merge, so that most characters take several ids."""
    return wt.TextTokenizer.train(["aa"], vocab_size=257, dim=4, context=None, positions="none")


class FixedTexts:
    """A step function that generates each row's text, then the end token; it asserts which rows are in the batch."""

    def __init__(self, front, texts):
        self.front, self.texts = front, [front.encode_batch([t])[0] for t in texts]
        self.rows, self.position, self.batch_sizes = list(range(len(texts))), [0] * len(texts), []

    def logits(self):
        out = torch.full((len(self.rows), self.front.vocab_size), -10.0)
        for k, row in enumerate(self.rows):
            next_id = self.texts[row][self.position[row]] if self.position[row] < len(self.texts[row]) else 1
            out[k, next_id] = 10.0
            self.position[row] += 1
        return out

    def step(self, ids):
        assert len(ids) == len(self.rows)
        for k, row in enumerate(self.rows):
            if self.position[row] <= len(self.texts[row]):
                assert int(ids[k]) == self.texts[row][self.position[row] - 1]
        self.batch_sizes.append(len(ids))
        return self.logits()

    def select(self, index):
        self.rows = [self.rows[k] for k in index.tolist()]


TEXTS = ["héllo 👩‍👩‍👧 wörld", "日本語の文", "a", ""]


@pytest.mark.parametrize("drop", [True, False])
def test_rows_stop_one_by_one(front, drop):
    model = FixedTexts(front, TEXTS)
    got = decode(
        model.step,
        model.logits(),
        200,
        front=front,
        end_ids={front.end_id},
        select=model.select if drop else None,
    )
    assert [c.text for c in got] == TEXTS
    assert [c.finish for c in got] == ["end"] * 4
    assert [front.decode(c.ids) for c in got] == TEXTS
    assert all(front.end_id not in c.ids for c in got)
    if drop:  # finished rows leave the batch
        lengths = [len(t) for t in model.texts]  # including the end token, after which there is no step
        assert model.batch_sizes == [sum(n > i for n in lengths) for i in range(1, max(lengths))]


def test_streaming_never_yields_an_incomplete_character(front):
    model, shown = FixedTexts(front, TEXTS), [""] * 4
    got = decode(
        model.step,
        model.logits(),
        200,
        front=front,
        end_ids={front.end_id},
        stream=lambda row, text: shown.__setitem__(row, shown[row] + complete(text)),
    )
    assert shown == TEXTS == [c.text for c in got]


def complete(text):
    assert text and "\ufffd" not in text
    return text


def test_a_character_incomplete_at_the_limit_is_dropped(front):
    whole = "日本"
    for n in range(1, 7):
        model = FixedTexts(front, [whole])
        (got,) = decode(model.step, model.logits(), n, front=front)
        assert got.finish == "length" and len(got.ids) == n
        assert got.text == whole[: n // 3]


def test_each_row_may_have_its_own_limit(front):
    model = FixedTexts(front, ["abcdef", "abcdef", "abcdef"])
    got = decode(model.step, model.logits(), [2, 0, 4], front=front, select=model.select)
    assert [c.text for c in got] == ["ab", "", "abcd"]
    assert [c.finish for c in got] == ["length"] * 3


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),  # only a prefix of the stop string
        ("one EN", ["END"], "one EN"),
        ("aab", ["ab"], "a"),
        ("xEEND", ["END"], "xE"),
        ("x\n\ny", ["never", "\n\n"], "x"),
        ("see ü.", ["ü"], "see "),
        ("ab", ["b", "ab"], ""),
    ],
)
def test_stop_strings(front, text, stop, want):
    model, shown = FixedTexts(front, [text]), []
    (got,) = decode(
        model.step,
        model.logits(),
        99,
        front=front,
        end_ids={front.end_id},
        stop=stop,
        stream=lambda row, new: shown.append(new),
    )
    assert got.text == want == "".join(shown)
    assert got.finish == ("end" if want == text else "stop")


def test_stop_strings_without_a_tokenizer_or_empty_raise(front):
    model = FixedTexts(front, ["a"])
    for stop, kw, match in (
        (["x"], {}, "tokenizer"),
        ([""], {"front": front}, "empty"),
        ("END", {"front": front}, "list"),
    ):
        with pytest.raises(wt.InputError, match=match):
            decode(model.step, model.logits(), 5, stop=stop, **kw)


def test_a_row_generates_the_same_alone_and_in_a_batch():
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(1))
    start = torch.tensor([4, 8, 15])

    def run(rows, seeds):
        return decode(
            lambda ids: table[ids], table[start[rows]], 20, Sampling(temperature=1.0, top_p=0.9, seed=seeds)
        )

    together = run([0, 1, 2], [7, 8, 9])
    assert together == [run([i], [7 + i])[0] for i in range(3)]
    assert run([0, 0, 0], 5)[0].ids != run([0, 0, 0], 5)[1].ids  # one seed still gives different rows
    assert run([0, 1, 2], 5) == run([0, 1, 2], 5)
    assert run([0], 5)[0] == run([0, 1], 5)[0]


def test_repetition_penalty_counts_prompt_and_continuation():
    flat = torch.zeros(1, V)
    flat[0, 3], flat[0, 4], flat[0, 5] = 1.0, 0.9, 0.8
    got = decode(lambda ids: flat, flat, 3, Sampling(repetition_penalty=2.0), prompts=[[3]])
    # 3 is penalised from the start, then 4, then 5; then 3 is the highest of the penalised
    assert got[0].ids == [4, 5, 3]


def test_an_iterator_closed_early_leaves_inference_mode_off(front):
    model = FixedTexts(front, ["abc"])
    texts = decode_stream(model.step, model.logits(), 99, front=front)
    assert next(texts) == (0, "a")
    assert not torch.is_inference_mode_enabled()
    texts.close()
