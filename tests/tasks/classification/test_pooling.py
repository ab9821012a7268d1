"""Pooling of a classifier's tokens, and the tokenizer and trunk options of published classifiers."""

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.backbone.pooling import drop_prefix, pool_tokens


def test_pooling_ignores_padding_packing_and_skipped_tokens(ragged):
    tokens = ragged
    pool = wt.AttentionPool(32, heads=4, skip=1)
    got = pool(tokens)
    for i, n in enumerate([6, 4, 2]):
        alone = wt.Tokens(x=tokens.x[i : i + 1, 1:n])
        assert (got[i] - wt.AttentionPool.forward(_without_skip(pool), alone)[0]).abs().max() < 1e-5
        assert (pool_tokens(tokens, "patches", 1)[i] - tokens.x[i, 1:n].mean(0)).abs().max() < 1e-6
    packed = tokens.pack(8)
    assert len(packed) == 2
    assert (pool(packed) - got).abs().max() < 1e-5
    assert (pool_tokens(packed, "patches", 1) - pool_tokens(tokens, "patches", 1)).abs().max() < 1e-6
    assert (pool(tokens.replace(layout=None)) - got).abs().max() < 1e-5
    assert drop_prefix(tokens, 3).layout.lengths == ((3,), (1,), ())
    # a sample without tokens after the skipped ones gives zeros, and gradients stay finite
    pool.skip = 3
    out = pool(tokens)
    assert out[2].abs().max() == 0 and out.isfinite().all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in pool.parameters())


def _without_skip(pool):
    other = wt.AttentionPool(32, heads=4)
    other.load_state_dict(pool.state_dict())
    return other


def test_registers_follow_the_class_token(emoji_rows):
    front = wt.ImageTokenizer(dim=32, patch=8, size=32, class_token=True, registers=2)
    tokens = front.tokens([emoji_rows[0]["image"]])
    assert tokens.shape[1] == 3 + 16 and front.prefix == 3
    assert torch.equal(tokens.x[0, 0], front.class_token[0, 0])
    assert torch.equal(tokens.x[0, 1:3], front.registers[0])
    assert tokens.pos[0, :3].tolist() == [[0, 0, 0], [-1, 0, 0], [-2, 0, 0]]
    wt.testing.check_tokenizer(front, [r["image"] for r in emoji_rows[:3]])
    native = wt.ImageTokenizer(dim=32, patch=8, size=None, max_tokens=20, registers=1, embedding={"span": 4})
    wt.testing.check_tokenizer(native, [r["image"] for r in emoji_rows[:3]])


def test_span_scales_the_positions_of_every_grid():
    front = wt.ImageTokenizer(dim=32, patch=8, size=32, embedding={"span": (8, 16)})
    pos = front(torch.zeros(1, 3, 16, 32)).pos[0]  # 2 rows, 4 columns
    assert pos[:, 1].unique().tolist() == [0, 4] and pos[:, 2].unique().tolist() == [0, 4, 8, 12]
    native = wt.ImageTokenizer(dim=32, patch=8, size=None, embedding={"span": (8, 16)})
    batch = native.collate(
        [torch.zeros(3, 16, 32, dtype=torch.uint8), torch.zeros(3, 8, 8, dtype=torch.uint8)]
    )
    assert torch.equal(native(batch).pos[0], pos)
    with pytest.raises(wt.InputError, match="crop_pct is"):
        wt.ImageTokenizer(dim=32, size=None, preprocess={"crop_pct": 0.9})


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_before_the_first_block_and_inside_the_feed_forward(norm, ragged):
    torch.manual_seed(0)
    config = {"first_norm": True, "mlp_norm": True}
    trunk = wt.Transformer(32, 1, 2, norm=norm, activation="gelu_tanh", config=config)
    for p in trunk.parameters():
        torch.nn.init.normal_(p, std=0.3)
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
