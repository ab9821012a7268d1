"""The Transformer: parity with torch's layers and plain formulas, its options, its errors."""

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.nn import functional as F

import worldtokens as wt

DIM, HEADS = 32, 4
settings.register_profile("wt", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("wt")


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
def test_equal_to_torchs_encoder_layer(pre_norm, order, tokens, randomise):
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
    ours = wt.Transformer(DIM, 2, HEADS, config={"mlp_dim": 64, "pre_norm": pre_norm, "final_norm": False})
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
    """The formula of `Attention`, head by head in a loop."""
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
    """The formula of `apply_rope`: complex multiplication, pair by pair."""

    def rotate(x):
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

    return rotate


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "rms", "activation": "swiglu", "kv_heads": 2, "rope": 1, "config": {"bias": False}},
        {"qk_norm": True, "rope": 2, "activation": "quick_gelu", "config": {"layer_scale": 0.3}},
        {"rope": 3, "kv_heads": 1, "config": {"pre_norm": False, "eps": 1e-6}},
    ],
    ids=["llama", "vit", "mqa"],
)
def test_block_equals_the_plain_formula(options, tokens, randomise):
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
    if ours.cfg.pre_norm:
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


def test_rope_depends_on_relative_positions_only(tokens, randomise):
    torch.manual_seed(0)
    trunk = randomise(wt.Transformer(DIM, 2, 2, rope=3)).eval()
    t = tokens()
    moved = t.replace(pos=t.pos + torch.tensor([3.0, 11.0, -2.0]))
    assert (trunk(t).x - trunk(moved).x).abs().max() < 1e-4
    assert (trunk(t).x - trunk(t.replace(pos=t.pos * 2)).x).abs().max() > 1e-2


@pytest.mark.parametrize("order", ["bidirectional", "causal"])
def test_checkpointing_changes_no_gradient(order, tokens, randomise):
    torch.manual_seed(0)
    plain = randomise(wt.Transformer(DIM, 2, HEADS)).train()
    saving = wt.Transformer(DIM, 2, HEADS, config={"gradient_checkpointing": True}).train()
    saving.load_state_dict(plain.state_dict())
    t = tokens(order=order)
    for m in (plain, saving):
        m(t).x.square().sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_drop_path_drops_whole_samples(tokens):
    torch.manual_seed(0)
    trunk = wt.Transformer(DIM, 2, HEADS, drop_path=0.5, config={"final_norm": False}).train()
    t = wt.Tokens.stack([tokens((6, 4)), tokens((5, 6, 3))])
    block = trunk.blocks[1]  # the last block has the full probability
    from worldtokens.backbone.attention import plan_attention

    plan = plan_attention(t)
    torch.manual_seed(3)
    x = torch.ones(1, sum(n * c for n, c in plan.groups), DIM)
    dropped = block._drop(x, plan)
    at = 0
    for count, n in plan.groups:
        for _ in range(count):
            part = dropped[0, at : at + n]
            assert bool((part == 0).all()) or bool((part == 2).all())
            at += n
    assert {0.0, 2.0} == set(dropped.unique().tolist())
    assert torch.equal(block.eval()._drop(x, plan), x)


def test_drop_path_keeps_the_mean():
    torch.manual_seed(0)
    block = wt.Transformer(DIM, 2, HEADS, drop_path=0.25).train().blocks[1]
    from worldtokens.backbone.attention import AttentionPlan

    x = torch.ones(4000, 1, 1)
    assert abs(float(block._drop(x, AttentionPlan("full")).mean()) - 1.0) < 0.05


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
def test_wrong_settings_raise(args, message):
    with pytest.raises(ValueError, match=message):
        wt.Transformer(**args)


def test_a_typo_in_a_setting_is_an_error():
    with pytest.raises(TypeError, match="pre_nrom"):
        wt.Transformer(32, 1, 4, pre_nrom=True)
    with pytest.raises(TypeError, match="pre_nrom"):
        wt.Transformer.size("tiny", pre_nrom=True)
    with pytest.raises(wt.InputError, match=r"unknown keys \['pre_nrom'\].*'pre_norm'"):
        wt.Transformer(32, 1, 4, config={"pre_nrom": False})


def test_wrong_width_names_the_remedy(tokens):
    with pytest.raises(ValueError, match="give the front-end dim=32"):
        wt.Transformer(32, 1, 4)(tokens(dim=16))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_before_the_first_block_and_inside_the_feed_forward(norm, ragged):
    torch.manual_seed(0)
    config = {"first_norm": True, "mlp_norm": True}
    trunk = wt.Transformer(32, 1, 2, norm=norm, activation="gelu_tanh", config=config)
    for p in trunk.parameters():
        nn.init.normal_(p, std=0.3)
    plain = wt.Transformer(32, 1, 2, norm=norm, activation="gelu_tanh", config={"mlp_norm": True})
    plain.load_state_dict({k: v for k, v in trunk.state_dict().items() if not k.startswith("first_norm")})
    tokens = ragged
    whole = wt.Tokens(
        x=torch.where(tokens.valid[..., None], tokens.x, 0.0), valid=tokens.valid, layout=tokens.layout
    )
    want = plain(whole.replace(x=trunk.first_norm(whole.x)))
    assert (trunk(tokens).x - want.x).abs().max() < 1e-5
    mlp, x = trunk.blocks[0].mlp, torch.randn(5, 32)
    want = mlp.fc2(mlp.norm(F.gelu(mlp.fc1(x), approximate="tanh")))
    assert torch.equal(mlp(x), want)
