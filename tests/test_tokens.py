"""Tokens and the one rule of visibility: properties over generated token sets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt

DIM = 16
settings.register_profile("wt", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("wt")


@pytest.fixture(scope="module")
def trunk():
    torch.manual_seed(0)
    return randomised(wt.Transformer(DIM, 2, 2, rope=1)).eval()


def randomised(module):
    """Move every parameter away from its initial value, norms' gains and biases too."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return module


def sample(n, seed, order="bidirectional"):
    g = torch.Generator().manual_seed(seed)
    t = wt.Tokens(torch.randn(1, n, DIM, generator=g), layout=wt.Layout.simple([n], order))
    return t.causal() if order == "causal" else t


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6)
orders = st.sampled_from(["bidirectional", "causal"])


def close(a, b, tol=1e-5):
    assert a.shape == b.shape
    assert a.numel() == 0 or (a - b).abs().max() < tol


@given(lengths, orders)
def test_every_mode_equals_the_dense_mask(trunk, ns, order):
    t = wt.Tokens.stack([sample(n, i, order) for i, n in enumerate(ns)])
    dense = trunk(t.replace(layout=None))
    modes = [None, "groups", "padded" if order == "bidirectional" else "causal"]
    if t.layout.full(t.shape[1]):
        modes.append("full" if order == "bidirectional" else "causal")
    for mode in modes:
        close(trunk(t, mode=mode).x, dense.x)


@given(lengths, orders, st.integers(9, 20))
def test_packed_rows_equal_one_by_one(trunk, ns, order, max_len):
    alone = [sample(n, i, order) for i, n in enumerate(ns)]
    packed = wt.pack(alone, max_len)
    for form in (packed, packed.replace(layout=None)):
        out = trunk(form).replace(layout=packed.layout).unpack()
        for i, one in enumerate(alone):
            close(out.x[i, : ns[i]], trunk(one).x[0])
            assert int(out.valid[i].sum()) == ns[i]


@given(lengths, st.integers(9, 20))
def test_pack_and_unpack_are_the_identity(ns, max_len):
    t = wt.Tokens.stack([sample(n, i) for i, n in enumerate(ns)])
    packed = t.pack(max_len)
    back = packed.unpack()
    assert packed.shape[1] <= max_len
    assert int(packed.valid.sum()) == sum(ns)
    for name in ("x", "valid", "pos", "segment", "block"):
        a, b = getattr(back, name), getattr(t, name)
        for row, n in enumerate(ns):
            assert torch.equal(a[row, :n], b[row, :n]), name


@given(lengths, orders)
def test_padding_content_is_irrelevant(trunk, ns, order):
    t = wt.Tokens.stack([sample(n, i, order) for i, n in enumerate(ns)])
    padding = ~t.valid[..., None]
    dirty = t.replace(x=t.x.masked_fill(padding, torch.nan), pos=t.pos.masked_fill(padding, torch.nan))
    for layout in (t.layout, None):
        x = dirty.x.detach().requires_grad_()
        d = dirty.replace(x=x, valid=t.valid, layout=layout)
        out = trunk(d)
        close(out.x, trunk(t).x)
        close(d.replace(x=out.x).pool("mean"), trunk(t).pool("mean"))
        (grad,) = torch.autograd.grad(out.x.square().sum(), x)
        assert grad.isfinite().all()
        assert (grad[~t.valid] == 0).all()


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), orders)
def test_other_samples_of_the_batch_are_irrelevant(trunk, ns, order):
    same = sample(ns[0], 100, order)
    a = wt.Tokens.stack([same] + [sample(n, i, order) for i, n in enumerate(ns[1:])])
    b = wt.Tokens.stack([same] + [sample(n, 50 + i, order) for i, n in enumerate(ns[1:])])
    close(trunk(a).x[0], trunk(b).x[0])
    close(trunk(a).x[0, : ns[0]], trunk(same).x[0])


@st.composite
def rows(draw):
    n = draw(st.integers(2, 8))
    field = st.lists(st.integers(0, 3), min_size=n, max_size=n)
    return (
        draw(field),
        draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
        draw(st.lists(st.booleans(), min_size=n, max_size=n)),
    )


