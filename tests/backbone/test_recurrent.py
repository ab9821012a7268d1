"""Recurrent trunks: parity with torch's layers on single samples, and the rule of visibility."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import worldtokens as wt

DIM = 8
settings.register_profile("wt", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("wt")
TORCHS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


def make(kind, bidirectional=False, depth=2):
    torch.manual_seed(0)
    trunk = wt.Recurrent(kind, DIM, depth, bidirectional=bidirectional).eval()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in trunk.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.2)
    return trunk


@pytest.fixture(scope="module")
def trunks():
    return {(kind, both): make(kind, both) for kind in TORCHS for both in (False, True)}


def sample(n, seed, order="bidirectional"):
    g = torch.Generator().manual_seed(seed)
    t = wt.Tokens(torch.randn(1, n, DIM, generator=g), layout=wt.Layout.simple([n], order))
    return t.causal() if order == "causal" else t


def batch(lengths, seed=0, order="bidirectional"):
    return wt.Tokens.stack([sample(n, seed + i, order) for i, n in enumerate(lengths)])


def close(a, b, tol=1e-5):
    assert a.shape == b.shape
    assert a.numel() == 0 or (a - b).abs().max() < tol


which = st.tuples(st.sampled_from(sorted(TORCHS)), st.booleans())
lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@pytest.mark.parametrize("kind", TORCHS)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_equal_to_torchs_layers(kind, both, depth):
    """A padded batch against torch's layer on each sample: differences below 1e-5, gradients too."""
    trunk = make(kind, both, depth)
    width = DIM // 2 if both else DIM
    ref = TORCHS[kind](DIM, width, depth, batch_first=True, bidirectional=both)
    ref.load_state_dict(trunk.rnn.state_dict())
    t = batch((5, 2, 7))
    x = t.x.clone().requires_grad_()
    got = trunk(t.replace(x=x)).x
    grad, *grads = torch.autograd.grad(got.square().sum(), (x, *trunk.rnn.parameters()))
    sums = [torch.zeros_like(g) for g in grads]
    for i, n in enumerate((5, 2, 7)):
        one = t.x[i : i + 1, :n].clone().requires_grad_()
        want = ref(one)[0]
        close(got[i : i + 1, :n], want)
        own, *parts = torch.autograd.grad(want.square().sum(), (one, *ref.parameters()))
        close(grad[i : i + 1, :n], own)
        sums = [a + b for a, b in zip(sums, parts, strict=True)]
    for a, b in zip(grads, sums, strict=True):
        close(a, b, 1e-4)


def test_an_lstm_by_hand(trunks):
    """The equations of Hochreiter and Schmidhuber's cell with a forget gate."""
    trunk = make("lstm", depth=1)
    p = dict(trunk.rnn.named_parameters())
    t = sample(4, 0)
    h = c = torch.zeros(DIM)
    for i in range(4):
        z = p["weight_ih_l0"] @ t.x[0, i] + p["bias_ih_l0"] + p["weight_hh_l0"] @ h + p["bias_hh_l0"]
        enter, forget, new, leave = z.split(DIM)
        c = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(new)
        h = torch.sigmoid(leave) * torch.tanh(c)
        close(trunk(t).x[0, i], h, 1e-6)


@given(which, lengths, st.integers(6, 15))
def test_packed_rows_equal_one_by_one(trunks, which, ns, max_len):
    trunk = trunks[which]
    alone = [sample(n, i) for i, n in enumerate(ns)]
    packed = wt.pack(alone, max_len)
    x = packed.x.clone().requires_grad_()
    grads = []
    for form in (packed.replace(x=x), packed.replace(x=x, layout=None)):
        out = trunk(form)
        grads.append(
            torch.autograd.grad(out.x.square().sum(), (x, *trunk.parameters()), materialize_grads=True)
        )
        parts = out.replace(layout=packed.layout).unpack()
        for i, one in enumerate(alone):
            close(parts.x[i, : ns[i]], trunk(one).x[0])
        assert (out.x[~packed.valid] == 0).all()
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-4)


@given(which, lengths)
def test_padding_content_is_irrelevant(trunks, which, ns):
    trunk = trunks[which]
    t = batch(ns)
    hole = ~t.valid[..., None]
    x = t.x.masked_fill(hole, torch.nan).requires_grad_()
    for layout in (t.layout, None):
        out = trunk(t.replace(x=x, pos=t.pos.masked_fill(hole, torch.nan), layout=layout)).x
        close(out, trunk(t).x, 1e-6)
        if out.requires_grad:
            (grad,) = torch.autograd.grad(out.square().sum(), x, materialize_grads=True)
            assert (grad[~t.valid] == 0).all() and grad.isfinite().all()


@given(st.sampled_from(sorted(TORCHS)), st.data())
def test_holes_segments_and_blocks_in_any_order(trunks, kind, data):
    """Each segment's valid tokens separately, in order of blocks, left to right inside a block."""
    trunk, n = trunks[kind, False], data.draw(st.integers(1, 7))
    field = lambda high: torch.tensor([data.draw(st.lists(st.integers(0, high), min_size=n, max_size=n))])  # noqa: E731
    t = wt.Tokens(sample(n, 0).x, valid=field(1).bool(), segment=field(1), block=field(2))
    out = trunk(t).x[0]
    for seg in (0, 1):
        places = [i for i in range(n) if t.valid[0, i] and t.segment[0, i] == seg]
        places.sort(key=lambda i: int(t.block[0, i]))
        if places:
            close(out[places], trunk(wt.Tokens(t.x[:, places])).x[0])
    assert (out[~t.valid[0]] == 0).all()


