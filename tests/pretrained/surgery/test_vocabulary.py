"""Larger and smaller vocabularies of trained models: old tokens keep their ids or rows, and outputs stay."""

from __future__ import annotations

import copy

import pytest
import torch

import worldtokens as wt
from worldtokens.testing import randomised
from worldtokens.tokenizers.base import Batch


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_of_a_language_model(tied, make_text, reload, tmp_path):
    model = randomised(wt.LanguageModel(make_text(), wt.Transformer(24, 1, 4), tied=tied, bias=True))
    front = model.front
    old, table = front.vocab_size, front.embedding.weight.detach().clone()
    text = "the quick cat"
    ids = front.read(text)[None]
    with torch.no_grad():
        before = model({"text": Batch(ids=ids, lengths=(ids.shape[1],))})
        new = wt.grow_vocabulary(model, ["axolotl", "<img>"], spread=0.0)
        assert new == [old, old + 1] and model.front is front and front.vocab_size == old + 2
        after = model({"text": Batch(ids=ids, lengths=(ids.shape[1],))})
    assert after.shape[-1] == old + 2
    torch.testing.assert_close(after[..., :old], before)
    torch.testing.assert_close(front.embedding.weight[:old], table)
    # rows at the mean: their logit is the mean logit, so a new token starts as likely as an average one
    torch.testing.assert_close(after[..., old], before.mean(-1), atol=1e-4, rtol=0)
    assert front.decode(front.read("an axolotl sat")) == "an axolotl sat"
    assert new[0] in front.read("an axolotl sat").tolist()
    loaded = reload(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded({"text": Batch(ids=ids, lengths=(ids.shape[1],))}), after)
    assert loaded.front.read("axolotl").tolist() == front.read("axolotl").tolist()
    # gradients reach the new rows, through the head too
    rows = [{"text": "an axolotl sat"}]
    model.train().loss(model.collate([model.read(r) for r in rows]))["loss"].backward()
    assert float(model.head_weight.grad[new[0]].abs().sum()) > 0


def test_new_rows_have_mean_and_covariance_of_the_old_ones(make_text):
    """Mean, deviation and correlation of 3,000 new rows against those of the old ones."""
    front = randomised(make_text())
    with torch.no_grad():  # rows with a mean, unequal deviations, and two correlated channels
        w = front.embedding.weight
        w *= torch.linspace(0.2, 3.0, 24)
        w[:, 1] = w[:, 0] + 1.0
    old = front.vocab_size
    table = front.embedding.weight.detach().clone()
    wt.grow_vocabulary(front, [f"<{i}>" for i in range(3000)])
    new = front.embedding.weight.detach()[old:]
    torch.testing.assert_close(new.mean(0), table.mean(0), atol=0.25, rtol=0)
    torch.testing.assert_close(new.std(0), table.std(0), atol=0, rtol=0.08)
    torch.testing.assert_close(new[:, 1], new[:, 0] + 1.0, atol=1e-4, rtol=0)


def test_special_tokens_never_come_from_text(make_clip):
    model = make_clip()
    front = model.tokenizers["text"]
    (new,) = wt.grow_vocabulary(model, ["<image>"], special=True)
    assert new not in front.read("a <image> of a cat").tolist()
    assert new in front.read("a <image> of a cat", special=True).tolist()
    for wrong in (["cat"], ["new", "new"], [""], []):
        with pytest.raises(wt.InputError, match="in the vocabulary already, empty, or named twice"):
            wt.grow_vocabulary(model, wrong) if wrong != ["cat"] else wt.grow_vocabulary(model, ["<image>"])


def test_new_tokens_of_clips_vocabulary(reload, tmp_path):
    """A new token that is not special is found in text, and other texts are encoded as before."""
    front = wt.TextTokenizer.clip(dim=8)
    before = front.encode_batch(["two cats & a dog", "an axolotl"])
    (new,) = wt.grow_vocabulary(front, ["axolotl"])
    assert new == 49408 and front.embedding.weight.shape == (49409, 8)
    assert front.encode_batch(["two cats & a dog"]) == before[:1]
    assert new in front.encode_batch(["an Axolotl"])[0]
    assert reload(front, tmp_path).encode_batch(["an Axolotl"]) == front.encode_batch(["an Axolotl"])


