"""The trunk against torch's own layers, and what its options promise."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import worldtokens as wt

DIM, HEADS = 32, 4
settings.register_profile("wt", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("wt")


def randomise(module):
    """Every parameter away from its initial value: fresh weights hide swapped or missing terms."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.2)
    return module


def tokens(lengths=(7, 4, 5), order="bidirectional", dim=DIM):
    g = torch.Generator().manual_seed(1)
    rows = [
        wt.Tokens(torch.randn(1, n, dim, generator=g), layout=wt.Layout.simple([n], order)) for n in lengths
    ]
    t = wt.Tokens.stack(rows)
    return t.causal() if order == "causal" else t


def copy_layer(ref: nn.TransformerEncoderLayer, block):
    pairs = [
        (block.attn.qkv, (ref.self_attn.in_proj_weight, ref.self_attn.in_proj_bias)),
        (block.attn.proj, (ref.self_attn.out_proj.weight, ref.self_attn.out_proj.bias)),
        (block.mlp.fc1, (ref.linear1.weight, ref.linear1.bias)),
        (block.mlp.fc2, (ref.linear2.weight, ref.linear2.bias)),
        (block.norm1, (ref.norm1.weight, ref.norm1.bias)),
        (block.norm2, (ref.norm2.weight, ref.norm2.bias)),
    ]
    with torch.no_grad():
        for layer, (w, b) in pairs:
            layer.weight.copy_(w)
            layer.bias.copy_(b)


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("order", ["bidirectional", "causal"])
def test_equal_to_torchs_encoder_layer(pre_norm, order):
    """Max abs difference below 1e-5 in fp32 with random gains, biases and padding, output and gradients."""
    torch.manual_seed(0)
    ref = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(
            DIM, HEADS, 64, dropout=0.0, activation="gelu", norm_first=pre_norm, batch_first=True
        ),
        2,
        enable_nested_tensor=False,
    )
    randomise(ref)
    ours = wt.Transformer(DIM, 2, HEADS, hidden=64, pre_norm=pre_norm, final_norm=False)
    for layer, block in zip(ref.layers, ours.blocks, strict=True):
        copy_layer(layer, block)
    t = tokens(order=order)
    n = t.shape[1]
    future = torch.ones(n, n).triu(1).bool() if order == "causal" else None
    a = t.x.clone().requires_grad_()
    b = t.x.clone().requires_grad_()
    want = ref(a, mask=future, src_key_padding_mask=~t.valid).masked_fill(~t.valid[..., None], 0)
    got = ours(t.replace(x=b)).x
    assert (want - got).abs().max() < 1e-5
    weight = torch.randn_like(want)
    (ga,) = torch.autograd.grad((want * weight).sum(), a)
    (gb,) = torch.autograd.grad((got * weight).sum(), b)
    assert (ga - gb).abs().max() < 1e-4 * ga.abs().max()


def plain_attention(attn, x, see, rope):
    """The formula, head by head, in a loop: the slow twin of `Attention`."""
    b, n, _ = x.shape
    h, kv, e = attn.heads, attn.kv_heads, attn.head_dim
    qkv = attn.qkv(x)
    q = qkv[..., : h * e].view(b, n, h, e)
    k = qkv[..., h * e : (h + kv) * e].view(b, n, kv, e)
    v = qkv[..., (h + kv) * e :].view(b, n, kv, e)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        q, k = rope(q), rope(k)
    heads = []
    for i in range(h):
        j = i * kv // h
        score = q[:, :, i] @ k[:, :, j].transpose(1, 2) / e**0.5
        heads.append(score.masked_fill(~see, -torch.inf).softmax(-1).nan_to_num() @ v[:, :, j])
    return attn.proj(torch.cat(heads, -1))


