"""Encoder and PairTokenizer: one vector a sample, whatever the modality, alone or in a batch."""

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


def words(**more) -> wt.PairTokenizer:
    vocabulary = train_bpe(TEXTS, 300, "<s>", "</s>", ("<pad>",), 2)
    return wt.PairTokenizer(vocabulary, 32, 24, start="<s>", end="</s>", pad="<pad>", **more)


def encoder(**more) -> wt.Encoder:
    torch.manual_seed(0)
    return wt.Encoder(words(), wt.Transformer(32, 2, 4), **more)


@pytest.mark.parametrize("pair", ["bert", "roberta"])
def test_a_pair_tokenizer_keeps_the_contract(pair):
    check_tokenizer(
        words(pair=pair, max_positions=30, num_embeddings=320),
        [TEXTS[0], (TEXTS[1], TEXTS[2]), TEXTS[3], ("a", "b")],
        bad=[3, ("a",), ("a", 3), ["a", "b"], "\ud800"],
    )


def test_a_pair_is_framed_and_numbered():
    front = words()
    a, b = front.read("a cat"), front.read("two")
    pair = front.read(("a cat", "two"))
    assert pair.tolist() == [*a.tolist(), *b.tolist()[1:]]
    with torch.no_grad():
        front.type_embedding.weight[0], front.type_embedding.weight[1] = 0.0, 100.0
        x = front(front.collate([pair, a])).x
    assert (x[0, : len(a)] < 50).all() and (x[0, len(a) :] > 50).all() and (x[1, : len(a)] < 50).all()
    roberta = words(pair="roberta").read(("a cat", "two")).tolist()
    assert roberta == [*a.tolist(), front.end_id, *b.tolist()[1:]]


def test_the_longer_text_of_a_pair_is_cut():
    front = words()
    long, short = "word " * 40, "a"
    for pair in ((long, short), (short, long), (long, long)):
        ids = front.read(pair)
        assert len(ids) == 24 and int((ids == front.end_id).sum()) == 2
    kept = front.read((short, long)).tolist()
    assert kept[: len(front.read(short))] == front.read(short).tolist()


@pytest.mark.parametrize(
    "more", [{}, {"pool": "first", "dim": 16, "activation": "tanh"}, {"normalize": True}]
)
def test_a_batch_gives_what_one_by_one_gives(more, tmp_path):
    model = encoder(**more).eval()
    together = model.embed(TEXTS, batch_size=7)
    alone = torch.cat([model.embed(t) for t in TEXTS])
    assert together.shape == (len(TEXTS), more.get("dim", 32))
    assert (together - alone).abs().max() < 1e-5
    if more.get("normalize"):
        assert (together.norm(dim=1) - 1).abs().max() < 1e-5
    assert torch.equal(wt.load(model.save(tmp_path)).embed(TEXTS, batch_size=7), together)
    assert model.embed([]).shape == (0, model.dim)


def test_what_is_changed_after_construction_is_saved(tmp_path):
    model = encoder()
    model.pool, model.normalize = "first", True
    again = wt.load(model.save(tmp_path))
    assert (again.pool, again.normalize) == ("first", True)
    assert torch.equal(again.embed(TEXTS), model.embed(TEXTS))


def test_pictures_and_other_trunks():
    front = wt.ImageTokenizer(32, patch=16, size=None, max_tokens=16)
    for trunk in (wt.Transformer(32, 1, 4), Recurrent(kind="lstm", dim=32, depth=1)):
        model = wt.Encoder(front, trunk, dim=8).eval()
        pictures = [r["image"] for r in ROWS[:5]]
        vectors = model.embed(pictures, batch_size=2)
        assert vectors.shape == (5, 8)
        batch = front.collate([front.read(p) for p in pictures])
        assert (model.features({"image": batch}) - vectors).abs().max() < 1e-5
        assert model(batch).shape[0] == 5


def test_rank_is_by_cosine():
    model = encoder()
    order, scores = model.rank(TEXTS[:3], TEXTS)
    vectors = F.normalize(model.embed(TEXTS), dim=-1)
    assert (scores.diff(dim=1) <= 0).all() and (scores[:, 0] - 1).abs().max() < 1e-5  # oneself is nearest
    assert (scores - (vectors[:3] @ vectors.T).gather(1, order)).abs().max() < 1e-5
    assert (model.rank(TEXTS[:3], 5 * model.embed(TEXTS)).scores - scores).abs().max() < 1e-5
    with pytest.raises(wt.InputError, match="5 wide"):
        model.rank(TEXTS[:3], torch.zeros(2, 5))


def test_wrong_settings_are_named():
    trunk = wt.Transformer(32, 1, 4)
    for args, match in (
        ((words(), wt.Transformer(16, 1, 4)), "32 wide, the trunk takes 16"),
        ((words(), trunk, "max"), "pool='max'"),
        ((words(), trunk, "mean", None, True, "tanh"), "activation='tanh'"),
    ):
        with pytest.raises(ValueError, match=match):
            wt.Encoder(*args)
    for more, match in (
        ({"max_positions": 4}, "max_positions=4"),
        ({"pair": "gpt"}, "pair is 'gpt'"),
        ({"rows": 5}, "rows=5"),
    ):
        with pytest.raises(wt.InputError, match=match):
            words(**more)