@given(rows())
def test_gradients_flow_exactly_where_the_rule_says(trunk, row):
    block, segment, valid = (torch.tensor([v]) for v in row)
    n = block.shape[1]
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1, n, DIM, generator=g, requires_grad=True)
    t = wt.Tokens(x=x, valid=valid, block=block, segment=segment)
    one_layer = trunk.blocks[:1]  # in one layer a token attends directly or not at all
    from worldtokens.backbone.attention import plan_attention
    from worldtokens.backbone.positions import rope_angles

    plan = plan_attention(t)
    rope = rope_angles(t.pos, trunk.cfg.head_dim, 1)
    h = one_layer[0](x.masked_fill(~t.valid[..., None], 0), plan, rope)
    see = wt.visible(t)[0]
    out = trunk(t).x
    for i in range(n):
        if not valid[0, i]:
            assert (out[0, i] == 0).all()
            continue
        direct = torch.autograd.grad(h[0, i].sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0
        assert torch.equal(direct, see[i]), (i, direct, see[i])
        # through all layers: never a later block, never another segment
        far = torch.autograd.grad(out[0, i].sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0
        wrong = (segment[0] != segment[0, i]) | (block[0] > block[0, i]) | ~valid[0]
        assert not (far & wrong).any()


@pytest.mark.parametrize("layout", [None, wt.Layout.simple([0, 0, 3], "bidirectional")])
def test_a_row_without_valid_tokens_gives_zeros(trunk, layout):
    x = torch.randn(3, 3, DIM).requires_grad_()
    valid = torch.tensor([[False] * 3, [False] * 3, [True] * 3])
    out = trunk(wt.Tokens(x=x, valid=valid, layout=layout))
    assert (out.x[:2] == 0).all()
    for how in ("mean", "first", "last"):
        pooled = out.pool(how)
        assert (pooled[:2] == 0).all() and (pooled[2] != 0).any()
    out.x.sum().backward()
    assert x.grad.isfinite().all()


@given(st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_cat_keeps_order_and_is_associative(ns):
    a, b, c = (sample(n, i, "causal") for i, n in enumerate(ns))
    for sequential in (False, True):
        left = wt.Tokens.cat(wt.Tokens.cat(a, b, sequential=sequential), c, sequential=sequential)
        right = wt.Tokens.cat(a, wt.Tokens.cat(b, c, sequential=sequential), sequential=sequential)
        flat = wt.Tokens.cat(a, b, c, sequential=sequential)
        for t in (left, right):
            for name in ("x", "valid", "pos", "segment", "block", "modality"):
                assert torch.equal(getattr(t, name), getattr(flat, name)), (sequential, name)
    assert torch.equal(flat.x, torch.cat([a.x, b.x, c.x], 1))
    assert flat.block[0].tolist() == list(range(sum(ns)))
    assert flat.pos[0, :, 0].tolist() == list(range(sum(ns)))


def test_cat_sequential_makes_a_prefix(trunk):
    """An image's tokens attend to each other; the text after it is causal and hidden from the image."""
    image, text = sample(4, 0), sample(3, 1, "causal")
    t = wt.Tokens.cat(image, text, sequential=True)
    assert t.block[0].tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert t.layout.order == "any"
    close(trunk(t).x, trunk(t.replace(layout=None)).x)
    close(trunk(t).x[:, :4], trunk(image).x)


def test_cat_after_padding_equals_cat_without(trunk):
    a = wt.Tokens.stack([sample(4, 0), sample(2, 1)])
    b = wt.Tokens.stack([sample(3, 2), sample(3, 3)])
    t = wt.Tokens.cat(a, b)
    assert t.layout is None  # padding in the middle of a row: the dense mask is used
    short = wt.Tokens.cat(sample(2, 1), sample(3, 3))
    # t restarts in each part, so positions are the same with and without the padding between
    close(trunk(t).x[1][t.valid[1]], trunk(short).x[0])


def test_infer_layout_finds_the_layout():
    packed = wt.pack([sample(n, n) for n in (3, 2, 5)], 6)
    again = packed.replace(layout=None).infer_layout()
    assert again.layout.lengths == packed.layout.lengths
    assert again.layout.order == "bidirectional"
    causal = wt.Tokens.stack([sample(3, 0, "causal"), sample(5, 1, "causal")])
    assert causal.replace(layout=None).infer_layout().layout.order == "causal"
    gap = wt.Tokens(torch.zeros(1, 3, DIM), valid=torch.tensor([[True, False, True]]))
    assert gap.infer_layout().layout is None


def test_pool_by_hand():
    x = torch.tensor([[[1.0], [2.0], [9.0]], [[4.0], [9.0], [9.0]]])
    valid = torch.tensor([[True, True, False], [True, False, False]])
    t = wt.Tokens(x=x, valid=valid)
    assert t.pool("mean").tolist() == [[1.5], [4.0]]
    assert t.pool("first").tolist() == [[1.0], [4.0]]
    assert t.pool("last").tolist() == [[2.0], [4.0]]
    two = t.replace(
        valid=torch.ones_like(valid), segment=torch.tensor([[0, 0, 1], [0, 1, 1]], dtype=torch.int32)
    )
    assert two.pool("mean").tolist() == [[1.5], [9.0], [4.0], [9.0]]
    left = t.replace(valid=valid.flip(1))  # padding on the left
    assert left.pool("first").tolist() == [[2.0], [9.0]]


def test_pool_of_packed_rows_keeps_the_order():
    items = [sample(n, n) for n in (5, 1, 4, 2, 3)]
    pooled = wt.pack(items, 6).pool("mean")
    close(pooled, torch.stack([t.x[0].mean(0) for t in items]))


def test_select_takes_one_modality():
    image, text = wt.modality_id("image"), wt.modality_id("text")
    mod = torch.tensor([[image, text, image], [text, text, image]], dtype=torch.int16)
    x = torch.arange(6.0).view(2, 3, 1)
    t = wt.Tokens(x=x, modality=mod)
    got = t.select("image")
    assert got.valid.tolist() == [[True, True], [True, False]]
    assert got.x[got.valid].flatten().tolist() == [0.0, 2.0, 5.0]
    assert got.pos[0, :, 0].tolist() == [0.0, 2.0]
    assert t.select("audio").shape == (2, 0, 1)


def test_a_new_modality_needs_no_registry():
    assert wt.modality_id("midi") == wt.modality_id("midi") > 63
    assert wt.modality_id("midi") != wt.modality_id("lidar")
    assert wt.modality_id("midi") < 2**15


def test_stack_pads_and_checks_width():
    t = wt.Tokens.stack([sample(2, 0), sample(5, 1)])
    assert t.shape == (2, 5, DIM)
    assert t.valid.sum(1).tolist() == [2, 5]
    with pytest.raises(ValueError, match="widths differ"):
        wt.Tokens.stack([sample(2, 0), wt.Tokens(torch.zeros(1, 2, DIM + 1))])


def test_ids_survive_joining():
    a = sample(2, 0).replace(ids=torch.tensor([[7, 8]]))
    b = sample(3, 1)
    assert wt.Tokens.cat(a, b).ids.tolist() == [[7, 8, -1, -1, -1]]
    assert wt.pack([a, b], 5).ids.tolist() == [[7, 8, -1, -1, -1]]


def test_a_sample_longer_than_a_row_raises():
    with pytest.raises(wt.InputError, match="sample 1 has 9 tokens and a packed row holds 8"):
        wt.pack([sample(3, 0), sample(9, 1)], 8)


def test_a_mask_that_is_not_bool_raises():
    with pytest.raises(ValueError, match="True = a real token"):
        wt.Tokens(torch.zeros(1, 2, 4), valid=torch.ones(1, 2))
    with pytest.raises(ValueError, match="expected \\(B, N, D\\)"):
        wt.Tokens(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="segment has shape"):
        wt.Tokens(torch.zeros(1, 2, 4), segment=torch.zeros(1, 3))


def test_to_changes_the_dtype_of_embeddings_only():
    t = sample(3, 0).replace(ids=torch.tensor([[1, 2, 3]])).to(torch.bfloat16)
    assert t.x.dtype == torch.bfloat16
    assert t.pos.dtype == torch.float32
    assert t.ids.dtype == torch.int64
    assert t.valid.dtype == torch.bool


def test_windows_and_cross_attention_by_hand():
    t = sample(5, 0, "causal")
    see = wt.visible(t, window=2)[0]
    assert see.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    key = wt.Tokens(torch.zeros(1, 3, DIM), valid=torch.tensor([[True, False, True]]))
    assert wt.visible(t, key)[0].int().tolist() == [[1, 0, 1]] * 5


@given(lengths, st.integers(1, 4))
def test_a_sliding_window_equals_the_dense_mask(ns, window):
    torch.manual_seed(2)
    trunk = randomised(wt.Transformer(DIM, 1, 2, window=window)).eval()
    for order in ("causal", "bidirectional"):
        t = wt.Tokens.stack([sample(n, i, order) for i, n in enumerate(ns)])
        close(trunk(t).x, trunk(t.replace(layout=None)).x)