def plain_rope(pos, axes, theta=10000.0):
    """Complex multiplication, pair by pair: the slow twin of `rotate`."""

    def turn(x):
        e = x.shape[-1]
        pairs = e // 2 // axes
        out = x.clone()
        used = pos[..., :1] if axes == 1 else pos[..., 3 - axes :]
        for a in range(axes):
            for p in range(pairs):
                i = a * pairs + p
                angle = used[..., a, None] * theta ** (-p / pairs)
                z = torch.complex(x[..., i], x[..., i + e // 2]) * torch.exp(1j * angle)
                out[..., i], out[..., i + e // 2] = z.real, z.imag
        return out

    return turn


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "rms", "activation": "swiglu", "kv_heads": 2, "rope": 1, "bias": False},
        {"qk_norm": True, "rope": 2, "layer_scale": 0.3, "activation": "quick_gelu"},
        {"rope": 3, "kv_heads": 1, "pre_norm": False, "eps": 1e-6},
    ],
    ids=["llama", "vit", "mqa"],
)
def test_block_equals_the_plain_formula(options):
    torch.manual_seed(0)
    ours = randomise(wt.Transformer(DIM, 1, HEADS, **options)).eval()
    t = tokens()
    pos = torch.randn(*t.shape[:2], 3).mul(5).round()
    t = t.replace(pos=pos)
    block, see = ours.blocks[0], wt.visible(t)
    rope = plain_rope(pos, options["rope"])
    attn = lambda x: block.scale1(plain_attention(block.attn, x, see, rope))  # noqa: E731
    mlp = lambda x: block.scale2(plain_mlp(block.mlp, x, options.get("activation", "gelu")))  # noqa: E731
    x = t.x
    if options.get("pre_norm", True):
        x = x + attn(block.norm1(x))
        x = x + mlp(block.norm2(x))
    else:
        x = block.norm1(x + attn(x))
        x = block.norm2(x + mlp(x))
    x = ours.norm(x).masked_fill(~t.valid[..., None], 0)
    assert (ours(t).x - x).abs().max() < 1e-5


