"""Attention modes: parity with the dense mask, half precision, no wait for a device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt

DIM, HEADS = 32, 4
settings.register_profile("wt", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("wt")


@pytest.mark.parametrize("order", ["bidirectional", "causal"])
@pytest.mark.parametrize("lengths", [(6, 6), (7, 4, 5)])
def test_bfloat16_is_close_to_float32_with_and_without_gradients(order, lengths, tokens, randomise):
    """On a CPU, training in half precision uses another kernel than inference: both are close to float32."""
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


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6),
    st.sampled_from(["bidirectional", "causal", "prefix"]),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
def test_every_mode_equals_the_dense_mask_with_gradients(tokens, randomise, ns, order, window, packed):
    """Padded and packed rows, prefixes, windows, grouped heads: outputs and all gradients."""
    torch.manual_seed(0)
    trunk = randomise(wt.Transformer(DIM, 2, HEADS, rope=1, kv_heads=2, window=window))
    rows = [tokens((n,), "bidirectional" if order == "prefix" else order) for n in ns]
    if order == "prefix":
        rows = [wt.Tokens.cat(r, tokens((2,), "causal"), sequential=True) for r in rows]
    t = wt.pack(rows, 14) if packed else wt.Tokens.stack(rows)
    runs = []
    modes = ["dense", None]
    if t.layout is not None:  # cat drops it after an empty part
        modes.append("groups")
    if not packed and window is None and order != "prefix":
        modes.append("padded" if order == "bidirectional" else "causal")
    for mode in modes:
        x = t.x.clone().requires_grad_()
        out = trunk(t.replace(x=x), mode=mode).x
        wanted = (x, *trunk.parameters())
        runs.append((out, *torch.autograd.grad(out.square().sum(), wanted, materialize_grads=True)))
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert a.numel() == 0 or (a - b).abs().max() < 1e-5 * max(1.0, float(b.detach().abs().max()))


def test_groups_need_a_layout(tokens):
    with pytest.raises(ValueError, match=r"tokens\.infer_layout\(\)"):
        wt.Transformer(DIM, 1, HEADS)(tokens().replace(layout=None), mode="groups")


def test_planning_never_waits_for_a_device(tokens):
    """On the meta device reading a tensor raises: plans, contexts and cached steps do not need it."""
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
                assert trunk(cache.offset(step), cache=cache).shape == (3, n, DIM)
                free(plain.offset(step), cache=plain)
            whole = t.layout is not None and t.layout.full(5)
            assert cache.length == plain.length == 9 and plain.dense == whole
            cache.select(torch.zeros(2, dtype=torch.long, device="meta"))
