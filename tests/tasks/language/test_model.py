"""LanguageModel: causality, packing, weights of batches, bits per byte, generation, saving."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.tasks.language.decoding import Sampling
from worldtokens.tasks.language.documents import pack_windows, split_windows
from worldtokens.tasks.language.loss import IGNORE
from worldtokens.training.optim import OptimSettings
from worldtokens.training.settings import TrainSettings

TEXTS = [
    "In the beginning was the word",
    "a",
    "the cat sat on the mat, and the dog ate the rat; the rat had eaten the malt that lay in the house",
    "",
    "Ein Übel 日本 kommt",
    "and the word was with the cat",
]


@pytest.fixture(scope="module")
def vocabulary():
    return wt.TextTokenizer.train(TEXTS * 2, vocab_size=300, dim=1, start="<|s|>").backend


def make(vocabulary, trunk="transformer", context=24, positions="learned", start="<|s|>", **options):
    torch.manual_seed(0)
    end = "<|endoftext|>"
    front = wt.TextTokenizer(vocabulary, 32, context, positions=positions, start=start, end=end, pad=end)
    if trunk == "transformer":
        trunk = wt.Transformer(32, 2, 4, rope=0 if positions == "learned" else 1)
    else:
        trunk = wt.Recurrent(trunk, 32, 2)
    model = wt.LanguageModel(front, trunk, **options)
    with torch.no_grad():  # far from the near-uniform start, so that a leak or a shift shows
        for name, p in model.named_parameters():
            if p.ndim > 1 and "rnn" not in name:
                p.mul_(3)
    return model.eval()


TRUNKS = pytest.mark.parametrize(
    ("trunk", "positions"),
    [("transformer", "learned"), ("transformer", "none"), ("lstm", "none")],
)


def batch_of(model, texts):
    return model.collate([model.read({"text": t}) for t in texts])


def by_hand(model, text):
    """Summed nats and count of one text, window by window, with torch's own cross-entropy."""
    ids = model.read({"text": text})["text"]
    total, count = 0.0, 0
    for at in range(0, len(ids) - 1, model.context):
        inside = ids[at : at + model.context][: len(ids) - 1 - at]
        logits = model({"text": model.front.collate([inside])})[0]
        target = ids[at + 1 : at + 1 + len(inside)]
        total, count = total + F.cross_entropy(logits, target, reduction="sum"), count + len(target)
    return total, count


# ---- windows and packing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 10, 17, 30])
@pytest.mark.parametrize(
    ("context", "overlap", "first"),
    [(8, 0, None), (8, 3, None), (8, 7, None), (8, 0, 1), (8, 0, 5), (1, 0, None), (None, 0, None)],
)
def test_every_token_but_the_first_is_predicted_once_from_those_before_it(n, context, overlap, first):
    ids = torch.arange(100, 100 + n)
    windows = split_windows(ids, context, overlap, first if context and n > context + 1 else None)
    predicted = []
    for ids_, labels in windows:
        assert 1 <= len(ids_) == len(labels) <= (context or n)
        assert torch.equal(ids_[1:], ids_[:-1] + 1)
        labelled = labels != IGNORE
        assert torch.equal(labels[labelled], ids_[labelled] + 1)
        predicted += labels[labelled].tolist()
    assert predicted == list(range(101, 100 + n))
    for window in windows[1:]:  # the overlap of a later window has no labels
        if overlap:
            assert int((window.labels == IGNORE).sum()) >= overlap


def test_packing_fills_rows_and_loses_no_window():
    windows = [p for n in (3, 9, 5, 2, 8, 4) for p in split_windows(torch.arange(n), 8)]
    batch = pack_windows(windows, 8, pad=77)
    assert batch["ids"].shape == (4, 8)  # 8, 7, 4 + 3 + 1, 2: 25 tokens
    seen = []
    for row, lengths in enumerate(batch["lengths"]):
        at = 0
        for k, n in enumerate(lengths):
            assert batch["segment"][row, at : at + n].tolist() == [k] * n
            assert batch["positions"][row, at : at + n].tolist() == list(range(n))
            seen.append(batch["labels"][row, at : at + n].tolist())
            at += n
        assert (batch["ids"][row, at:] == 77).all() and (batch["labels"][row, at:] == IGNORE).all()
    assert sorted(seen) == sorted(p.labels.tolist() for p in windows)


