"""Cross-attention: parity with torch's decoder, all attention modes, missing contexts, attention maps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import worldtokens as wt
from worldtokens.backbone.attention import plan_attention

DIM, WIDE, HEADS = 16, 24, 2
settings.register_profile("wt", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("wt")


def randomised(module, seed=0):
    """Every parameter away from its initial value, norms' gains and biases too."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.2)
    return module


def sample(n, seed, order="bidirectional", dim=DIM):
    g = torch.Generator().manual_seed(seed)
    t = wt.Tokens(torch.randn(1, n, dim, generator=g), layout=wt.Layout.simple([n], order))
    return t.causal() if order == "causal" else t


def batch(lengths, seed=0, order="bidirectional", dim=DIM):
    return wt.Tokens.stack([sample(n, seed + i, order, dim) for i, n in enumerate(lengths)])


def close(a, b, tol=1e-5):
    assert a.shape == b.shape
    assert a.numel() == 0 or (a - b).abs().max() < tol


def copy_linear(ours, weight, bias):
    with torch.no_grad():
        ours.weight.copy_(weight)
        ours.bias.copy_(bias)


def copy_layer(ref, block):
    """torch's encoder or decoder layer -> ours."""
    last = "norm2" if block.cross is None else "norm3"
    pairs = [
        ("norm1", block.norm1),
        (last, block.norm2),
        ("linear1", block.mlp.fc1),
        ("linear2", block.mlp.fc2),
    ]
    copy_linear(block.attn.qkv, ref.self_attn.in_proj_weight, ref.self_attn.in_proj_bias)
    copy_linear(block.attn.proj, ref.self_attn.out_proj.weight, ref.self_attn.out_proj.bias)
    if block.cross is not None:
        pairs.append(("norm2", block.norm_cross))
        mha, d = ref.multihead_attn, DIM
        copy_linear(block.cross.q, mha.in_proj_weight[:d], mha.in_proj_bias[:d])
        copy_linear(block.cross.kv, mha.in_proj_weight[d:], mha.in_proj_bias[d:])
        copy_linear(block.cross.proj, mha.out_proj.weight, mha.out_proj.bias)
    for name, ours in pairs:
        layer = getattr(ref, name)
        copy_linear(ours, layer.weight, layer.bias)


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("order", ["bidirectional", "causal"])
def test_encoder_and_decoder_equal_torchs_transformer(pre_norm, order):
    """Encoder and decoder, padding on both sides: max abs difference below 1e-5, gradients too."""
    torch.manual_seed(0)
    ref = nn.Transformer(
        DIM, HEADS, 2, 2, 64, dropout=0.0, activation="gelu", norm_first=pre_norm, batch_first=True
    )
    randomised(ref)
    settings = {"config": {"mlp_dim": 64, "pre_norm": pre_norm, "final_norm": True}}
    encoder = wt.Transformer(DIM, 2, HEADS, **settings)
    decoder = wt.Transformer(DIM, 2, HEADS, cross=True, **settings)
    for theirs, ours in ((ref.encoder, encoder), (ref.decoder, decoder)):
        for layer, block in zip(theirs.layers, ours.blocks, strict=True):
            copy_layer(layer, block)
        copy_linear(ours.norm, theirs.norm.weight, theirs.norm.bias)
    source, target = batch((6, 3, 5)), batch((4, 7, 2), 10, order)
    n = target.shape[1]
    future = torch.ones(n, n).triu(1).bool() if order == "causal" else None
    weight = torch.randn(target.shape)
    want, got = [], []
    for way, out in (("theirs", want), ("ours", got), ("dense", got)):
        a, b = source.x.clone().requires_grad_(), target.x.clone().requires_grad_()
        if way == "theirs":
            pads = {"src_key_padding_mask": ~source.valid, "memory_key_padding_mask": ~source.valid}
            x = ref(a, b, tgt_mask=future, tgt_key_padding_mask=~target.valid, **pads)
            x = x.masked_fill(~target.valid[..., None], 0)
        else:
            mode = None if way == "ours" else "dense"
            x = decoder(target.replace(x=b), context=encoder(source.replace(x=a), mode=mode), mode=mode).x
        out.append((x, *torch.autograd.grad((x * weight).sum(), (a, b))))
    for ours in got:
        close(want[0][0], ours[0])
        for mine, theirs in zip(ours[1:], want[0][1:], strict=True):
            assert (mine - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.fixture(scope="module")
def trunk():
    torch.manual_seed(0)
    return randomised(
        wt.Transformer(DIM, 2, HEADS, rope=1, cross=True, context_dim=WIDE, config={"layer_scale": 0.7})
    ).eval()


def run(trunk, tokens, context, mode=None):
    """Output, and the gradients of its squared sum for tokens, context and all weights."""
    x, c = tokens.x.detach().requires_grad_(), context.x.detach().requires_grad_()
    out = trunk(tokens.replace(x=x), context=context.replace(x=c), mode=mode).x
    wanted = (x, c, *trunk.parameters())
    grads = torch.autograd.grad(out.square().sum(), wanted, materialize_grads=True)
    return out, grads


def same(a, b):
    close(a[0], b[0])
    for g, h in zip(a[1], b[1], strict=True):
        assert g.isfinite().all()
        assert g.numel() == 0 or (g - h).abs().max() < 1e-4 * max(1.0, float(h.abs().max()))


pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=5)
orders = st.sampled_from(["bidirectional", "causal", "any"])


