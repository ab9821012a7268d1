"""GramTokenizer: what a token is made of, and the front-end contract."""

import pytest
import torch

import worldtokens as wt

TEXTS = ["the cat sat on the mat", "the dog ate the rat", "a", "日本 and the cat"]


@pytest.fixture(scope="module")
def front():
    torch.manual_seed(0)
    front = wt.GramTokenizer.train(TEXTS * 2, vocab_size=290, dim=16, context=40, start="<|s|>")
    for table in front.tables:  # they start at nothing
        assert not table.weight.any()
        torch.nn.init.normal_(table.weight)
    return front


def test_the_contract(front):
    wt.testing.check_tokenizer(front, TEXTS)


def test_a_token_is_made_of_its_own_id_and_the_two_before_it(front):
    ids = torch.randint(5, 280, (1, 12), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 5] = 4
    moved = (front.embed(ids) - front.embed(other)).abs().amax(-1)[0] > 1e-6
    assert moved.tolist() == [5 <= i <= 7 for i in range(12)]
    # the same three ids are the same token wherever they stand, but for its place
    plain = front.embed(ids) - front.position[:12]
    assert torch.allclose(
        front.embed(ids[:, 4:7], torch.arange(4, 7)[None])[:, -1] - front.position[6], plain[:, 6]
    )
    # a text's first ids have nothing before them, whatever stands there in a packed row
    place = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]])
    packed = front.embed(ids, place)
    alone = front.embed(ids[:, 6:])
    assert torch.allclose(packed[:, 6:], alone) and not torch.allclose(
        plain[:, 6:8], alone[:, :2] - front.position[:2]
    )


def test_ids_without_those_before_them_are_refused(front):
    with pytest.raises(wt.InputError, match="made of 3"):
        front.embed(torch.tensor([[7]]), torch.tensor([[4]]))
    for wrong in ({"grams": 1}, {"buckets": 1}, {"width": 0}):
        with pytest.raises(wt.InputError, match=next(iter(wrong))):
            wt.GramTokenizer(front._rust, 16, **wrong)


def test_n_grams_fall_evenly_into_buckets():
    front = wt.GramTokenizer.train(TEXTS * 2, vocab_size=290, dim=16, start="<|s|>")
    seen = []
    for table in front.tables:
        table.register_forward_hook(lambda _, at, __: seen.append(at[0]))
    ids = torch.randint(0, front.vocab_size, (200, 77))
    front.embed(ids)
    for n, at in enumerate(seen, 2):
        whole = at[:, n - 1 :].flatten()  # where n ids are there
        grams = sum(ids[:, k : ids.shape[1] - n + 1 + k] * 1000 ** (n - 1 - k) for k in range(n))
        different = grams.unique().numel()
        expected = front.buckets * (1 - (1 - 1 / front.buckets) ** different)  # of as many random throws
        assert abs(whole.unique().numel() / expected - 1) < 0.03
