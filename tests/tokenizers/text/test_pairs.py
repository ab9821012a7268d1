"""Pairs of texts: the order of special tokens, token types, truncation and errors."""

import pytest
import torch

import worldtokens as wt


@pytest.fixture(scope="module")
def vocabulary():
    return wt.TextTokenizer.train(["a cat and a dog"] * 3, 280, dim=4, start="<s>").backend


def make(vocabulary, **settings):
    torch.manual_seed(0)
    return wt.PairTokenizer(vocabulary, 8, 16, start="<s>", end="<|endoftext|>", **settings)


@pytest.mark.parametrize(("pair", "ends"), [("bert", 1), ("roberta", 2)])
def test_a_pair_is_separated_by_end_tokens(vocabulary, pair, ends):
    tok = make(vocabulary, pair=pair)
    first, second = (tok.read(t)[1:-1].tolist() for t in ("a cat", "a dog"))
    end = [tok.end_id]
    assert tok.read(("a cat", "a dog")).tolist() == [tok.start_id, *first, *end * ends, *second, *end]


def test_token_types_count_the_end_tokens_before(vocabulary):
    tok = make(vocabulary)
    torch.nn.init.zeros_(tok.embedding.weight), torch.nn.init.zeros_(tok.pos_embed)
    ids = tok.read(("a cat", "a dog"))
    x = tok.tokens([("a cat", "a dog")]).x[0]
    second = ids.tolist().index(tok.end_id) + 1
    want = tok.type_embedding.weight[(torch.arange(len(ids)) >= second).long()]
    assert torch.equal(x, want)
    tok = make(vocabulary, pair="roberta")
    torch.nn.init.zeros_(tok.embedding.weight), torch.nn.init.zeros_(tok.pos_embed)
    assert torch.equal(tok.tokens([("a", "a")]).x[0], tok.type_embedding.weight[:1].expand(6, -1))


@pytest.mark.filterwarnings("ignore:a text of")
def test_the_longer_text_is_truncated_first(vocabulary):
    tok = make(vocabulary)
    short, long = tok.read("a")[1:-1].tolist(), tok.read("b" * 40)[1:-1].tolist()
    ids = tok.read(("a", "b" * 40)).tolist()
    assert len(ids) == 16 and ids[1 : 1 + len(short)] == short
    assert ids[2 + len(short) : -1] == long[: 13 - len(short)]


def test_wrong_pairs_and_settings_raise(vocabulary):
    with pytest.raises(wt.InputError, match=r"text 0 .* expected a str or a tuple of two"):
        make(vocabulary).read(("a", "b", "c"))
    for settings, message in (
        ({"max_positions": 8}, "max_positions=8 is less than context=16"),
        ({"pair": "t5"}, "pair is 't5'"),
        ({"num_embeddings": 3}, "num_embeddings=3"),
    ):
        with pytest.raises(wt.InputError, match=message):
            make(vocabulary, **settings)
