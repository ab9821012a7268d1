"""Dropping and merging tokens: against plain slow twins, and the properties that every trunk relies on."""

import dataclasses
from pathlib import Path

import matplotlib
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers.reduce.tokenizer import mask_tokens, merge_tokens
from worldtokens.tokenizers.series.read import read_series

DIM = 8
FIELDS = ("x", "pos", "segment", "block", "modality", "ids")


def sample(n, seed=0, order="bidirectional", ids=False):
    """One sample of n distinct tokens."""
    g = torch.Generator().manual_seed(1000 * seed + n)
    t = wt.Tokens(
        torch.randn(1, n, DIM, generator=g),
        pos=torch.randn(1, n, 3, generator=g),
        modality=torch.full((1, n), 1),
        ids=torch.arange(n)[None] + 100 * seed if ids else None,
        layout=wt.Layout.simple([n], order),
    )
    return t.causal() if order == "causal" else t


def spoiled(t):
    """The same tokens with NaN wherever nothing real stands."""
    return t.replace(x=t.x.masked_fill(~t.valid[..., None], float("nan")), layout=t.layout)


def batches(t):
    """The three forms in which a batch may come: with layout, without, and with NaN at padding."""
    return [t, dataclasses.replace(t, layout=None), spoiled(t)]


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=5)
shares = st.sampled_from([0.1, 0.25, 0.4, 0.5, 0.75, 1.0])


# ---- dropping --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(lengths, shares, st.integers(0, 2), st.booleans(), st.integers(0, 2))
def test_kept_tokens_are_a_subset_in_order(ns, keep, protect, packed, form):
    t = wt.Tokens.stack([sample(n, i, ids=True) for i, n in enumerate(ns)])
    t = batches(t.pack(sum(ns)) if packed else t)[form]
    noise = torch.rand(t.shape[:2], generator=torch.Generator().manual_seed(sum(ns)))
    kept, dropped = mask_tokens(t, keep, protect=protect, noise=noise)
    assert kept.shape[1] == int(kept.valid.sum(1).max())
    assert kept.infer_layout().layout.lengths == kept.layout.lengths
    for row in range(len(t)):
        want = []
        for seg in t.segment[row][t.valid[row]].unique():  # the plain way: sample by sample
            places = (t.valid[row] & (t.segment[row] == seg)).nonzero().flatten().tolist()
            safe, loose = places[:protect], places[protect:]
            count = max(len(safe) + int(len(loose) * keep + 0.5), 1) - len(safe)
            want += sorted(safe + sorted(loose, key=lambda p: noise[row, p].item())[:count])
        mine = kept.valid[row]
        assert dropped.places[row][mine].tolist() == want
        assert dropped.kept[row].nonzero().flatten().tolist() == want
        for name in FIELDS:
            assert torch.equal(getattr(kept, name)[row][mine], getattr(t, name)[row][want])
    assert torch.equal(dropped.masked, t.valid & ~dropped.kept)


@settings(max_examples=30, deadline=None)
@given(lengths, shares, st.booleans())
def test_put_back(ns, keep, packed):
    t = wt.Tokens.stack([sample(n, i) for i, n in enumerate(ns)])
    t = spoiled(t.pack(sum(ns)) if packed else t)
    kept, dropped = mask_tokens(t, keep)
    fill = torch.full((DIM,), 7.0)
    back = dropped.put_back(spoiled(kept), fill)
    assert torch.equal(back.x[dropped.kept], t.x[dropped.kept])
    assert (back.x[dropped.masked] == 7).all() and (back.x[~t.valid] == 0).all()
    for name in ("valid", *FIELDS[1:-1]):
        assert torch.equal(getattr(back, name), getattr(t, name))
    assert back.layout == t.layout
    wide = dropped.put_back(kept.replace(x=torch.ones(*kept.shape[:2], 3)), torch.zeros(3))
    assert wide.dim == 3 and int(wide.x.sum()) == 3 * int(dropped.kept.sum())


