"""KV cache: stepwise decoding equals one forward pass, whatever the rows hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt

DIM, HEADS = 16, 4
settings.register_profile("wt", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("wt")

TRUNKS = {
    "rope": {"rope": 1},
    "llama": {"rope": 1, "kv_heads": 2, "norm": "rms", "activation": "swiglu", "config": {"bias": False}},
    "window": {"rope": 3, "window": 3},
    "post": {"qk_norm": True, "kv_heads": 1, "config": {"pre_norm": False}},
}


def make(cross=False, **options):
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    trunk = wt.Transformer(DIM, 2, HEADS, cross=cross, **options).eval()
    with torch.no_grad():
        for p in trunk.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.2)
    return trunk


@pytest.fixture(scope="module")
def trunks():
    return {name: make(**options) for name, options in TRUNKS.items()}


def sample(n, seed, order="causal"):
    g = torch.Generator().manual_seed(seed)
    t = wt.Tokens(torch.randn(1, n, DIM, generator=g), layout=wt.Layout.simple([n], order))
    return t.causal() if order == "causal" else t


def batch(lengths, seed=0, order="causal"):
    return wt.Tokens.stack([sample(n, seed + i, order) for i, n in enumerate(lengths)])


def cut(t, a, b):
    """Tokens a to b of every row, with their numbering."""
    return wt.Tokens(**{k: v[:, a:b] if v is not None else None for k, v in t.fields().items()})


def close(a, b, tol=1e-5):
    assert a.shape == b.shape
    assert a.numel() == 0 or (a - b).abs().max() < tol


name_of = st.sampled_from(sorted(TRUNKS))
splits = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@st.composite
def rows(draw):
    """Rows with arbitrary validity, segment and block per token, and a division into chunks."""
    sizes = draw(splits)
    b, n = draw(st.integers(1, 3)), sum(sizes)
    field = lambda low, high: torch.tensor(  # noqa: E731
        draw(st.lists(st.lists(st.integers(low, high), min_size=n, max_size=n), min_size=b, max_size=b))
    )
    return sizes, field(0, 1).bool(), field(0, 1), field(0, 2)


@given(name_of, rows(), st.sampled_from([None, 20]))
def test_any_tokens_in_any_chunks(trunks, name, drawn, max_len):
    """Padding, packed and prefix tokens: a chunk attends to all visible tokens so far.

    Cached tokens are not updated by later ones, so blocks rise from chunk to chunk.
    """
    sizes, valid, segment, block = drawn
    chunk = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    b, n = valid.shape
    t = wt.Tokens(
        x=torch.randn(b, n, DIM, generator=torch.Generator().manual_seed(n)),
        valid=valid,
        segment=segment,
        block=block + 3 * chunk,
        pos=torch.arange(n * 3.0).view(1, n, 3).expand(b, n, 3) / 3,
    )
    trunk = trunks[name]
    whole, cache, at = trunk(t).x, trunk.cache(batch=b, max_len=max_len), 0
    with torch.no_grad():
        for size in sizes:
            close(trunk(cut(t, at, at + size), cache=cache).x, whole[:, at : at + size])
            at += size
            assert cache.length == at


@given(name_of, st.lists(st.integers(1, 5), min_size=1, max_size=4), splits, st.booleans())
def test_prompts_of_different_length_continue_as_each_alone(trunks, name, lengths, steps, left):
    """Batched prompts padded on either side, then chunks offset by the cache: each row as if it were alone."""
    trunk = trunks[name]
    prompt = batch(lengths)
    if left:
        far = max(lengths)
        fields = {k: v for k, v in prompt.fields().items() if v is not None}
        turned = {
            k: torch.stack([v[i].roll(far - n, 0) for i, n in enumerate(lengths)]) for k, v in fields.items()
        }
        prompt = wt.Tokens(**turned)
    more = [batch([n] * len(lengths), 50 * (i + 1)) for i, n in enumerate(steps)]
    with torch.no_grad():
        cache = trunk.cache(batch=len(lengths))
        out = [trunk(prompt, cache=cache)]
        out += [trunk(cache.offset(t), cache=cache) for t in more]
        for i, n in enumerate(lengths):
            alone = wt.Tokens.cat(sample(n, i), *(t[i] for t in more), sequential=True)
            want = trunk(alone.replace(layout=None)).x
            close(torch.cat([o.x[i][o.valid[i]] for o in out])[None], want)


@given(name_of, st.integers(1, 4), st.integers(0, 5), splits)
def test_a_bidirectional_prefix_then_text(trunks, name, image, text, steps):
    """An image's tokens attend to each other, the text is causal; the cached blocks decide."""
    trunk = trunks[name]
    parts = [sample(image, 1, "bidirectional"), *([sample(text, 2)] if text else [])]
    prompt = wt.Tokens.cat(*parts, sequential=True)
    more = [sample(n, 10 + i) for i, n in enumerate(steps)]
    want = trunk(wt.Tokens.cat(prompt, *more, sequential=True).replace(layout=None)).x
    with torch.no_grad():
        cache = trunk.cache(batch=1, max_len=want.shape[1])
        got = [trunk(prompt, cache=cache).x]
        got += [trunk(cache.offset(t), cache=cache).x for t in more]
    close(torch.cat(got, 1), want)