def test_larger_and_smaller_vocabulary_of_a_captioner(make_text, reload, tmp_path):
    """Its head is untied, and every caption begins with an id that the task stores."""
    fronts = {"image": wt.ImageTokenizer(24, patch=8, size=16), "text": make_text()}
    model = wt.Captioner(fronts, wt.Transformer(24, 1, 4, cross=True), tied=False)
    randomised(model)
    image = torch.randint(0, 256, (3, 16, 16), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    texts = ["a cat sat", "the lazy dog"]
    rows = [{"image": image, "text": t} for t in texts]

    def losses() -> list[float]:
        with torch.no_grad():
            return [float(model.loss(model.collate([model.read(r)]))["loss"]) for r in rows]

    before, old = losses(), fronts["text"].vocab_size
    wt.grow_vocabulary(model, ["axolotl"], special=True)
    assert model.head.weight.shape == (old + 1, 24) and model.prefix == [fronts["text"].start_id]
    with torch.no_grad():
        model.head.weight[-1] = (
            0  # a token that takes part in the softmax: never likely against logits of tens
        )
    more = losses()
    assert all(b <= m < b + 3 for b, m in zip(before, more, strict=True))
    ids = wt.shrink_vocabulary(model, texts)
    assert model.head.weight.shape == (len(ids), 24) and model.prefix == [fronts["text"].start_id]
    assert all(f < m for f, m in zip(losses(), more, strict=True))  # fewer tokens compete
    assert reload(model, tmp_path).prefix == model.prefix
    dog = fronts["text"].backend.token_to_id("g")
    held = wt.Captioner(fronts, wt.Transformer(24, 1, 4, cross=True), suppress=[dog])
    wt.shrink_vocabulary(held, ["a cat"])  # "g" is kept, under another id
    assert held.suppress == [fronts["text"].backend.token_to_id("g")]


def test_a_shrunk_vocabulary_encodes_its_texts_as_before(make_text, reload, tmp_path):
    model = randomised(wt.LanguageModel(make_text(), wt.Transformer(24, 1, 4), tied=False, bias=True))
    front, old = model.front, model.front.vocab_size
    texts = ["a cat sat", "the lazy dog"]
    before = [front.read(t) for t in texts]
    with torch.no_grad():
        want = [model({"text": Batch(ids=i[None], lengths=(len(i),))}) for i in before]
    ids = wt.shrink_vocabulary(model, texts)
    assert front.vocab_size == len(ids) < old and model.head.weight.shape[0] == len(ids)
    back = torch.tensor(ids)
    for text, i, logits in zip(texts, before, want, strict=True):
        now = front.read(text)
        assert back[now].tolist() == i.tolist()  # the same tokens under new ids
        with torch.no_grad():
            found = model({"text": Batch(ids=now[None], lengths=(len(now),))})
        torch.testing.assert_close(found, logits[..., back])
    assert front.decode(front.read("ünheard!")) == "ünheard!"  # any bytes can still be encoded
    assert reload(model, tmp_path).front.read(texts[0]).tolist() == front.read(texts[0]).tolist()


def test_clips_vocabulary_shrunk_to_a_few_captions():
    front = wt.TextTokenizer.clip(dim=4)
    texts = ["a photo of a cat", "two dogs playing frisbee", "grandmother's unbelievable adventures"]
    before, table = front.encode_batch(texts), front.embedding.weight.detach().clone()
    ids = wt.shrink_vocabulary(front, texts, keep=["zebra</w>"])
    assert 512 < len(ids) < 700
    now = front.encode_batch(texts)
    assert [[ids[i] for i in row] for row in now] == before
    torch.testing.assert_close(front.embedding.weight, table[ids])
    assert len(front.encode_batch(["zebra"])[0]) == 3 and front.encode_batch(["zebra"])[0][-1] == front.end_id
    with pytest.raises(wt.InputError, match="are not in the vocabulary"):
        wt.shrink_vocabulary(front, texts, keep=["nosuchtoken"])


@pytest.mark.slow
@pytest.mark.network
def test_a_published_encoder_keeps_its_embeddings(reload, tmp_path):
    """all-MiniLM-L6-v2 with a twelfth of its vocabulary, with a new token, with a longer context: the same embeddings of 50
    verses (difference found: 0)."""
    verses = wt.open_rows("verses", split="test")
    texts = [verses[i]["target"] for i in range(0, 200, 4)]
    model = wt.from_hf(wt.weights("minilm"))
    want, count = model.embed(texts), sum(p.numel() for p in model.parameters())
    small = copy.deepcopy(model)
    ids = wt.shrink_vocabulary(small, texts)
    assert len(ids) < 3000 and sum(p.numel() for p in small.parameters()) < 0.55 * count
    torch.testing.assert_close(small.embed(texts), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(reload(small, tmp_path).embed(texts), want, atol=1e-6, rtol=0)
    (new,) = wt.grow_vocabulary(model, ["axolotl"])
    wt.resize_context(model, 300, how="extend")
    assert new in model.tokenizer.read("an axolotl").tolist()
    torch.testing.assert_close(model.embed(texts), want, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.network
@torch.no_grad()
def test_a_published_language_model_keeps_its_logits():
    """SmolLM2-135M with one more control token, then with the 300 tokens that two sentences need: the same logits (up to 30)."""
    model = wt.from_hf(wt.weights("smollm2"))
    texts = ["The capital of France is Paris.", "Water boils at 100 degrees."]

    def logits(text: str) -> torch.Tensor:
        ids = model.front.read(text)
        return model({model.column: Batch(ids=ids[None], lengths=(len(ids),))})

    want = logits(texts[0])
    assert wt.grow_vocabulary(model, ["<tool>"], special=True) == [49152]
    grown = logits(texts[0])
    torch.testing.assert_close(grown[..., :49152], want, atol=1e-4, rtol=0)
    ids = wt.shrink_vocabulary(model, texts)
    assert len(ids) < 320
    torch.testing.assert_close(logits(texts[0]), grown[..., ids], atol=1e-4, rtol=0)
    wt.resize_context(model, 4096)
    assert model.context == model.front.context == 4096
