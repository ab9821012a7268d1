"""FlexAttention, uncompiled on a CPU, against the dense mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt
from worldtokens.backbone import flex
from worldtokens.backbone.attention import plan_attention

DIM = 32
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def rows(ns, order):
    torch.manual_seed(1)
    out = []
    for n in ns:
        t = wt.Tokens(
            torch.randn(1, n, DIM),
            layout=wt.Layout.simple([n], "bidirectional" if order == "prefix" else order),
        )
        t = t.causal() if order == "causal" else t
        if order == "prefix":
            more = wt.Tokens(torch.randn(1, 2, DIM), layout=wt.Layout.simple([2], "causal")).causal()
            t = wt.Tokens.cat(t, more, sequential=True)
        out.append(t)
    return out


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=6),
    st.sampled_from(["bidirectional", "causal", "prefix"]),
    st.sampled_from([None, 5]),
    st.booleans(),
    st.booleans(),
)
def test_flex_equals_the_dense_mask(ns, order, window, packed, narrow):
    torch.manual_seed(0)
    heads = 4 if narrow else 2  # head_dim 8 or 16
    trunk = wt.Transformer(DIM, 2, heads, rope=1, kv_heads=2, window=window).eval()
    parts = rows(ns, order)
    t = wt.pack(parts, 150) if packed else wt.Tokens.stack(parts)
    with torch.no_grad():
        a, b = trunk(t, mode="flex").x, trunk(t, mode="dense").x
    assert (a - b).abs().max() < 1e-5


def test_the_mask_is_cached_where_the_layout_determines_it():
    t = wt.pack(rows([3, 40, 60], "causal"), 110)
    again = wt.pack(rows([3, 40, 60], "causal"), 110)
    assert plan_attention(t, mode="flex").mask is plan_attention(again, mode="flex").mask
    mixed = wt.pack(rows([3, 40, 60], "prefix"), 130)
    assert plan_attention(mixed, mode="flex").mask is not plan_attention(mixed, mode="flex").mask


def test_blocks_without_visible_pairs_are_skipped():
    """Four samples of 128 in one row: 4 of 16 blocks are computed; causal over 512 tokens: 10."""
    t = wt.pack(rows([128] * 4, "bidirectional"), 512)
    assert int(flex.block_mask(t).to_dense().sum()) == 4
    one = wt.pack(rows([512], "causal"), 512)
    assert int(flex.block_mask(one).to_dense().sum()) == 10


def test_flex_is_chosen_on_cuda_for_long_rows_alone():
    import types

    from worldtokens.backbone.attention import _choose

    def chosen(device, n, layout=None):
        return _choose(
            types.SimpleNamespace(device=torch.device(device), layout=layout, shape=(1, n, 8)), None
        )

    assert chosen("cuda", 500) == "flex" and chosen("cuda", 100) == chosen("cpu", 500) == "dense"
    assert chosen("cuda", 500, wt.Layout.simple([500], "causal")) == "causal"
    assert chosen("cuda", 500, wt.Layout(((200, 300),), "causal")) == "flex"