def test_mae_counts_and_uniform_chance():
    """196 patches at 25 % are 49, as in MAE; every token is kept equally often, within 4 sigma."""
    t = wt.Tokens(torch.zeros(4, 196, 1), layout=wt.Layout.simple([196] * 4, "bidirectional"))
    assert mask_tokens(t, 0.25)[0].shape == (4, 49, 1)
    assert mask_tokens(t, 0.25)[0].layout.full(49)
    g = torch.Generator().manual_seed(0)
    small = wt.Tokens(torch.zeros(4000, 8, 1), layout=wt.Layout.simple([8] * 4000, "bidirectional"))
    for tokens in (
        small,
        dataclasses.replace(small, layout=wt.Layout.simple([8] * 3999 + [7], "bidirectional")),
    ):
        rate = mask_tokens(tokens, 0.25, g)[1].kept[:3999].float().mean(0)
        assert (rate - 0.25).abs().max() < 4 * (0.25 * 0.75 / 3999) ** 0.5


def test_the_generator_decides():
    t = sample(40)
    a, b, c = (mask_tokens(t, 0.5, torch.Generator().manual_seed(s))[1].places for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("order", ["bidirectional", "causal"])
def test_a_trunk_reads_what_is_left_and_nothing_else(order):
    """Dropped rows give what each sample's kept tokens give alone; the fast way and the dense rule agree."""
    torch.manual_seed(0)
    trunk = wt.Transformer(DIM, 2, 2, rope=1).eval()
    t = spoiled(wt.Tokens.stack([sample(n, i, order) for i, n in enumerate((9, 4, 6))]))
    kept, _ = mask_tokens(t, 0.5, torch.Generator().manual_seed(0))
    out = trunk(spoiled(kept))
    dense = trunk(dataclasses.replace(kept, layout=None))
    assert (out.x - dense.x)[kept.valid].abs().max() < 1e-5
    for row in range(3):
        alone = wt.Tokens(
            kept.x[row : row + 1, kept.valid[row]], pos=kept.pos[row : row + 1, kept.valid[row]]
        )
        alone = alone.causal() if order == "causal" else alone
        assert (trunk(alone).x[0] - out.x[row][kept.valid[row]]).abs().max() < 1e-5


# ---- merging ---------------------------------------------------------------------------------------------------


def slow_merge(x, pos, size, goal):
    """ToMe on one group, token by token; returns tokens as lists of member places."""
    tokens = [([i], x[i].clone(), pos[i].clone(), float(size[i])) for i in range(len(x))]
    while len(tokens) > goal:
        r = min(len(tokens) // 2, len(tokens) - goal)
        edges = []
        for i in range(0, len(tokens), 2):
            score = [
                (float(torch.cosine_similarity(tokens[i][1], tokens[j][1], 0)), -j)
                for j in range(1, len(tokens), 2)
            ]
            best, j = max(score)
            edges.append((best, i, -j))
        edges = sorted(edges, reverse=True)[:r]
        gone = {i for _, i, _ in edges}
        fresh = []
        for j, token in enumerate(tokens):
            if j in gone:
                continue
            crowd = [token] + [tokens[i] for _, i, to in edges if to == j]
            total = sum(c[3] for c in crowd)
            members = sorted(m for c in crowd for m in c[0])
            fresh.append(
                (
                    members,
                    sum(c[1] * c[3] for c in crowd) / total,
                    sum(c[2] * c[3] for c in crowd) / total,
                    total,
                )
            )
        tokens = fresh
    return tokens


@settings(max_examples=60, deadline=None)
@given(lengths, shares, st.integers(0, 2), st.booleans(), st.integers(0, 2), st.booleans())
def test_merging_equals_its_slow_twin(ns, keep, protect, packed, form, one_modality):
    t = wt.Tokens.stack([sample(n, i, ids=True) for i, n in enumerate(ns)])
    t = batches(t.pack(sum(ns)) if packed else t)[form]
    before = torch.randint(1, 5, t.shape[:2], generator=torch.Generator().manual_seed(sum(ns))).float()
    out, merge = merge_tokens(t, keep=keep, protect=protect, sizes=before, one_modality=one_modality)
    assert out.infer_layout().layout.lengths == out.layout.lengths
    assert merge.sizes.sum() == before[t.valid].sum()
    for row in range(len(t)):
        want = []
        for seg in t.segment[row][t.valid[row]].unique():
            places = (t.valid[row] & (t.segment[row] == seg)).nonzero().flatten()
            safe, loose = places[:protect], places[protect:]
            want += [([int(p)], t.x[row, p], t.pos[row, p], float(before[row, p]), int(seg)) for p in safe]
            goal = max(1, int(len(loose) * keep + 0.5))
            for members, x, pos, size in slow_merge(
                t.x[row, loose], t.pos[row, loose], before[row, loose], goal
            ):
                want.append((loose[members].tolist(), x, pos, size, int(seg)))
        assert int(out.valid[row].sum()) == len(want)
        for i, (members, x, pos, size, seg) in enumerate(want):
            assert (merge.places[row][members] == i).all()
            assert (out.x[row, i] - x).abs().max() < 1e-5 and (out.pos[row, i] - pos).abs().max() < 1e-5
            assert merge.sizes[row, i] == size and out.segment[row, i] == seg and out.modality[row, i] == 1
            assert out.ids[row, i] == (t.ids[row, members[0]] if len(members) == 1 else -1)


def test_toms_own_case():
    """Eight tokens by hand: A = places 0 2 4 6, B = 1 3 5 7; the two most alike pairs merge, the rest is as it was."""
    x = torch.tensor([[1, 0], [0, 1], [1, 0.1], [1, 0.11], [-1, 0], [-1, 0.01], [0, -1], [0.5, -1]]).float()
    t = wt.Tokens(x[None], layout=wt.Layout.simple([8], "bidirectional"))
    out, merge = merge_tokens(t, 2)
    # 2 -> 3 (angles 0.0997 and 0.1096) and 4 -> 5 (0 and 0.01) are nearest
    assert merge.places[0].tolist() == [0, 1, 2, 2, 3, 3, 4, 5]
    assert torch.allclose(out.x[0, 2], (x[2] + x[3]) / 2) and torch.allclose(out.x[0, 3], (x[4] + x[5]) / 2)
    assert torch.equal(out.x[0, [0, 1, 4, 5]], x[[0, 1, 6, 7]])
    assert out.pos[0, :, 0].tolist() == [0, 1, 2.5, 4.5, 6, 7]
    assert merge.sizes[0].tolist() == [1, 1, 2, 2, 1, 1]


@settings(max_examples=30, deadline=None)
@given(lengths, st.booleans())
def test_merging_identical_tokens_loses_nothing(ns, packed):
    """Samples of few distinct tokens, each in pairs side by side, come back whole."""
    rows = []
    for i, n in enumerate(ns):
        s = sample(n, i)
        rows.append(s.replace(x=s.x.repeat_interleave(2, 1), **{
            k: getattr(s, k).repeat_interleave(2, 1) for k in ("valid", "pos", "segment", "block", "modality")
        }, layout=wt.Layout.simple([2 * n], "bidirectional")))  # fmt: skip
    t = wt.Tokens.stack(rows)
    t = spoiled(t.pack(2 * sum(ns)) if packed else t)
    out, merge = merge_tokens(t, keep=0.5)
    assert (merge.sizes[out.valid] == 2).all()
    back = merge.unmerge(spoiled(out))
    assert torch.equal(back.x[t.valid], t.x[t.valid]) and (back.x[~t.valid] == 0).all()
    assert torch.equal(out.pos[out.valid], torch.cat([s.pos[0, ::2] for s in rows]))
    for name in ("valid", *FIELDS[1:-1]):
        assert torch.equal(getattr(back, name), getattr(t, name))


def test_packed_rows_merge_as_one_by_one():
    parts = [sample(n, i) for i, n in enumerate((12, 5, 7, 9))]
    together = merge_tokens(wt.pack(parts, 20), keep=0.6, protect=1, one_modality=True)[0].split()
    for one, part in zip(together, parts, strict=True):
        alone = merge_tokens(part, keep=0.6, protect=1)[0]
        assert one.shape == alone.shape
        assert (one.x - alone.x).abs().max() < 1e-6 and (one.pos - alone.pos).abs().max() < 1e-6


def test_two_merges_undo_in_turn():
    t = sample(16)
    first, a = merge_tokens(t, 4)
    second, b = merge_tokens(first, 4, sizes=a.sizes)
    assert second.shape[1] == 8 and b.sizes.sum() == 16
    # a merged token is the plain mean of all the originals it holds
    where = b.places[0][a.places[0]]
    for i in range(8):
        assert (second.x[0, i] - t.x[0][where == i].mean(0)).abs().max() < 1e-5
    assert torch.equal(a.unmerge(b.unmerge(second)).x[0], second.x[0][where])


def test_only_like_may_merge():
    """Equal embeddings of another block, modality or sample never become one."""
    picture = wt.Tokens(
        torch.ones(1, 6, DIM), modality=torch.full((1, 6), 1), layout=wt.Layout.simple([6], "bidirectional")
    )
    sound = picture.replace(modality=torch.full((1, 6), 2))
    text = wt.Tokens(
        torch.ones(1, 5, DIM), modality=torch.zeros(1, 5), layout=wt.Layout.simple([5], "causal")
    ).causal()
    mixed, merge = merge_tokens(wt.Tokens.cat(picture, sound), keep=0.1)
    assert mixed.modality.tolist() == [[1, 2]] and merge.sizes.tolist() == [[6, 6]]
    prefix = wt.Tokens.cat(picture, text, follow=True)
    out, merge = merge_tokens(prefix, keep=0.5)
    assert merge.sizes.tolist() == [[4, 1, 1, 1, 1, 1, 1, 1]]  # all three pairs agree on one partner
    assert out.block.tolist() == [[0, 0, 0, 1, 2, 3, 4, 5]] and out.modality.tolist() == [[1] * 3 + [0] * 5]
    packed = wt.pack([picture, picture], 12)
    out, merge = merge_tokens(packed, keep=0.1)
    assert out.segment.tolist() == [[0, 1]] and out.layout.lengths == ((1, 1),)
    with pytest.raises(wt.InputError, match="block number of their own"):
        merge_tokens(text, 1)


def test_samples_that_mix_in_a_row_are_moved_apart():
    t = sample(9)
    t = t.replace(
        segment=torch.tensor([[1, 0, 1, 0, 1, 0, 1, 0, 0]]),
        valid=torch.tensor([[True, True, False, True, True, True, True, False, True]]),
    )
    kept, dropped = mask_tokens(t, 0.5, noise=torch.arange(9)[None] * 1.0)
    assert dropped.places.tolist() == [[1, 3, 0, 4]] and kept.segment.tolist() == [[0, 0, 1, 1]]
    back = dropped.put_back(kept, torch.zeros(DIM))
    assert torch.equal(back.x[dropped.kept], t.x[dropped.kept]) and torch.equal(back.segment, t.segment)
    out, merge = merge_tokens(t, keep=0.1)
    assert merge.sizes.tolist() == [[4, 3]]
    want = torch.stack([t.x[0, [1, 3, 5, 8]].mean(0), t.x[0, [0, 4, 6]].mean(0)])
    assert (out.x[0] - want).abs().max() < 1e-6
    back = merge.unmerge(out)
    assert torch.equal(back.x[0, 4], out.x[0, 1]) and torch.equal(back.x[0, 8], out.x[0, 0])


def test_features_of_its_own():
    """Similarity may be measured on something else than x."""
    t = sample(6)
    features = torch.tensor([[[1.0, 0], [0, 1], [0, 1.01], [1, 0.01], [5, 5], [-1, -1]]])
    _, merge = merge_tokens(t, 2, features=features)
    assert merge.places[0].tolist() == [1, 0, 0, 1, 2, 3]


# ---- shared ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ns", [(8, 8), (8, 3)])
def test_nothing_waits_for_the_device(ns):
    """Tensors without data (device meta) raise at any look into them; shapes follow from the layout alone."""
    t = wt.Tokens.stack([sample(n, i) for i, n in enumerate(ns)]).to("meta")
    kept, dropped = mask_tokens(t, 0.5, protect=1)
    assert dropped.put_back(kept, torch.zeros(DIM, device="meta")).shape == t.shape
    out, merge = merge_tokens(t, keep=0.5, protect=1, one_modality=True)
    assert merge.unmerge(out).shape == t.shape
    assert kept.layout.lengths[0] == (5,) and out.layout.lengths[0] == (5,)  # 1 + half of 7, rounded up


def test_gradients_flow_to_what_was_kept_and_merged():
    t = wt.Tokens.stack([sample(n, i) for i, n in enumerate((8, 5))])
    x = t.x.clone().requires_grad_()
    kept, dropped = mask_tokens(t.replace(x=x), 0.5)
    (grad,) = torch.autograd.grad(kept.x.masked_fill(~kept.valid[..., None], 0).sum(), x)
    assert torch.equal(grad != 0, dropped.kept[..., None].expand_as(grad))
    out, _ = merge_tokens(t.replace(x=x), keep=0.5)
    (grad,) = torch.autograd.grad(out.x.sum(), x)
    assert ((grad > 0) == t.valid[..., None]).all()


def test_half_precision_sums_are_wide():
    """256 tokens of 1.0 and one of 257 average to 2 in bfloat16, whose own sums would stop at 256."""
    x = torch.ones(1, 257, 1)
    x[0, -1] = 258
    t = wt.Tokens(x.bfloat16(), layout=wt.Layout.simple([257], "bidirectional"))
    out, _ = merge_tokens(t, keep=0.001)
    assert out.x.dtype == torch.bfloat16 and abs(out.x.item() - 2) < 0.02


def test_empty_rows_stay_empty():
    t = wt.Tokens.stack(
        [sample(4), wt.Tokens(torch.zeros(1, 0, DIM), layout=wt.Layout.simple([0], "bidirectional"))]
    )
    for out in (mask_tokens(t, 0.5)[0], merge_tokens(t, keep=0.5)[0]):
        assert out.valid.tolist() == [[True, True], [False, False]] and out.layout.lengths == ((2,), ())
    none = wt.Tokens(torch.zeros(2, 0, DIM), layout=wt.Layout.simple([0, 0], "bidirectional"))
    assert mask_tokens(none, 0.5)[0].shape == merge_tokens(none, keep=0.5)[0].shape == (2, 0, DIM)


@pytest.mark.parametrize("keep", [0, -1, 1.5, float("nan"), "half", True, None])
def test_shares_out_of_range(keep):
    with pytest.raises(wt.InputError):
        mask_tokens(sample(4), keep)
    with pytest.raises(wt.InputError):
        merge_tokens(sample(4), keep=keep)
    with pytest.raises(wt.InputError):
        merge_tokens(sample(4), -1)
    with pytest.raises(wt.InputError, match="one number for each token"):
        mask_tokens(sample(4), 0.5, noise=torch.zeros(1, 3))


# ---- TokenReducer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures():
    rows = samples.open("emoji", split="test")
    return [rows[i]["image"] for i in (0, 40, 90)]


def test_reduced_front_ends_keep_the_contract(pictures):
    torch.manual_seed(0)
    image = wt.ImageTokenizer(32, patch=16, size=64, class_token=True)
    bad = [b"", b"no image", 7]
    assert "check_refused" in check_tokenizer(wt.TokenReducer(image, 0.5), pictures, bad=bad)
    check_tokenizer(wt.TokenReducer(image, 0.5, how="merge"), pictures, bad=bad)


@pytest.mark.parametrize("how", ["random", "merge"])
def test_reduced_front_ends_of_any_length(how):
    """Real prices of unequal length: rows are ragged, and a sample still gives what it gives alone."""
    torch.manual_seed(0)
    prices, _ = read_series(Path(matplotlib.get_data_path()) / "sample_data" / "Stocks.csv", ["IBM", "MSFT"])
    prices = prices[:, ::2]
    front = wt.TokenReducer(wt.SeriesTokenizer(32, channels=2, patch=8, stride=8), 0.6, how=how)
    check_tokenizer(
        front, [prices, prices[:, 100:150], prices[:, 30:61], prices[:, 200:]], bad=[b"", prices[:1]]
    )
    tokens = front.train().tokens([prices, prices[:, :20]])
    whole = front.tokenizer.tokens([prices, prices[:, :20]])
    assert whole.layout.lengths == ((66,), (6,))
    # 66 * 0.6 = 39.6 and 6 * 0.6 = 3.6, to the nearest
    assert tokens.layout.lengths == ((40,), (4,)) and tokens.valid.sum(1).tolist() == [40, 4]


def test_reduced_drops_in_training_only(pictures):
    front = wt.TokenReducer(wt.ImageTokenizer(32, patch=16, size=64, class_token=True), keep=0.25)
    whole = front.eval().tokens(pictures)
    assert whole.shape[1] == 17
    few = front.train().tokens(pictures)
    assert few.shape[1] == 5 and few.layout.full(5)
    assert torch.equal(few.x[:, 0], whole.x[:, 0])  # the class token stays
    assert not torch.equal(few.pos, front.tokens(pictures).pos)
    merged = wt.TokenReducer(front.tokenizer, keep=0.25, how="merge").eval().tokens(pictures)
    assert merged.shape[1] == 5 and torch.equal(merged.x[:, 0], whole.x[:, 0])


def test_reduced_refuses_what_it_cant_wrap():
    with pytest.raises(wt.InputError, match="expected a front-end"):
        wt.TokenReducer(torch.nn.Linear(2, 2))
    with pytest.raises(wt.InputError, match="'random' or 'merge'"):
        wt.TokenReducer(wt.ImageTokenizer(8), how="drop")