def plain_mlp(mlp, x, activation):
    h = mlp.fc1(x)
    if activation == "swiglu":
        a, b = h.split(h.shape[-1] // 2, -1)
        return mlp.fc2(a * torch.sigmoid(a) * b)
    if activation == "quick_gelu":
        return mlp.fc2(h * torch.sigmoid(1.702 * h))
    return mlp.fc2(0.5 * h * (1 + torch.erf(h / 2**0.5)))


def test_rope_depends_on_distance_only():
    torch.manual_seed(0)
    trunk = randomise(wt.Transformer(DIM, 2, 2, rope=3)).eval()
    t = tokens()
    moved = t.replace(pos=t.pos + torch.tensor([3.0, 11.0, -2.0]))
    assert (trunk(t).x - trunk(moved).x).abs().max() < 1e-4
    assert (trunk(t).x - trunk(t.replace(pos=t.pos * 2)).x).abs().max() > 1e-2


@pytest.mark.parametrize("order", ["bidirectional", "causal"])
def test_checkpointing_changes_no_gradient(order):
    torch.manual_seed(0)
    plain = randomise(wt.Transformer(DIM, 2, HEADS)).train()
    saving = copy.deepcopy(plain)
    object.__setattr__(saving, "cfg", wt.TransformerConfig(DIM, 2, HEADS, checkpoint=True))
    t = tokens(order=order)
    for m in (plain, saving):
        m(t).x.square().sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_drop_path_leaves_out_whole_samples():
    torch.manual_seed(0)
    trunk = wt.Transformer(DIM, 2, HEADS, drop_path=0.5, final_norm=False).train()
    t = wt.Tokens.stack([tokens((6, 4)), tokens((5, 6, 3))])
    block = trunk.blocks[1]  # the last one drops at the full rate
    from worldtokens.backbone.attention import plan

    reading = plan(t)
    torch.manual_seed(3)
    x = torch.ones(1, sum(n * c for n, c in reading.groups), DIM)
    dropped = block._drop(x, reading)
    at = 0
    for count, n in reading.groups:
        for _ in range(count):
            part = dropped[0, at : at + n]
            assert bool((part == 0).all()) or bool((part == 2).all())
            at += n
    assert {0.0, 2.0} == set(dropped.unique().tolist())
    assert torch.equal(block.eval()._drop(x, reading), x)


def test_mean_of_drop_path_is_the_whole():
    torch.manual_seed(0)
    block = wt.Transformer(DIM, 2, HEADS, drop_path=0.25).train().blocks[1]
    from worldtokens.backbone.attention import Reading

    x = torch.ones(4000, 1, 1)
    assert abs(float(block._drop(x, Reading("full")).mean()) - 1.0) < 0.05


@pytest.mark.parametrize("order", ["bidirectional", "causal"])
@pytest.mark.parametrize("lengths", [(6, 6), (7, 4, 5)])
def test_bfloat16_is_close_to_float32_with_and_without_gradients(order, lengths):
    """Training in half precision on a CPU takes another path than inference: both are the same attention."""
    torch.manual_seed(0)
    trunk = randomise(wt.Transformer(DIM, 2, HEADS))
    t = tokens(lengths, order)
    want = trunk(t).x
    wanted = torch.autograd.grad(want.square().mean(), trunk.blocks[0].attn.qkv.weight)[0]
    with torch.autocast("cpu", torch.bfloat16):
        half = trunk(t).x
        with torch.no_grad():
            quiet = trunk(t).x
    got = torch.autograd.grad(half.float().square().mean(), trunk.blocks[0].attn.qkv.weight)[0]
    scale = want.abs().max()
    assert (half.float() - want).abs().max() < 0.05 * scale
    assert (quiet.float() - want).abs().max() < 0.05 * scale
    assert (got - wanted).norm() < 0.05 * wanted.norm()


def test_named_sizes():
    small = wt.Transformer.size("small", depth=1)
    assert (small.cfg.dim, small.cfg.heads, small.cfg.depth) == (384, 6, 1)
    # ViT-S's 12 blocks hold 21.3 million parameters (Touvron et al. 2021: 22.1 with embeddings and head)
    assert sum(p.numel() for p in small.blocks[0].parameters()) * 12 == 21_293_568
    with pytest.raises(ValueError, match="expected one of"):
        wt.Transformer.size("giant")


@pytest.mark.parametrize(
    "args, message",
    [
        ({"dim": 30, "depth": 1, "heads": 4}, "must divide"),
        ({"dim": 32, "depth": 1, "heads": 4, "kv_heads": 3}, "must divide|divide heads"),
        ({"dim": 32, "depth": 1, "heads": 4, "norm": "batch"}, "expected one of"),
        ({"dim": 32, "depth": 1, "heads": 4, "activation": "relu"}, "expected one of"),
        ({"dim": 32, "depth": 1, "heads": 4, "rope": 4}, "expected 0"),
        ({"dim": 12, "depth": 1, "heads": 4, "rope": 1}, "odd"),
        ({"dim": 32, "depth": 1, "heads": 4, "drop_path": 1.0}, "drop_path"),
    ],
)
def test_wrong_settings_are_named(args, message):
    with pytest.raises(ValueError, match=message):
        wt.Transformer(**args)


def test_a_typo_in_a_setting_is_an_error():
    with pytest.raises(TypeError, match="pre_nrom"):
        wt.Transformer(32, 1, 4, pre_nrom=True)
    with pytest.raises(TypeError, match="pre_nrom"):
        wt.Transformer.size("tiny", pre_nrom=True)


def test_wrong_width_names_the_remedy():
    with pytest.raises(ValueError, match="give the front-end dim=32"):
        wt.Transformer(32, 1, 4)(tokens(dim=16))


def test_save_and_load(tmp_path):
    torch.manual_seed(0)
    trunk = randomise(wt.Transformer.size("tiny", depth=2, norm="rms", layer_scale=1e-4))
    trunk.save(tmp_path)
    again = wt.load(tmp_path)
    assert again.cfg == trunk.cfg
    t = tokens(dim=192)
    assert torch.equal(again(t).x, trunk.eval()(t).x)
    assert not again.training


def test_load_refuses_what_doesnt_fit(tmp_path):
    wt.Transformer(32, 1, 4).save(tmp_path / "a")
    wt.Transformer(32, 2, 4).save(tmp_path / "b")
    with pytest.raises(wt.InputError, match="is not a saved model"):
        wt.load(tmp_path)
    (tmp_path / "a" / "config.json").write_bytes((tmp_path / "b" / "config.json").read_bytes())
    with pytest.raises(wt.InputError, match="not written by the same save"):
        wt.load(tmp_path / "a")
    weights = (tmp_path / "b" / "model.safetensors").read_bytes()
    (tmp_path / "b" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(wt.InputError, match="damaged"):
        wt.load(tmp_path / "b")


def test_a_config_cant_name_any_class(tmp_path):
    with pytest.raises(wt.InputError, match="not a worldtokens Part"):
        wt.build({"class": "subprocess.Popen", "args": {"args": ["true"]}})
    with pytest.raises(wt.InputError, match="cannot be imported"):
        wt.build({"class": "worldtokens.NoSuchThing", "args": {}})
    with pytest.raises(wt.InputError, match="dpeth"):
        wt.build({"class": "worldtokens.Transformer", "args": {"dim": 8, "depth": 1, "heads": 1, "dpeth": 1}})


def test_a_compiled_block_is_saved_under_plain_names(tmp_path):
    trunk = wt.Transformer(32, 1, 4)
    plain = set(trunk.state_dict())
    trunk.blocks[0] = torch.compile(trunk.blocks[0])
    assert any("_orig_mod" in k for k in trunk.state_dict())
    trunk.save(tmp_path)
    assert set(wt.load(tmp_path).state_dict()) == plain


def test_an_interrupted_save_keeps_the_last_one(tmp_path, monkeypatch):
    trunk = wt.Transformer(32, 1, 4)
    trunk.save(tmp_path)
    before = trunk.state_dict()["blocks.0.attn.qkv.weight"].clone()
    randomise(trunk)
    from worldtokens import parts

    def killed(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(parts.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        trunk.save(tmp_path)
    monkeypatch.undo()
    assert torch.equal(wt.load(tmp_path).state_dict()["blocks.0.attn.qkv.weight"], before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6),
    st.sampled_from(["bidirectional", "causal", "prefix"]),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
def test_every_reading_equals_the_dense_rule_backward_too(ns, order, window, packed):
    """Padded and packed rows, prefixes, windows, grouped heads: outputs and all gradients of the dense mask's."""
    torch.manual_seed(0)
    trunk = randomise(wt.Transformer(DIM, 2, HEADS, rope=1, kv_heads=2, window=window))
    rows = [tokens((n,), "bidirectional" if order == "prefix" else order) for n in ns]
    if order == "prefix":
        rows = [wt.Tokens.cat(r, tokens((2,), "causal"), follow=True) for r in rows]
    t = wt.pack(rows, 14) if packed else wt.Tokens.stack(rows)
    runs = []
    kinds = ["dense", None]
    if t.layout is not None:  # cat forgets it after an empty part
        kinds.append("groups")
    if not packed and window is None and order != "prefix":
        kinds.append("padded" if order == "bidirectional" else "causal")
    for kind in kinds:
        x = t.x.clone().requires_grad_()
        out = trunk(t.replace(x=x), kind=kind).x
        wanted = (x, *trunk.parameters())
        runs.append((out, *torch.autograd.grad(out.square().sum(), wanted, materialize_grads=True)))
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert a.numel() == 0 or (a - b).abs().max() < 1e-5 * max(1.0, float(b.detach().abs().max()))


def test_groups_need_a_layout():
    with pytest.raises(ValueError, match=r"tokens\.infer_layout\(\)"):
        wt.Transformer(DIM, 1, HEADS)(tokens().replace(layout=None), kind="groups")


def test_an_accelerator_is_never_waited_for():
    """On the meta device a look into a tensor is an error: plans, contexts and cached steps do without."""
    trunk = wt.Transformer(DIM, 2, HEADS, rope=1, kv_heads=2, cross=True, window=5).to("meta")
    free = wt.Transformer(DIM, 1, HEADS).to("meta")
    context = tokens((4, 2, 3)).to("meta")
    for order in ("bidirectional", "causal"):
        for t in (
            tokens((5, 2, 3), order),
            tokens((5, 5, 5), order),
            tokens((5, 2, 3), order).replace(layout=None),
        ):
            t = t.to("meta")
            assert trunk(t, context=context).shape == free(t).shape == t.shape
            cache, plain = trunk.cache(batch=3), free.cache(batch=3, max_len=9)
            trunk(t, context=context, cache=cache)
            free(t, cache=plain)
            for n in (1, 3):
                step = tokens((n,) * 3, "causal").to("meta")
                assert trunk(cache.follow(step), cache=cache).shape == (3, n, DIM)
                free(plain.follow(step), cache=plain)
            whole = t.layout is not None and t.layout.full(5)
            assert cache.length == plain.length == 9 and plain.whole == whole
            cache.select(torch.zeros(2, dtype=torch.long, device="meta"))


def graphs(batches, backend="eager", **options):
    """Compile a trunk, run it over batches forward and backward, and count the graphs that Dynamo made."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    trunk = randomise(wt.Transformer(DIM, 1, HEADS, rope=1, kv_heads=2, **options))
    compiled = torch.compile(trunk, dynamic=True, fullgraph=True, backend=backend)
    for t, *context in batches:
        x = t.x.clone().requires_grad_()
        got = compiled(t.replace(x=x), *context).x
        assert (got - trunk(t, *context).x).abs().max() < 1e-5
        got.square().sum().backward()
        assert x.grad.isfinite().all()
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


# the first has no axis of 3, as pos has: Dynamo takes axes of equal size for one
RAGGED = [(5, 7, 2, 6), (11, 2), (4, 8, 9), (13, 13, 2, 4), (6, 17, 5), (21, 9, 20), (2, 6, 3)]


@pytest.mark.parametrize("order", ["bidirectional", "causal"])
def test_compiles_once_for_all_lengths(order):
    """No graph breaks, and one graph each for whole and for padded rows, whatever their lengths and number."""
    whole = [(tokens([n] * b, order),) for n, b in ((4, 5), (9, 2), (17, 3), (6, 5), (23, 2))]
    padded = [(tokens(ns, order),) for ns in RAGGED]
    assert graphs([pair for both in zip(whole, padded, strict=False) for pair in both]) == 2


def test_compiles_once_for_all_masks():
    """Windows, packed rows, tokens without a layout, and contexts."""
    padded = [tokens(ns, "causal") for ns in RAGGED]
    packed = [wt.pack([tokens((n,)) for n in ns] * 2, 30) for ns in RAGGED]
    assert graphs([(t,) for t in padded], window=3) == 1
    assert graphs([(t,) for t in packed if len(t) > 1]) == 1
    assert graphs([(t.replace(layout=None),) for t in padded]) == 1
    assert graphs([(t, tokens(ns[::-1])) for t, ns in zip(padded, RAGGED, strict=True)], cross=True) == 1


@pytest.mark.slow
def test_compiles_once_with_a_traced_backward():
    assert graphs([(tokens(ns, "causal"),) for ns in RAGGED], backend="aot_eager") == 1
