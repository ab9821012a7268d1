"""Token merging: against a plain slow implementation, ToMe's own example, and its inverse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt
from worldtokens.tokenizers.reduce.merging import merge_tokens

DIM = 8
FIELDS = ("x", "pos", "segment", "block", "modality", "ids")
lengths = st.lists(st.integers(1, 12), min_size=1, max_size=5)
ratios = st.sampled_from([0.1, 0.25, 0.4, 0.5, 0.75, 1.0])


def slow_merge(x, pos, size, goal):
    """ToMe on one group, token by token; returns tokens as lists of member indices."""
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
            merged = [token] + [tokens[i] for _, i, to in edges if to == j]
            total = sum(c[3] for c in merged)
            members = sorted(m for c in merged for m in c[0])
            fresh.append(
                (
                    members,
                    sum(c[1] * c[3] for c in merged) / total,
                    sum(c[2] * c[3] for c in merged) / total,
                    total,
                )
            )
        tokens = fresh
    return tokens


@settings(max_examples=60, deadline=None)
@given(lengths, ratios, st.integers(0, 2), st.booleans(), st.integers(0, 2), st.booleans())
def test_merging_equals_the_slow_implementation(sample, forms, ns, keep, protect, packed, form, one_modality):
    t = wt.Tokens.stack([sample(n, i, ids=True) for i, n in enumerate(ns)])
    t = forms(t.pack(sum(ns)) if packed else t)[form]
    before = torch.randint(1, 5, t.shape[:2], generator=torch.Generator().manual_seed(sum(ns))).float()
    out, merge = merge_tokens(t, keep=keep, protect=protect, sizes=before, one_modality=one_modality)
    assert out.infer_layout().layout.lengths == out.layout.lengths
    assert merge.sizes.sum() == before[t.valid].sum()
    for row in range(len(t)):
        want = []
        for seg in t.segment[row][t.valid[row]].unique():
            indices = (t.valid[row] & (t.segment[row] == seg)).nonzero().flatten()
            safe, loose = indices[:protect], indices[protect:]
            want += [([int(p)], t.x[row, p], t.pos[row, p], float(before[row, p]), int(seg)) for p in safe]
            goal = max(1, int(len(loose) * keep + 0.5))
            for members, x, pos, size in slow_merge(
                t.x[row, loose], t.pos[row, loose], before[row, loose], goal
            ):
                want.append((loose[members].tolist(), x, pos, size, int(seg)))
        assert int(out.valid[row].sum()) == len(want)
        for i, (members, x, pos, size, seg) in enumerate(want):
            assert (merge.indices[row][members] == i).all()
            assert (out.x[row, i] - x).abs().max() < 1e-5 and (out.pos[row, i] - pos).abs().max() < 1e-5
            assert merge.sizes[row, i] == size and out.segment[row, i] == seg and out.modality[row, i] == 1
            assert out.ids[row, i] == (t.ids[row, members[0]] if len(members) == 1 else -1)


def test_eight_tokens_by_hand():
    """ToMe: set A = tokens 0 2 4 6, B = 1 3 5 7; the two most similar pairs merge, the other tokens stay as they are."""
    x = torch.tensor([[1, 0], [0, 1], [1, 0.1], [1, 0.11], [-1, 0], [-1, 0.01], [0, -1], [0.5, -1]]).float()
    t = wt.Tokens(x[None], layout=wt.Layout.simple([8], "bidirectional"))
    out, merge = merge_tokens(t, 2)
    # 2 -> 3 (angles 0.0997 and 0.1096) and 4 -> 5 (0 and 0.01) are nearest
    assert merge.indices[0].tolist() == [0, 1, 2, 2, 3, 3, 4, 5]
    assert torch.allclose(out.x[0, 2], (x[2] + x[3]) / 2) and torch.allclose(out.x[0, 3], (x[4] + x[5]) / 2)
    assert torch.equal(out.x[0, [0, 1, 4, 5]], x[[0, 1, 6, 7]])
    assert out.pos[0, :, 0].tolist() == [0, 1, 2.5, 4.5, 6, 7]
    assert merge.sizes[0].tolist() == [1, 1, 2, 2, 1, 1]


@settings(max_examples=30, deadline=None)
@given(lengths, st.booleans())
def test_merging_identical_tokens_is_lossless(sample, nan_padded, ns, packed):
    """Samples in which every token is repeated once are restored exactly."""
    rows = []
    for i, n in enumerate(ns):
        s = sample(n, i)
        rows.append(s.replace(x=s.x.repeat_interleave(2, 1), **{
            k: getattr(s, k).repeat_interleave(2, 1) for k in ("valid", "pos", "segment", "block", "modality")
        }, layout=wt.Layout.simple([2 * n], "bidirectional")))  # fmt: skip
    t = wt.Tokens.stack(rows)
    t = nan_padded(t.pack(2 * sum(ns)) if packed else t)
    out, merge = merge_tokens(t, keep=0.5)
    assert (merge.sizes[out.valid] == 2).all()
    back = merge.unmerge(nan_padded(out))
    assert torch.equal(back.x[t.valid], t.x[t.valid]) and (back.x[~t.valid] == 0).all()
    assert torch.equal(out.pos[out.valid], torch.cat([s.pos[0, ::2] for s in rows]))
    for name in ("valid", *FIELDS[1:-1]):
        assert torch.equal(getattr(back, name), getattr(t, name))


def test_packed_samples_merge_as_single_ones(sample):
    samples = [sample(n, i) for i, n in enumerate((12, 5, 7, 9))]
    packed = merge_tokens(wt.pack(samples, 20), keep=0.6, protect=1, one_modality=True)[0].split()
    for one, one_sample in zip(packed, samples, strict=True):
        alone = merge_tokens(one_sample, keep=0.6, protect=1)[0]
        assert one.shape == alone.shape
        assert (one.x - alone.x).abs().max() < 1e-6 and (one.pos - alone.pos).abs().max() < 1e-6


def test_two_merges_are_undone_in_reverse_order(sample):
    t = sample(16)
    first, a = merge_tokens(t, 4)
    second, b = merge_tokens(first, 4, sizes=a.sizes)
    assert second.shape[1] == 8 and b.sizes.sum() == 16
    # a merged token is the mean of all original tokens that it holds
    where = b.indices[0][a.indices[0]]
    for i in range(8):
        assert (second.x[0, i] - t.x[0][where == i].mean(0)).abs().max() < 1e-5
    assert torch.equal(a.unmerge(b.unmerge(second)).x[0], second.x[0][where])


def test_tokens_of_other_blocks_modalities_or_samples_do_not_merge():
    """Tokens with equal embeddings but another block, modality or sample never merge."""
    image = wt.Tokens(
        torch.ones(1, 6, DIM), modality=torch.full((1, 6), 1), layout=wt.Layout.simple([6], "bidirectional")
    )
    audio = image.replace(modality=torch.full((1, 6), 2))
    text = wt.Tokens(
        torch.ones(1, 5, DIM), modality=torch.zeros(1, 5), layout=wt.Layout.simple([5], "causal")
    ).causal()
    mixed, merge = merge_tokens(wt.Tokens.cat(image, audio), keep=0.1)
    assert mixed.modality.tolist() == [[1, 2]] and merge.sizes.tolist() == [[6, 6]]
    prefix = wt.Tokens.cat(image, text, sequential=True)
    out, merge = merge_tokens(prefix, keep=0.5)
    assert merge.sizes.tolist() == [[4, 1, 1, 1, 1, 1, 1, 1]]  # all three pairs agree on one partner
    assert out.block.tolist() == [[0, 0, 0, 1, 2, 3, 4, 5]] and out.modality.tolist() == [[1] * 3 + [0] * 5]
    packed = wt.pack([image, image], 12)
    out, merge = merge_tokens(packed, keep=0.1)
    assert out.segment.tolist() == [[0, 1]] and out.layout.lengths == ((1, 1),)
    with pytest.raises(wt.InputError, match="their own block number"):
        merge_tokens(text, 1)


def test_interleaved_samples_are_sorted_and_restored(interleaved):
    t = interleaved
    out, merge = merge_tokens(t, keep=0.1)
    assert merge.sizes.tolist() == [[4, 3]]
    want = torch.stack([t.x[0, [1, 3, 5, 8]].mean(0), t.x[0, [0, 4, 6]].mean(0)])
    assert (out.x[0] - want).abs().max() < 1e-6
    back = merge.unmerge(out)
    assert torch.equal(back.x[0, 4], out.x[0, 1]) and torch.equal(back.x[0, 8], out.x[0, 0])


def test_similarity_of_other_features(sample):
    """Similarity may be computed on `features` instead of x."""
    t = sample(6)
    features = torch.tensor([[[1.0, 0], [0, 1], [0, 1.01], [1, 0.01], [5, 5], [-1, -1]]])
    _, merge = merge_tokens(t, 2, features=features)
    assert merge.indices[0].tolist() == [1, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("ns", [(8, 8), (8, 3)])
def test_no_device_synchronisation(sample, ns):
    """Tensors without data (device meta) raise when a value is read; shapes follow from the layout alone."""
    t = wt.Tokens.stack([sample(n, i) for i, n in enumerate(ns)]).to("meta")
    out, merge = merge_tokens(t, keep=0.5, protect=1, one_modality=True)
    assert merge.unmerge(out).shape == t.shape
    assert out.layout.lengths[0] == (5,)  # 1 + half of 7, rounded up


def test_gradients_flow_to_all_merged_tokens(sample):
    t = wt.Tokens.stack([sample(n, i) for i, n in enumerate((8, 5))])
    x = t.x.clone().requires_grad_()
    out, _ = merge_tokens(t.replace(x=x), keep=0.5)
    (grad,) = torch.autograd.grad(out.x.sum(), x)
    assert ((grad > 0) == t.valid[..., None]).all()


def test_half_precision_tokens_are_summed_in_float32():
    """256 tokens of 1.0 and one of 257 average to 2 in bfloat16, whose own sums would stop at 256."""
    x = torch.ones(1, 257, 1)
    x[0, -1] = 258
    t = wt.Tokens(x.bfloat16(), layout=wt.Layout.simple([257], "bidirectional"))
    out, _ = merge_tokens(t, keep=0.001)
    assert out.x.dtype == torch.bfloat16 and abs(out.x.item() - 2) < 0.02


def test_empty_rows_stay_empty(half_empty):
    out = merge_tokens(half_empty, keep=0.5)[0]
    assert out.valid.tolist() == [[True, True], [False, False]] and out.layout.lengths == ((2,), ())
    none = wt.Tokens(torch.zeros(2, 0, DIM), layout=wt.Layout.simple([0, 0], "bidirectional"))
    assert merge_tokens(none, keep=0.5)[0].shape == (2, 0, DIM)


@pytest.mark.parametrize("keep", [0, -1, 1.5, float("nan"), "half", True, None])
def test_ratios_out_of_range(sample, keep):
    with pytest.raises(wt.InputError):
        merge_tokens(sample(4), keep=keep)
    with pytest.raises(wt.InputError):
        merge_tokens(sample(4), -1)