@pytest.mark.parametrize("kind", TORCHS)
def test_a_token_never_depends_on_hidden_tokens(trunks, kind):
    trunk = trunks[kind, False]
    x = sample(6, 0).x.requires_grad_()
    t = wt.Tokens(
        x,
        segment=torch.tensor([[0, 0, 0, 1, 1, 1]]),
        block=torch.tensor([[2, 0, 1, 0, 0, 1]], dtype=torch.int32),
    )
    see = wt.visible(t)[0]
    out = trunk(t).x
    for i in range(6):
        used = torch.autograd.grad(out[0, i].sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0
        assert used[i] and not (used & ~see[i]).any()


def test_a_bidirectional_trunk_accepts_bidirectional_tokens_only(trunks):
    trunk = trunks["gru", True]
    for t in (
        sample(3, 0, "causal"),
        batch((3, 2), 0, "causal"),
        sample(3, 0, "causal").replace(layout=None),
    ):
        with pytest.raises(ValueError, match="not bidirectional"):
            trunk(t)
        trunk(t.bidirectional())
    prefix = wt.Tokens.cat(sample(3, 0), sample(2, 1, "causal"), sequential=True)
    assert prefix.layout.order == "any"
    with pytest.raises(ValueError, match="not bidirectional"):
        trunk(prefix)
    x = sample(4, 0).x.requires_grad_()
    first = trunk(wt.Tokens(x)).x[0, 0]
    assert (torch.autograd.grad(first.sum(), x)[0][0].abs().sum(-1) > 0).all()


@given(
    st.sampled_from(sorted(TORCHS)),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_stepwise_equals_one_pass(trunks, kind, ns, steps):
    """Prompts of different length, then chunks: each row equals one pass over it alone."""
    trunk = trunks[kind, False]
    prompt, more = (
        batch(ns, 0, "causal"),
        [batch([n] * len(ns), 50 * (i + 1), "causal") for i, n in enumerate(steps)],
    )
    with torch.no_grad():
        cache = trunk.cache(batch=len(ns))
        out = [trunk(prompt, cache=cache)]
        for t in more[:-1]:
            out.append(trunk(cache.offset(t), cache=cache))
        kept = cache.copy()
        out.append(trunk(cache.offset(more[-1]), cache=cache))
        assert cache.length == prompt.shape[1] + sum(steps)
        wanted = []
        for i, n in enumerate(ns):
            alone = wt.Tokens.cat(sample(n, i, "causal"), *(t[i] for t in more), sequential=True)
            wanted.append(trunk(alone.replace(layout=None)).x[0])
            close(torch.cat([o.x[i][o.valid[i]] for o in out]), wanted[-1])
        # rows selected as in beam search; the copy is unchanged
        rows = [len(ns) - 1, 0, 0]
        again = trunk(kept.select(rows).offset(more[-1][rows]), cache=kept).x
        for i, row in enumerate(rows):
            close(again[i], wanted[row][-steps[-1] :])


def test_a_new_segment_starts_from_the_initial_state(trunks):
    trunk = trunks["lstm", False]
    a, b = sample(3, 0), sample(2, 1)
    other = b.replace(segment=torch.ones(1, 2), layout=b.layout)
    with torch.no_grad():
        cache = trunk.cache(batch=1)
        trunk(a, cache=cache)
        close(trunk(other, cache=cache.copy()).x, trunk(b).x)
        assert (trunk(b, cache=cache).x - trunk(b).x).abs().max() > 1e-2
        # the state of a packed row is that of its last sample
        packed = wt.pack([a, b], 5)
        cache = trunk.cache(batch=1)
        trunk(packed, cache=cache)
        close(
            trunk(cache.offset(sample(2, 2)), cache=cache).x, trunk(wt.Tokens.cat(b, sample(2, 2))).x[:, 2:]
        )


def test_initial_biases_of_an_lstm(trunks):
    """Jozefowicz et al. 2015: the forget gate's bias starts at 1, every other at 0."""
    rnn = wt.Recurrent("lstm", DIM).rnn
    bias = rnn.bias_ih_l0 + rnn.bias_hh_l0
    assert bias.tolist() == [0.0] * DIM + [1.0] * DIM + [0.0] * 2 * DIM


def test_replaces_a_transformer(tmp_path, trunks):
    torch.manual_seed(0)
    for kind, both in trunks:
        trunk = wt.Recurrent(kind, dim=DIM, depth=2, bidirectional=both, dropout=0.1)
        t = batch((3, 5))
        out = trunk(t)
        assert out.shape == t.shape and out.layout is t.layout and out.valid is t.valid
        out.x.square().sum().backward()
        assert all(p.grad is not None and bool((p.grad != 0).any()) for p in trunk.parameters())
        trunk.save(tmp_path / f"{kind}{both}")
        assert torch.equal(wt.load(tmp_path / f"{kind}{both}")(t).x, trunk.eval()(t).x)


def test_errors_name_the_remedy(trunks):
    with pytest.raises(ValueError, match="expected one of"):
        wt.Recurrent("transformer", DIM)
    with pytest.raises(ValueError, match="divides it"):
        wt.Recurrent("gru", 7, bidirectional=True)
    with pytest.raises(ValueError, match="dim=8"):
        trunks["gru", False](wt.Tokens(torch.zeros(1, 2, 4)))
    with pytest.raises(ValueError, match="no stepwise state"):
        trunks["gru", True](sample(2, 0), cache=trunks["gru", True].cache(batch=1))
    cache = trunks["gru", False].cache(batch=1, max_len=2)
    with pytest.raises(ValueError, match="more than max_len=2"):
        trunks["gru", False](sample(3, 0), cache=cache)
    assert trunks["gru", False](wt.Tokens(torch.zeros(2, 0, DIM))).shape == (2, 0, DIM)
