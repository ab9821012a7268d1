"""Pooling of tokens: padding, packing, skipped tokens, samples without tokens."""

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
