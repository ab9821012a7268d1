"""Token masking: against a plain slow implementation, and the properties that every Transformer relies on."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt
from worldtokens.tokenizers.reduce.masking import mask_tokens

DIM = 8
FIELDS = ("x", "pos", "segment", "block", "modality", "ids")
lengths = st.lists(st.integers(1, 12), min_size=1, max_size=5)
ratios = st.sampled_from([0.1, 0.25, 0.4, 0.5, 0.75, 1.0])


@settings(max_examples=60, deadline=None)
@given(lengths, ratios, st.integers(0, 2), st.booleans(), st.integers(0, 2))
def test_kept_tokens_are_a_subset_in_order(sample, forms, ns, keep, protect, packed, form):
    t = wt.Tokens.stack([sample(n, i, ids=True) for i, n in enumerate(ns)])
    t = forms(t.pack(sum(ns)) if packed else t)[form]
    noise = torch.rand(t.shape[:2], generator=torch.Generator().manual_seed(sum(ns)))
    kept, mask = mask_tokens(t, keep, protect=protect, noise=noise)
    assert kept.shape[1] == int(kept.valid.sum(1).max())
    assert kept.infer_layout().layout.lengths == kept.layout.lengths
    for row in range(len(t)):
        want = []
        for seg in t.segment[row][t.valid[row]].unique():  # the slow way, sample by sample
            indices = (t.valid[row] & (t.segment[row] == seg)).nonzero().flatten().tolist()
            safe, loose = indices[:protect], indices[protect:]
            count = max(len(safe) + int(len(loose) * keep + 0.5), 1) - len(safe)
            want += sorted(safe + sorted(loose, key=lambda p: noise[row, p].item())[:count])
        mine = kept.valid[row]
        assert mask.indices[row][mine].tolist() == want
        assert mask.kept[row].nonzero().flatten().tolist() == want
        for name in FIELDS:
            assert torch.equal(getattr(kept, name)[row][mine], getattr(t, name)[row][want])
    assert torch.equal(mask.masked, t.valid & ~mask.kept)


@settings(max_examples=30, deadline=None)
@given(lengths, ratios, st.booleans())
def test_unmask_restores_kept_tokens_and_fills_the_others(sample, nan_padded, ns, keep, packed):
    t = wt.Tokens.stack([sample(n, i) for i, n in enumerate(ns)])
    t = nan_padded(t.pack(sum(ns)) if packed else t)
    kept, mask = mask_tokens(t, keep)
    fill = torch.full((DIM,), 7.0)
    back = mask.unmask(nan_padded(kept), fill)
    assert torch.equal(back.x[mask.kept], t.x[mask.kept])
    assert (back.x[mask.masked] == 7).all() and (back.x[~t.valid] == 0).all()
    for name in ("valid", *FIELDS[1:-1]):
        assert torch.equal(getattr(back, name), getattr(t, name))
    assert back.layout == t.layout
    wide = mask.unmask(kept.replace(x=torch.ones(*kept.shape[:2], 3)), torch.zeros(3))
    assert wide.dim == 3 and int(wide.x.sum()) == 3 * int(mask.kept.sum())


def test_counts_equal_mae_and_every_token_is_kept_equally_often():
    """25 % of 196 patches are 49, as in MAE; every token is kept equally often, within 4 sigma."""
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


def test_the_generator_determines_the_mask(sample):
    t = sample(40)
    a, b, c = (mask_tokens(t, 0.5, torch.Generator().manual_seed(s))[1].indices for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("order", ["bidirectional", "causal"])
def test_a_transformer_attends_to_kept_tokens_only(sample, nan_padded, order):
    """Masked rows give what each sample's kept tokens give alone; the fast path equals the dense mask."""
    torch.manual_seed(0)
    trunk = wt.Transformer(DIM, 2, 2, rope=1).eval()
    t = nan_padded(wt.Tokens.stack([sample(n, i, order) for i, n in enumerate((9, 4, 6))]))
    kept, _ = mask_tokens(t, 0.5, torch.Generator().manual_seed(0))
    out = trunk(nan_padded(kept))
    dense = trunk(dataclasses.replace(kept, layout=None))
    assert (out.x - dense.x)[kept.valid].abs().max() < 1e-5
    for row in range(3):
        alone = wt.Tokens(
            kept.x[row : row + 1, kept.valid[row]], pos=kept.pos[row : row + 1, kept.valid[row]]
        )
        alone = alone.causal() if order == "causal" else alone
        assert (trunk(alone).x[0] - out.x[row][kept.valid[row]]).abs().max() < 1e-5


def test_interleaved_samples_are_sorted_and_restored(interleaved):
    t = interleaved
    kept, mask = mask_tokens(t, 0.5, noise=torch.arange(9)[None] * 1.0)
    assert mask.indices.tolist() == [[1, 3, 0, 4]] and kept.segment.tolist() == [[0, 0, 1, 1]]
    back = mask.unmask(kept, torch.zeros(DIM))
    assert torch.equal(back.x[mask.kept], t.x[mask.kept]) and torch.equal(back.segment, t.segment)


@pytest.mark.parametrize("ns", [(8, 8), (8, 3)])
def test_no_device_synchronisation(sample, ns):
    """Tensors without data (device meta) raise when a value is read; shapes follow from the layout alone."""
    t = wt.Tokens.stack([sample(n, i) for i, n in enumerate(ns)]).to("meta")
    kept, mask = mask_tokens(t, 0.5, protect=1)
    assert mask.unmask(kept, torch.zeros(DIM, device="meta")).shape == t.shape
    assert kept.layout.lengths[0] == (5,)  # 1 + half of 7, rounded up


def test_gradients_flow_to_kept_tokens_only(sample):
    t = wt.Tokens.stack([sample(n, i) for i, n in enumerate((8, 5))])
    x = t.x.clone().requires_grad_()
    kept, mask = mask_tokens(t.replace(x=x), 0.5)
    (grad,) = torch.autograd.grad(kept.x.masked_fill(~kept.valid[..., None], 0).sum(), x)
    assert torch.equal(grad != 0, mask.kept[..., None].expand_as(grad))


def test_empty_rows_stay_empty(half_empty):
    out = mask_tokens(half_empty, 0.5)[0]
    assert out.valid.tolist() == [[True, True], [False, False]] and out.layout.lengths == ((2,), ())
    none = wt.Tokens(torch.zeros(2, 0, DIM), layout=wt.Layout.simple([0, 0], "bidirectional"))
    assert mask_tokens(none, 0.5)[0].shape == (2, 0, DIM)


@pytest.mark.parametrize("keep", [0, -1, 1.5, float("nan"), "half", True, None])
def test_ratios_out_of_range(sample, keep):
    with pytest.raises(wt.InputError):
        mask_tokens(sample(4), keep)
    with pytest.raises(wt.InputError, match="one number for each token"):
        mask_tokens(sample(4), 0.5, noise=torch.zeros(1, 3))