@given(pairs, orders)
def test_every_mode_equals_the_dense_mask(trunk, ns, order):
    tokens, context = batch([n for n, _ in ns], 0, order), batch([m for _, m in ns], 50, dim=WIDE)
    if order == "any" and tokens.shape[1]:
        block = (torch.arange(tokens.shape[1]) // 2).expand(tokens.shape[:2])
        tokens = tokens.replace(block=block, layout=tokens.layout)
    blank = tokens.replace(layout=None), context.replace(layout=None)
    dense = run(trunk, *blank)
    modes = [None, "groups"]
    if order == "bidirectional":
        modes.append("padded")
    for mode in modes:
        if mode == "padded" and not context.shape[1]:
            continue
        same(run(trunk, tokens, context, mode), dense)
    same(run(trunk, tokens, blank[1]), dense)
    same(run(trunk, blank[0], context), dense)


@given(pairs, st.sampled_from(["bidirectional", "causal"]), st.randoms())
def test_packed_rows_attend_to_their_own_context(trunk, ns, order, random):
    """Samples packed on both sides, with segments in another order, equal single samples."""
    ns = [(n + 1, m) for n, m in ns]
    queries = [sample(n, i, order) for i, (n, _) in enumerate(ns)]
    sources = [sample(m, 50 + i, dim=WIDE) for i, (_, m) in enumerate(ns)]
    packed = wt.pack(queries, sum(n for n, _ in ns))
    assert len(packed) == 1
    order_of = list(range(len(ns)))
    random.shuffle(order_of)
    row = wt.Tokens.cat([sources[i] for i in order_of])
    segment = torch.cat([torch.full((1, ns[i][1]), i) for i in order_of], 1)
    lengths = (tuple(ns[i][1] for i in order_of if ns[i][1]),)
    row = row.replace(segment=segment, layout=wt.Layout(lengths, "bidirectional"))
    dense = trunk(packed.replace(layout=None), context=row.replace(layout=None))
    fast = trunk(packed, context=row)
    close(fast.x, dense.x)
    for got, one, source in zip(fast.unpack().split(), queries, sources, strict=True):
        close(got.x, trunk(one, context=source).x)


@given(pairs)
def test_padding_content_of_either_side_is_irrelevant(trunk, ns):
    tokens, context = batch([n for n, _ in ns]), batch([m for _, m in ns], 50, dim=WIDE)
    dirty = []
    for t in (tokens, context):
        hole = ~t.valid[..., None]
        x, pos = t.x.masked_fill(hole, torch.nan), t.pos.masked_fill(hole, torch.nan)
        dirty.append(t.replace(x=x, pos=pos))
    for strip in (False, True):
        clean, foul = (
            [t.replace(layout=None) if strip else t for t in ts] for ts in ((tokens, context), dirty)
        )
        same(run(trunk, *foul), run(trunk, *clean))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("mode", [None, "padded", "dense"])
def test_a_row_without_visible_context_gets_zeros(trunk, known, mode):
    """An empty context, another segment, no tokens: the block equals one without cross-attention."""
    tokens = batch((3, 3))
    empty = batch((2, 0), 50, dim=WIDE)
    other = batch((2, 2), 50, dim=WIDE)
    other = other.replace(segment=torch.tensor([[0, 0], [7, 7]]), layout=other.layout)
    none = wt.Tokens(torch.zeros(2, 0, WIDE), layout=wt.Layout.simple([0, 0], "bidirectional"))
    block = trunk.blocks[0]
    one_row = batch((2,), 50, dim=WIDE)
    for context, readable in ((empty, True), (other, True), (none, False)):
        if mode == "padded" and not readable:
            continue
        t, c = (tokens, context) if known else (tokens.replace(layout=None), context.replace(layout=None))
        out, grads = run(trunk, t, c, mode)
        assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
        assert (grads[1][1] == 0).all()
        if readable:
            close(out[:1], trunk(tokens[:1], context=one_row).x)
        plan = plan_attention(t, mode=mode, context=c)
        x, keys = plan.unpad(t.x), plan.cross.unpad(c.x)
        got = plan.pad(block.cross(x, keys, plan.cross))
        assert (got[1] == 0).all() and bool((got[0] != 0).all()) == readable


def test_the_contexts_block_is_ignored(trunk):
    tokens, context = batch((3,), order="causal"), batch((4,), 50, dim=WIDE)
    late = context.replace(block=torch.full((1, 4), 99), layout=context.layout)
    close(trunk(tokens, context=context).x, trunk(tokens, context=late).x, 1e-7)
    moved = context.replace(x=context.x + torch.tensor([0.0, 0, 0, 1])[None, :, None])
    assert ((trunk(tokens, context=context).x - trunk(tokens, context=moved).x).abs().amax(-1) > 1e-3).all()


def test_modes_are_chosen_from_the_layout(trunk):
    whole, ragged = batch((3, 3)), batch((2, 3))
    context, short = batch((4, 4), dim=WIDE), batch((4, 2), dim=WIDE)
    modes = lambda t, c: (lambda r: (r.mode, r.cross.mode))(plan_attention(t, context=c))  # noqa: E731
    assert modes(whole, context) == ("full", "full")
    assert modes(ragged, context) == modes(whole, short) == ("groups", "groups")
    assert modes(ragged.replace(layout=None), context) == ("dense", "dense")
    assert plan_attention(whole, context=context).cross.mask is None
    plan = plan_attention(batch((2, 3, 2, 2)), context=batch((1, 1, 2, 1), dim=WIDE))
    assert plan.groups == ((3, 2), (1, 3))
    assert plan.cross.groups == ((2, 2), (1, 2), (1, 3)) and plan.cross.group_keys == (1, 2, 1)


@pytest.mark.parametrize(
    "options", [{"kv_heads": 1, "qk_norm": True}, {"norm": "rms", "config": {"bias": False}}]
)
def test_cross_attention_equals_the_plain_formula(options):
    """Head by head in a loop, grouped heads and norms of queries and keys included."""
    torch.manual_seed(0)
    cross = randomised(wt.Transformer(DIM, 1, HEADS, cross=True, context_dim=WIDE, **options)).blocks[0].cross
    tokens, context = batch((4, 3)), batch((2, 5), 50, dim=WIDE)
    plan = plan_attention(tokens, mode="dense", context=context)
    got = cross(tokens.x, context.x, plan.cross)
    e, kv = cross.head_dim, cross.kv_heads
    heads = []
    for h in range(HEADS):
        j = h * kv // HEADS
        q = cross.q_norm(cross.q(tokens.x)[..., h * e : (h + 1) * e])
        both = cross.kv(context.x)
        k = cross.k_norm(both[..., j * e : (j + 1) * e])
        v = both[..., (kv + j) * e : (kv + j + 1) * e]
        score = (q @ k.transpose(1, 2) / e**0.5).masked_fill(~wt.visible(tokens, context), -torch.inf)
        heads.append(score.softmax(-1) @ v)
    close(got, cross.proj(torch.cat(heads, -1)))


def test_gradients_reach_every_weight_with_and_without_checkpointing():
    torch.manual_seed(0)
    trunks = [
        wt.Transformer(DIM, 2, HEADS, cross=True, config={"gradient_checkpointing": c}) for c in (False, True)
    ]
    trunks[1].load_state_dict(trunks[0].state_dict())
    for t in trunks:
        t.train()(batch((3, 5), order="causal"), context=batch((4, 2), 50)).x.square().sum().backward()
    for a, b in zip(*(t.parameters() for t in trunks), strict=True):
        assert a.grad.isfinite().all() and torch.equal(a.grad, b.grad)
    assert all(bool((p.grad != 0).any()) for p in trunks[0].parameters())


def test_save_and_load(tmp_path, trunk):
    trunk.save(tmp_path)
    again = wt.load(tmp_path)
    tokens, context = batch((3, 5)), batch((4, 2), 50, dim=WIDE)
    assert torch.equal(again(tokens, context=context).x, trunk(tokens, context=context).x)


def test_errors_name_the_remedy(trunk):
    tokens, context = batch((3,)), batch((2,), dim=WIDE)
    with pytest.raises(ValueError, match="got no context"):
        trunk(tokens)
    with pytest.raises(ValueError, match="build it with cross=True"):
        wt.Transformer(DIM, 1, HEADS)(tokens, context=context)
    with pytest.raises(ValueError, match="context_dim=16"):
        trunk(tokens, context=batch((2,)))
    with pytest.raises(ValueError, match="1 rows and the context 2"):
        trunk(tokens, context=batch((2, 2), dim=WIDE))
    with pytest.raises(ValueError, match="set cross=True"):
        wt.Transformer(DIM, 1, HEADS, context_dim=8)
    with pytest.raises(ValueError, match="expected one of full"):
        trunk(tokens, context=context, mode="fast")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("options", [{}, {"kv_heads": 1, "qk_norm": True, "window": 2, "rope": 1}])
def test_attention_maps_are_the_plain_formula(known, options):
    """Recorded weights times values give the block's output in every attention mode."""
    torch.manual_seed(0)
    trunk = randomised(wt.Transformer(DIM, 1, HEADS, cross=True, context_dim=WIDE, **options)).eval()
    tokens, context = batch((4, 2, 3), order="causal"), batch((2, 5, 0), 50, dim=WIDE)
    given = (tokens, context) if known else (tokens.replace(layout=None), context.replace(layout=None))
    seen = {}
    block = trunk.blocks[0]
    handles = [
        part.register_forward_hook(lambda m, a, out, name=name: seen.update({name: (a[0], a[2], out)}))
        for name, part in (("own", block.attn), ("cross", block.cross))
    ]
    with wt.attention_maps(trunk) as maps:
        out = trunk(given[0], context=given[1])
        assert torch.equal(out.x, trunk(given[0], context=given[1]).x)
    plan = plan_attention(given[0], trunk.cfg.window, context=given[1])
    own, cross = maps.self_attention[0], maps.cross[0]
    assert own.shape == (3, HEADS, 4, 4) and cross.shape == (3, HEADS, 4, 5)
    x = plan.pad(seen["own"][0])
    v = block.attn.queries_keys_values(x, None)[2].repeat_interleave(HEADS // block.attn.kv_heads, 2)
    got = block.attn.proj(torch.einsum("bhnk,bkhe->bnhe", own, v).flatten(2))
    close(got[tokens.valid], plan.pad(seen["own"][2])[tokens.valid])
    v = block.cross.keys_values(context.x)[1].repeat_interleave(HEADS // block.cross.kv_heads, 2)
    got = block.cross.proj(torch.einsum("bhnk,bkhe->bnhe", cross, v).flatten(2))
    attending = tokens.valid & context.valid.any(1, keepdim=True)
    close(got[attending], plan.pad(seen["cross"][2])[attending])
    # zeros exactly where the rule hides the key, and each token's weights sum to 1
    for weights, rule in (
        (own, wt.visible(tokens, window=trunk.cfg.window)),
        (cross, wt.visible(tokens, context)),
    ):
        rule = rule & tokens.valid[..., None]
        assert torch.equal(weights > 0, rule[:, None].expand_as(weights))
        close(weights.sum(-1), rule.any(-1)[:, None].expand(-1, HEADS, -1).float())
    for h in handles:
        h.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trunk.modules())


def test_a_text_tokens_map_over_an_image_peaks_at_the_matching_patch():
    trunk = wt.Transformer(DIM, 1, 1, cross=True)
    cross = trunk.blocks[0].cross
    with torch.no_grad():
        for layer in (trunk.blocks[0].attn.proj, trunk.blocks[0].mlp.fc2, cross.proj):
            layer.weight.zero_()
        cross.q.weight.copy_(torch.eye(DIM))
        cross.kv.weight.copy_(torch.eye(DIM).repeat(2, 1))
    image = batch((9, 9), 50)
    image = image.replace(x=nn.functional.layer_norm(image.x, (DIM,)))
    patches = torch.tensor([[3, 0, 8], [1, 1, 5]])
    text = wt.Tokens(image.x.gather(1, patches[..., None].expand(-1, -1, DIM)))
    with wt.attention_maps(trunk) as maps:
        trunk(text, context=image)
    assert torch.equal(maps.cross[0][:, 0].argmax(-1), patches)


def test_maps_of_cached_steps(trunk):
    tokens, context = batch((3, 2), order="causal"), batch((2, 4), 50, dim=WIDE)
    longer = wt.Tokens.cat(tokens, batch((1, 1), 90, "causal"), sequential=True)
    with torch.no_grad(), wt.attention_maps(trunk) as maps:
        trunk(longer, context=context)
        at_once = [[m[:, :, -1:] for m in side] for side in (maps.self_attention, maps.cross)]
        cache = trunk.cache(batch=2)
        trunk(tokens, context=context, cache=cache)
        trunk(cache.offset(batch((1, 1), 90, "causal")), cache=cache)
        for want, got in zip(at_once, (maps.self_attention, maps.cross), strict=True):
            assert len(got) == 2
            for a, b in zip(want, got, strict=True):
                close(a, b)