def test_one_query_attends_to_all_cached_keys(trunks):
    """The last token attends to all five; SDPA's is_causal would show it the first alone."""
    t = sample(5, 0)
    trunk = trunks["rope"]
    with torch.no_grad():
        cache = trunk.cache(batch=1)
        trunk(cut(t, 0, 4), cache=cache)
        last = trunk(cut(t, 4, 5), cache=cache).x
        close(last, trunk(t).x[:, 4:])
        assert (last - trunk(cut(t, 4, 5)).x).abs().max() > 1e-3


def test_the_common_step_needs_no_mask(trunks):
    trunk = trunks["rope"]
    cache = trunk.cache(batch=2)
    with torch.no_grad():
        trunk(batch((4, 4)), cache=cache)
        step = cache.offset(batch((1, 1), 9))
        assert step.pos[:, 0, 0].tolist() == [4, 4] and step.block.tolist() == [[4], [4]]
        plan = cache.plan(step)
        assert plan.mode == "full" and plan.mask is None and plan.cached
        # the same for tokens numbered by hand, from the numbers on the CPU
        by_hand = batch((1, 1), 9)
        by_hand = by_hand.replace(block=by_hand.block + 5, layout=by_hand.layout)
        assert cache.copy().plan(by_hand).mode == "full"
        # but not if a token attends to a part of the cache, or rows have padding
        early = by_hand.replace(block=torch.zeros(2, 1, dtype=torch.int32), layout=by_hand.layout)
        assert cache.copy().plan(early).mode == "dense"
        other = by_hand.replace(segment=torch.ones(2, 1, dtype=torch.int32), layout=by_hand.layout)
        assert cache.copy().plan(other).mode == "dense"
        holes = trunk.cache(batch=2)
        trunk(batch((4, 2)), cache=holes)
        assert holes.plan(holes.offset(batch((1, 1), 9))).mode == "dense"


@given(
    name_of, st.lists(st.integers(0, 2), min_size=1, max_size=4), st.booleans(), st.sampled_from([None, 9])
)
def test_rows_selected_as_beam_search_does(trunks, name, chosen, ragged, max_len):
    trunk = trunks[name]
    prompt = batch((4, 2, 3) if ragged else (3, 3, 3))
    with torch.no_grad():
        cache = trunk.cache(batch=3, max_len=max_len)
        trunk(prompt, cache=cache)
        kept = cache.copy()
        assert cache.select(torch.tensor(chosen)) is cache
        step = batch([1] * len(chosen), 20)
        got = trunk(cache.offset(step), cache=cache).x
        for i, row in enumerate(chosen):
            alone = wt.Tokens.cat(sample(int(prompt.valid[row].sum()), row), step[i], sequential=True)
            close(got[i : i + 1], trunk(alone).x[:, -1:])
        # the copy is independent
        again = trunk(kept.offset(batch((1, 1, 1), 30)), cache=kept).x
        alone = wt.Tokens.cat(sample(int(prompt.valid[1].sum()), 1), sample(1, 31), sequential=True)
        close(again[1:2], trunk(alone).x[:, -1:])


def test_crop_removes_the_last_tokens(trunks):
    trunk = trunks["llama"]
    t = sample(6, 0)
    with torch.no_grad():
        cache = trunk.cache(batch=1, max_len=6)
        trunk(t, cache=cache)
        cache.crop(3)
        assert cache.length == 3
        close(trunk(cut(t, 3, 6), cache=cache).x, trunk(t).x[:, 3:])
        trunk(t, cache=cache.crop(0))
        with pytest.raises(ValueError, match="expected 0 to 6"):
            cache.crop(7)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=3), splits, st.booleans(), st.booleans())
