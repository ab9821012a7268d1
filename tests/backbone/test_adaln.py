"""adaLN-zero: parity with a plain DiT block, identity at initialisation, packed rows, all attention modes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import worldtokens as wt

DIM, HEADS, WIDE = 16, 2, 24


def randomised(module, seed=0):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.2)
    return module


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(lengths, seed=0, dim=DIM):
    return wt.Tokens.stack(
        [
            wt.Tokens(noise(1, n, dim, seed=seed + i), layout=wt.Layout.simple([n], "bidirectional"))
            for i, n in enumerate(lengths)
        ]
    )


class PlainDiT(nn.Module):
    """A DiT block with cross-attention, with torch's own attention as the reference."""

    def __init__(self, block):
        super().__init__()
        self.block = block
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.cross = nn.MultiheadAttention(DIM, HEADS, batch_first=True, kdim=WIDE, vdim=WIDE)
        with torch.no_grad():
            self.attn.in_proj_weight.copy_(block.attn.qkv.weight)
            self.attn.in_proj_bias.copy_(block.attn.qkv.bias)
            self.cross.q_proj_weight.copy_(block.cross.q.weight)
            self.cross.k_proj_weight.copy_(block.cross.kv.weight[:DIM])
            self.cross.v_proj_weight.copy_(block.cross.kv.weight[DIM:])
            self.cross.in_proj_bias.copy_(torch.cat([block.cross.q.bias, block.cross.kv.bias]))
            for ours, theirs in ((block.attn, self.attn), (block.cross, self.cross)):
                theirs.out_proj.weight.copy_(ours.proj.weight)
                theirs.out_proj.bias.copy_(ours.proj.bias)

    def forward(self, x, context, c):
        b = self.block
        nine = F.linear(F.silu(c), b.adaln.linear.weight, b.adaln.linear.bias)[:, None].chunk(9, -1)
        shift, scale, gate = nine[:3]
        h = F.layer_norm(x, (DIM,)) * (1 + scale) + shift
        x = x + gate * self.attn(h, h, h, need_weights=False)[0]
        shift, scale, gate = nine[3:6]
        h = F.layer_norm(x, (DIM,)) * (1 + scale) + shift
        x = x + gate * self.cross(h, context, context, need_weights=False)[0]
        shift, scale, gate = nine[6:]
        h = F.layer_norm(x, (DIM,)) * (1 + scale) + shift
        return x + gate * b.mlp.fc2(F.gelu(b.mlp.fc1(h)))


def test_equals_a_plain_dit_with_a_modulated_final_norm():
    """Outputs within 1e-5, and gradients of the condition within 1e-4."""
    trunk = randomised(wt.Transformer(DIM, 2, HEADS, cross=True, context_dim=WIDE, adaln=True))
    x, context, c = noise(3, 5, DIM), noise(3, 4, WIDE, seed=1), noise(3, DIM, seed=2)
    ours_c, plain_c = c.clone().requires_grad_(), c.clone().requires_grad_()
    ours = trunk(wt.Tokens(x), context=wt.Tokens(context), condition=ours_c).x
    plain = x
    for block in trunk.blocks:
        plain = PlainDiT(block)(plain, context, plain_c)
    m = trunk.adaln.linear
    shift, scale = F.linear(F.silu(plain_c), m.weight, m.bias)[:, None].chunk(2, -1)
    plain = F.layer_norm(plain, (DIM,)) * (1 + scale) + shift
    assert (ours - plain).abs().max() < 1e-5
    ours.square().sum().backward()
    plain.square().sum().backward()
    assert (ours_c.grad - plain_c.grad).abs().max() < 1e-4 * plain_c.grad.abs().max()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_fresh_trunk_is_the_identity(norm):
    trunk = wt.Transformer(DIM, 3, HEADS, cross=True, adaln=True, norm=norm, config={"final_norm": False})
    x = noise(2, 6, DIM)
    out = trunk(wt.Tokens(x), context=wt.Tokens(noise(2, 3, DIM, seed=1)), condition=noise(2, DIM, seed=2))
    assert torch.equal(out.x, x)


@pytest.mark.parametrize("mode", ["padded", "groups", "dense"])
def test_every_mode_conditions_each_sample_on_its_own_vector(mode):
    trunk = randomised(wt.Transformer(DIM, 2, HEADS, adaln=True))
    lengths, c = (5, 2, 7, 2), noise(4, DIM, seed=9)
    tokens = batch(lengths)
    out = trunk(tokens, mode=mode, condition=c).x
    for i, n in enumerate(lengths):
        alone = trunk(batch([n], seed=i), condition=c[i : i + 1]).x[0]
        assert (out[i, :n] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("mode", ["groups", "dense"])
def test_packed_rows_are_modulated_by_segment(mode):
    trunk = randomised(wt.Transformer(DIM, 2, HEADS, adaln=True))
    lengths, c = (5, 7, 2, 3, 4), noise(5, DIM, seed=9)
    tokens = batch(lengths)
    packed = tokens.pack(9)
    assert len(packed) < 5 and packed.layout.origin != tuple(range(5))
    out = trunk(packed, mode=mode, condition=c).unpack().x
    assert (out - trunk(tokens, condition=c).x).abs().max() < 1e-5


@pytest.mark.parametrize("mode", [None, "groups", "dense"])
def test_a_condition_per_token_may_be_nan_at_padding(mode):
    trunk = randomised(wt.Transformer(DIM, 2, HEADS, adaln=True))
    tokens, c = batch((5, 2)), noise(2, DIM, seed=9)
    each = c[:, None].expand(2, 5, DIM).clone()
    each[1, 2:] = torch.nan
    out = trunk(tokens, mode=mode, condition=each).x
    assert (out - trunk(tokens, condition=c).x).abs().max() < 1e-5


def test_gradient_checkpointing_and_a_cache_change_nothing():
    plain = randomised(wt.Transformer(DIM, 2, HEADS, adaln=True))
    saving = wt.Transformer(DIM, 2, HEADS, adaln=True, config={"gradient_checkpointing": True}).train()
    saving.load_state_dict(plain.state_dict())
    tokens, c = wt.Tokens(noise(2, 6, DIM)).causal(), noise(2, DIM, seed=1)
    whole = plain(tokens, condition=c).x
    assert (saving(tokens, condition=c).x - whole).abs().max() < 1e-6
    cache, parts = plain.cache(2), []
    for i in range(0, 6, 2):
        part = wt.Tokens(
            tokens.x[:, i : i + 2], pos=tokens.pos[:, i : i + 2], block=tokens.block[:, i : i + 2]
        )
        parts.append(plain(part, cache=cache, condition=c).x)
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-5


def test_off_by_default_and_wrong_conditions_raise():
    plain = wt.Transformer(DIM, 1, HEADS)
    assert not any("adaln" in k for k in plain.state_dict())
    assert plain.blocks[0].norm1.weight is not None
    with pytest.raises(ValueError, match="adaln=False and got a condition"):
        plain(wt.Tokens(noise(1, 2, DIM)), condition=noise(1, DIM))
    trunk = wt.Transformer(DIM, 1, HEADS, adaln=True)
    with pytest.raises(ValueError, match="adaln=True and got no condition"):
        trunk(wt.Tokens(noise(1, 2, DIM)))
    with pytest.raises(ValueError, match="one per sample"):
        trunk(wt.Tokens(noise(2, 2, DIM)), condition=noise(3, DIM))
    with pytest.raises(ValueError, match="pre_norm"):
        wt.Transformer(DIM, 1, HEADS, adaln=True, config={"pre_norm": False})