# ---- loss ------------------------------------------------------------------------------------------------


@TRUNKS
def test_a_packed_batch_gives_the_loss_of_its_single_texts(vocabulary, trunk, positions):
    model = make(vocabulary, trunk, positions=positions)
    batch = batch_of(model, TEXTS)
    assert max(len(row) for row in batch["text"]["lengths"]) > 1  # something is packed
    alone = [by_hand(model, t) for t in TEXTS]
    assert batch["weight"] == sum(n for _, n in alone)
    loss = model.loss(batch)["loss"]
    want = sum(t for t, _ in alone) / batch["weight"]
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    own = list(model.parameters())
    for a, b in zip(torch.autograd.grad(loss, own), torch.autograd.grad(want, own), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@TRUNKS
def test_the_future_and_other_documents_change_nothing(vocabulary, trunk, positions):
    model = make(vocabulary, trunk, positions=positions)
    batch = batch_of(model, TEXTS)
    lengths = batch["text"]["lengths"]
    row = next(r for r, each in enumerate(lengths) if len(each) > 1)
    first, second = lengths[row][:2]
    ids = batch["text"]["ids"]
    before = model(batch)[row]
    at = first + second // 2
    ids[row, at] = 5
    after = model(batch)[row]
    rest = sum(lengths[row])
    other = list(range(at)) + list(range(first + second, rest))
    assert (before[other] - after[other]).abs().max() < 1e-5
    assert (before[at : first + second] - after[at : first + second]).abs().amax(-1).min() > 1e-3


def test_padding_may_hold_anything(vocabulary):
    model = make(vocabulary)
    batch = batch_of(model, TEXTS[:3])
    before = model.loss(batch)["loss"]
    batch["text"]["ids"][batch["text"]["labels"] == IGNORE] = 9
    torch.testing.assert_close(model.loss(batch)["loss"], before)


def test_micro_batches_are_weighted_by_their_predicted_tokens(vocabulary):
    """Gradient accumulation over micro-batches of unequal length gives the whole batch's gradient."""
    model = make(vocabulary)
    whole = batch_of(model, TEXTS)
    parts = [batch_of(model, TEXTS[:2]), batch_of(model, TEXTS[2:])]
    assert parts[0]["weight"] != parts[1]["weight"] and sum(p["weight"] for p in parts) == whole["weight"]
    own = list(model.parameters())
    want = torch.autograd.grad(model.loss(whole)["loss"], own)
    summed = sum(model.loss(p)["loss"] * (p["weight"] / whole["weight"]) for p in parts)
    for a, b in zip(torch.autograd.grad(summed, own), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_nothing_to_predict_is_zero_with_a_graph(vocabulary):
    model = make(vocabulary, start=None)
    batch = batch_of(model, ["", ""])  # an end token alone
    assert batch["weight"] == 0
    loss = model.loss(batch)["loss"]
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_and_saving(vocabulary, tied, bias, tmp_path):
    model = make(vocabulary, tied=tied, bias=bias)
    front = model.front
    assert (model.head_weight is front.embedding.weight) == tied
    assert (model.head_bias is not None) == bias
    if bias:
        torch.nn.init.normal_(model.head_bias)
    batch = batch_of(model, TEXTS)
    want = F.linear(model.hidden(batch).x, model.head_weight, model.head_bias)
    torch.testing.assert_close(model(batch), want)
    model.loss(batch)["loss"].backward()
    assert all(
        p.grad is not None and p.grad.any() for p in (model.head_weight, model.head_bias) if p is not None
    )
    loaded = wt.load(model.save(tmp_path / "m"))
    assert isinstance(loaded, wt.LanguageModel) and torch.equal(loaded(batch), model(batch))
    assert (loaded.head_weight is loaded.front.embedding.weight) == tied
    assert loaded.generate(["the"], 8, temperature=0) == model.generate(["the"], 8, temperature=0)


def test_long_texts_are_read_whole_and_split_elsewhere_in_training(vocabulary):
    model = make(vocabulary, context=8)
    text = TEXTS[2]
    whole = model.read({"text": text})["text"]
    assert model.front.decode(whole) == text and len(whole) > 20
    ends = {model.read({"text": text}, random.Random(i))["first"] for i in range(100)}
    assert ends == set(range(1, 9))
    assert "first" not in model.read({"text": "a"}, random.Random(0))
    weights = {model.collate([model.read({"text": text}, random.Random(i))])["weight"] for i in range(20)}
    assert weights == {len(whole) - 1}


def test_invalid_settings_and_rows_raise(vocabulary):
    front = wt.TextTokenizer(vocabulary, 32, 24, end="<|endoftext|>")
    trunk = wt.Transformer(32, 1, 2)
    for wrong, match in (
        ((wt.TextTokenizer(vocabulary, 16, 24), trunk), "dim 16"),
        ((wt.TextTokenizer(vocabulary, 32, 24, causal=False), trunk), "is causal"),
        (({"a": front, "b": front}, trunk), "one column"),
    ):
        with pytest.raises(ValueError, match=match):
            wt.LanguageModel(*wrong)
    with pytest.raises(ValueError, match="context=99"):
        wt.LanguageModel(front, trunk, context=99)
    model = wt.LanguageModel({"story": front}, trunk)
    with pytest.raises(wt.InputError, match="'story'"):
        model.read({"text": "a"})
    with pytest.raises(wt.InputError, match="prompt 1 has no token"):
        model.generate(["a", ""])
    with pytest.raises(wt.InputError, match="more than the context of 24"):
        model.generate(["the cat " * 30])
    with pytest.raises(wt.InputError, match="no token to predict"):
        model.evaluate([{"story": ""}])


# ---- evaluation ------------------------------------------------------------------------------------------


def test_bits_per_byte_by_hand(vocabulary):
    model = make(vocabulary).train()
    rows = [{"text": t} for t in TEXTS]
    got = model.evaluate(rows, batch_size=2, overlap=0)
    assert model.training
    model.eval()
    alone = [by_hand(model, t) for t in TEXTS]
    total, count = float(sum(t.detach() for t, _ in alone)), sum(n for _, n in alone)
    assert got["tokens"] == count and got["bytes"] == sum(len(t.encode()) for t in TEXTS)
    assert got["loss"] == pytest.approx(total / count, rel=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert got["bits_per_byte"] == pytest.approx(total / math.log(2) / got["bytes"], rel=1e-5)
    # one window at a time, each token from up to a whole context before it
    wide = model.evaluate(rows, overlap=23)
    ids = model.read(rows[2])["text"]
    exact = 0.0
    for k in range(1, len(ids)):
        before = ids[max(0, k - 24) : k]
        exact -= float(model({"text": model.front.collate([before])}).detach()[0, -1].log_softmax(-1)[ids[k]])
    alone = model.evaluate(rows[2:3], overlap=23)
    assert alone["loss"] == pytest.approx(exact / (len(ids) - 1), rel=1e-4)
    assert wide["tokens"] == count


def test_without_a_start_token_the_first_token_is_not_counted(vocabulary):
    model = make(vocabulary, start=None)
    got = model.evaluate([{"text": "the cat"}])
    first = int(model.read({"text": "the cat"})["text"][0])
    assert got["bytes"] == len("the cat") - len(model.front.token_bytes(first))


def test_it_overfits_a_text_through_the_training_loop(vocabulary, tmp_path):
    model = make(vocabulary, context=24)
    rows = [{"text": t} for t in TEXTS[:3]] * 2
    settings = TrainSettings(out=str(tmp_path), steps=80, batch_size=6, eval_every=80, tensorboard=False)
    report = wt.train(model, rows, rows[:3], train=settings, optim=OptimSettings(lr=1e-2))
    assert report.best["bits_per_byte"] < 0.5
    assert model.generate(["In the"], temperature=0) == [" beginning was the word"]
    assert wt.load(tmp_path / "best").generate("In the", temperature=0) == [" beginning was the word"]


# ---- generation ------------------------------------------------------------------------------------------


PROMPTS = ["the cat", "In the beginning was the", "", "日本"]


@TRUNKS
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(1.3, 0.8, 20, 0.9, 0.01, [1, 2, 3, 4])],
    ids=["greedy", "drawn"],
)
def test_prompts_of_different_lengths_give_the_same_together_and_alone(
    vocabulary, trunk, positions, sampling
):
    model = make(vocabulary, trunk, positions=positions)
    together = model.continuations(PROMPTS, 12, sampling)
    for k, prompt in enumerate(PROMPTS):
        seed = None if sampling.seed is None else [sampling.seed[k]]
        how = Sampling(**{**sampling.__dict__, "seed": seed})
        assert model.continuations([prompt], 12, how)[0] == together[k]
    assert len({c.text for c in together}) == len(PROMPTS)


@TRUNKS
def test_cached_steps_equal_the_whole_forward_pass(vocabulary, trunk, positions):
    model = make(vocabulary, trunk, positions=positions)
    for prompt, got in zip(PROMPTS, model.continuations(PROMPTS, 10), strict=True):
        ids = model.front.read(prompt, end=False).tolist()
        for i in got.ids:
            logits = model({"text": model.front.collate([ids])})[0, -1]
            assert int(logits.argmax()) == i
            ids.append(i)


def test_generation_ends_with_the_context_and_keeps_the_training_mode(vocabulary):
    model = make(vocabulary, context=12).train()
    ids = model.front.read("the cat", end=False)
    got = model.continuations([ids.tolist(), "the"], 100)
    assert got[0].finish == "end" or len(got[0].ids) == 12 - len(ids) + 1
    assert model.training
    assert all(c.finish in ("end", "length") for c in got)


def test_a_control_token_in_a_prompt_is_plain_text(vocabulary):
    model = make(vocabulary)
    written = "a<|endoftext|>b"
    assert model.front.end_id not in model.read({"text": written})["text"][:-1]
    steps = []
    model.front.embedding.register_forward_hook(lambda _, ids, __: steps.append(ids[0]))
    model.generate([written], 1)
    model.generate([written], 1, special=True)
    assert [int((ids == model.front.end_id).sum()) for ids in steps] == [0, 1]


def test_stream_yields_the_generated_text(vocabulary):
    model = make(vocabulary)
    shown = ["", ""]
    texts = model.generate(
        ["the", "日"], 16, seed=3, stream=lambda row, piece: shown.__setitem__(row, shown[row] + piece)
    )
    assert shown == texts
    how = Sampling(temperature=1.0, seed=3)
    assert "".join(model.stream("the", 16, how)) == model.generate("the", 16, seed=3)[0]
    texts = model.train().stream("the", 16, how)
    next(texts)
    texts.close()  # closed early, the model is in training mode again
    assert model.training and not torch.is_inference_mode_enabled()
    model.loss(batch_of(model, TEXTS))["loss"].backward()


def test_verse_chapters_hold_out_whole_books():
    from worldtokens.data import samples

    rows = samples.open("verses", unit="chapter")
    assert len(rows) == 1189
    verses = {r["id"]: r["text"] for r in samples.open("verses", books=True)}
    assert rows[0]["text"].split("\n")[:2] == [verses["Gen.1.1"], verses["Gen.1.2"]]
    sides = {}
    for r in rows:
        sides.setdefault(r["book"], set()).add(r["split"])
    assert all(len(s) == 1 for s in sides.values())
    assert {"train", "validation", "test"} == set().union(*sides.values())
