"""Encoder and PairTokenizer: one vector per sample of any modality, independent of the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.backbone.recurrent import Recurrent
from worldtokens.data import samples
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers.text.vocabulary import train_bpe

ROWS = samples.open("emoji", split="validation")[:24]
TEXTS = [c for r in ROWS for c in r["text"]]


def pair_tokenizer(**options) -> wt.PairTokenizer:
    vocabulary = train_bpe(TEXTS, 300, "<s>", "</s>", ("<pad>",), 2)
    return wt.PairTokenizer(vocabulary, 32, 24, start="<s>", end="</s>", pad="<pad>", **options)


def make_encoder(**options) -> wt.Encoder:
    torch.manual_seed(0)
    return wt.Encoder(pair_tokenizer(), wt.Transformer(32, 2, 4), **options)


@pytest.mark.parametrize("pair", ["bert", "roberta"])
def test_a_pair_tokenizer_passes_the_contract(pair):
    check_tokenizer(
        pair_tokenizer(pair=pair, max_positions=30, num_embeddings=320),
        [TEXTS[0], (TEXTS[1], TEXTS[2]), TEXTS[3], ("a", "b")],
        bad=[3, ("a",), ("a", 3), ["a", "b"], "\ud800"],
    )


def test_a_pair_has_special_tokens_and_segment_ids():
    front = pair_tokenizer()
    a, b = front.read("a cat"), front.read("two")
    pair = front.read(("a cat", "two"))
    assert pair.tolist() == [*a.tolist(), *b.tolist()[1:]]
    with torch.no_grad():
        front.type_embedding.weight[0], front.type_embedding.weight[1] = 0.0, 100.0
        x = front(front.collate([pair, a])).x
    assert (x[0, : len(a)] < 50).all() and (x[0, len(a) :] > 50).all() and (x[1, : len(a)] < 50).all()
    roberta = pair_tokenizer(pair="roberta").read(("a cat", "two")).tolist()
    assert roberta == [*a.tolist(), front.end_id, *b.tolist()[1:]]


def test_the_longer_text_of_a_pair_is_cut():
    front = pair_tokenizer()
    long, short = "word " * 40, "a"
    for pair in ((long, short), (short, long), (long, long)):
        ids = front.read(pair)
        assert len(ids) == 24 and int((ids == front.end_id).sum()) == 2
    ids = front.read((short, long)).tolist()
    assert ids[: len(front.read(short))] == front.read(short).tolist()


@pytest.mark.parametrize(
    "options", [{}, {"pool": "first", "dim": 16, "activation": "tanh"}, {"normalize": True}]
)
def test_vectors_do_not_depend_on_the_batch(options, tmp_path):
    model = make_encoder(**options).eval()
    together = model.embed(TEXTS, batch_size=7)
    alone = torch.cat([model.embed(t) for t in TEXTS])
    assert together.shape == (len(TEXTS), options.get("dim", 32))
    assert (together - alone).abs().max() < 1e-5
    if options.get("normalize"):
        assert (together.norm(dim=1) - 1).abs().max() < 1e-5
    assert torch.equal(wt.load(model.save(tmp_path)).embed(TEXTS, batch_size=7), together)
    assert model.embed([]).shape == (0, model.dim)


def test_settings_changed_after_construction_are_saved(tmp_path):
    model = make_encoder()
    model.pool, model.normalize = "first", True
    again = wt.load(model.save(tmp_path))
    assert (again.pool, again.normalize) == ("first", True)
    assert torch.equal(again.embed(TEXTS), model.embed(TEXTS))


def test_images_and_other_trunks():
    front = wt.ImageTokenizer(32, patch=16, size=None, max_tokens=16)
    for trunk in (wt.Transformer(32, 1, 4), Recurrent(kind="lstm", dim=32, depth=1)):
        model = wt.Encoder(front, trunk, dim=8).eval()
        images = [r["image"] for r in ROWS[:5]]
        vectors = model.embed(images, batch_size=2)
        assert vectors.shape == (5, 8)
        batch = front.collate([front.read(p) for p in images])
        assert (model.features({"image": batch}) - vectors).abs().max() < 1e-5
        assert model(batch).shape[0] == 5


def test_rank_is_by_cosine():
    model = make_encoder()
    order, scores = model.rank(TEXTS[:3], TEXTS)
    vectors = F.normalize(model.embed(TEXTS), dim=-1)
    assert (scores.diff(dim=1) <= 0).all() and (
        scores[:, 0] - 1
    ).abs().max() < 1e-5  # a text ranks first for itself
    assert (scores - (vectors[:3] @ vectors.T).gather(1, order)).abs().max() < 1e-5
    assert (model.rank(TEXTS[:3], 5 * model.embed(TEXTS)).scores - scores).abs().max() < 1e-5
    with pytest.raises(wt.InputError, match="width 5"):
        model.rank(TEXTS[:3], torch.zeros(2, 5))


def test_wrong_settings_raise():
    trunk = wt.Transformer(32, 1, 4)
    for args, match in (
        ((pair_tokenizer(), wt.Transformer(16, 1, 4)), "dim=32, the trunk dim=16"),
        ((pair_tokenizer(), trunk, "max"), "pool='max'"),
        ((pair_tokenizer(), trunk, "mean", None, True, "tanh"), "activation='tanh'"),
    ):
        with pytest.raises(ValueError, match=match):
            wt.Encoder(*args)
    for options, match in (
        ({"max_positions": 4}, "max_positions=4"),
        ({"pair": "gpt"}, "pair is 'gpt'"),
        ({"num_embeddings": 5}, "num_embeddings=5"),
    ):
        with pytest.raises(wt.InputError, match=match):
            pair_tokenizer(**options)