def test_a_contexts_keys_are_computed_once(lengths, steps, ragged, known):
    trunk = make(cross=True, rope=1, kv_heads=2)
    b = len(lengths)
    context = batch(lengths, 70, "bidirectional")
    prompt = batch(range(2, 2 + b) if ragged else [2] * b)
    if not known:
        context = context.replace(layout=None)
    computed = []
    trunk.blocks[0].cross.kv.register_forward_hook(lambda *_: computed.append(1))
    more = [batch([n] * b, 50 * (i + 1)) for i, n in enumerate(steps)]
    with torch.no_grad():
        cache = trunk.cache(batch=b)
        out = [trunk(prompt, context=context, cache=cache)]
        for i, t in enumerate(more):
            t = cache.offset(t)
            out.append(trunk(t, cache=cache) if i % 2 else trunk(t, context=context, cache=cache))
        assert len(computed) == 1
        rows = [b - 1, 0, 0]
        cache.select(rows)
        step = batch((1, 1, 1), 300)
        selected = trunk(cache.offset(step), cache=cache)
        for i in range(b):
            n = int(prompt.valid[i].sum())
            alone = wt.Tokens.cat(sample(n, i), *(t[i] for t in more), sequential=True)
            want = trunk(alone, context=sample(lengths[i], 70 + i, "bidirectional")).x
            close(torch.cat([o.x[i][o.valid[i]] for o in out])[None], want)
            for j, row in enumerate(rows):
                if row == i:
                    longer = wt.Tokens.cat(alone, step[j], sequential=True)
                    want = trunk(longer, context=sample(lengths[i], 70 + i, "bidirectional")).x[:, -1:]
                    close(selected.x[j : j + 1], want)


def test_gradients_flow_through_a_cache(trunks):
    """Two cached steps give the gradients of one pass."""
    trunk = trunks["rope"]
    t = sample(5, 0)
    grads = []
    for chunks in ([(0, 5)], [(0, 2), (2, 5)], [(0, 3), (3, 4), (4, 5)]):
        x = t.x.clone().requires_grad_()
        cache = trunk.cache(batch=1, max_len=8)
        out = [trunk(cut(t.replace(x=x), a, b), cache=cache).x for a, b in chunks]
        grads.append(torch.autograd.grad(torch.cat(out, 1).square().sum(), x)[0])
    for g in grads[1:]:
        close(g, grads[0], 1e-4)


def test_modes_may_change_between_steps(trunks):
    """Under inference mode, no_grad or autocast alike."""
    trunk, t = trunks["rope"], sample(4, 0)
    want = trunk(t).x
    cache = trunk.cache(batch=1)
    with torch.inference_mode():
        trunk(cut(t, 0, 2), cache=cache)
        close(trunk(cut(t, 2, 4), cache=cache).x, want[:, 2:])
        cache = trunk.cache(batch=1)
        trunk(cut(t, 0, 2), cache=cache)
    with torch.no_grad():
        close(trunk(cut(t, 2, 4), cache=cache).x, want[:, 2:])
    cache = trunk.cache(batch=1, max_len=4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trunk(cut(t, 0, 2), cache=cache)
        got = trunk(cut(t, 2, 4), cache=cache).x
    assert cache.layers[0].v.value.dtype == torch.bfloat16
    assert (got - want[:, 2:]).abs().max() < 0.1


def test_padding_content_is_irrelevant(trunks):
    trunk = trunks["rope"]
    prompt = batch((4, 2))
    hole = ~prompt.valid[..., None]
    foul = prompt.replace(
        x=prompt.x.masked_fill(hole, torch.nan), pos=prompt.pos.masked_fill(hole, torch.nan)
    )
    outs = []
    with torch.no_grad():
        for p in (prompt, foul):
            cache = trunk.cache(batch=2)
            trunk(p, cache=cache)
            outs.append(trunk(cache.offset(batch((2, 2), 9)), cache=cache).x)
    close(outs[0], outs[1], 1e-7)


def test_a_static_cache_allocates_once(trunks):
    trunk = trunks["rope"]
    with torch.no_grad():
        cache, growing = trunk.cache(batch=1, max_len=40), trunk.cache(batch=1)
        addresses, sizes = set(), set()
        for i in range(40):
            trunk(cache.offset(sample(1, i)), cache=cache)
            trunk(growing.offset(sample(1, i)), cache=growing)
            addresses.add(cache.layers[0].k.data.data_ptr())
            sizes.add(growing.layers[0].k.data.shape[1])
        assert len(addresses) == 1 and cache.layers[0].k.data.shape == (1, 40, HEADS, DIM // HEADS)
        assert len(sizes) <= 3  # doubled, not copied at each step
        with pytest.raises(ValueError, match="1 more tokens after 40 are more than max_len=40"):
            trunk(cache.offset(sample(1, 0)), cache=cache)
        assert cache.length == 40


def test_errors_name_the_remedy(trunks):
    trunk = trunks["rope"]
    with pytest.raises(ValueError, match="1 rows and this cache 2"):
        trunk(sample(2, 0), cache=trunk.cache(batch=2))
    with pytest.raises(ValueError, match="expected 1 or more"):
        trunk.cache(batch=0)
    reader = make(cross=True)
    cache = reader.cache(batch=1)
    with torch.no_grad():
        reader(sample(1, 0), context=sample(2, 1, "bidirectional"), cache=cache)
        with pytest.raises(ValueError, match="another context"):
            reader(cache.offset(sample(1, 0)), context=sample(2, 2, "bidirectional"), cache=cache)
