"""The Perceiver resampler: parity with its formula, packed rows, no leak between samples."""

import pytest
import torch

import worldtokens as wt
from worldtokens.layout import modality_id

DIM = 16


@pytest.fixture
def resampler():
    torch.manual_seed(0)
    return wt.Resampler(DIM, latents=4, depth=2, heads=2).eval()


def sample(n: int, seed: int = 0) -> wt.Tokens:
    x = torch.randn(1, n, DIM, generator=torch.Generator().manual_seed(seed))
    return wt.Tokens(x=x, layout=wt.Layout.simple([n], "bidirectional"))


def by_hand(model: wt.Resampler, x: torch.Tensor) -> torch.Tensor:
    """The resampler for one sample (n, D), in plain matrix products."""

    def heads_of(t):
        return t.view(len(t), 2, -1).transpose(0, 1)  # (H, n, E)

    def attention(q, k, v):
        q, k, v = heads_of(q), heads_of(k), heads_of(v)
        w = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        return (w @ v).transpose(0, 1).flatten(1)

    latents = model.latents
    for cross, block in zip(model.cross_attentions, model.blocks, strict=True):
        k, v = cross.kv(cross.context_norm(x)).chunk(2, -1)
        latents = latents + cross.proj(attention(cross.q(cross.norm(latents)), k, v))
        q, k, v = block.attn.qkv(block.norm1(latents)).chunk(3, -1)
        latents = latents + block.attn.proj(attention(q, k, v))
        latents = latents + block.mlp(block.norm2(latents))
    return model.norm(latents)


def test_equals_the_plain_formula(resampler):
    t = sample(7)
    out = resampler(t)
    assert out.shape == (1, 4, DIM) and bool(out.valid.all())
    assert (out.x[0] - by_hand(resampler, t.x[0])).abs().max() < 1e-5


def test_batched_and_packed_samples_equal_single_ones(resampler):
    items = [sample(n, seed=n) for n in (7, 2, 5, 1, 9)]
    alone = torch.cat([resampler(t).x for t in items])
    padded = resampler(wt.Tokens.stack(items))
    assert padded.shape == (5, 4, DIM) and bool(padded.valid.all())
    packed = wt.pack(items, 12)
    assert len(packed) < 5
    out = resampler(packed)
    assert [len(r) for r in out.layout.lengths] == [len(r) for r in packed.layout.lengths]
    found = resampler(packed.replace(layout=None))  # the samples are found in the tensors
    back = out.unpack()
    assert len(back) == 5
    for got in (padded.x, back.x, out.replace(x=found.x).unpack().x):
        assert (got - alone).abs().max() < 1e-5
    assert torch.equal(found.valid, out.valid) and torch.equal(
        found.segment[out.valid], out.segment[out.valid]
    )
    assert (out.pool("mean") - alone.mean(1)).abs().max() < 1e-5


def test_latents_keep_the_segment_number_of_their_sample(resampler):
    x = torch.randn(1, 5, DIM)
    segment = torch.tensor([[7, 7, 3, 3, 3]])
    for layout in (None, wt.Layout(((2, 3),), "bidirectional")):
        out = resampler(wt.Tokens(x=x, segment=segment, layout=layout))
        assert out.segment.tolist() == [[7] * 4 + [3] * 4]
        assert (out.x[0, :4] - by_hand(resampler, x[0, :2])).abs().max() < 1e-5
        assert (out.x[0, 4:] - by_hand(resampler, x[0, 2:])).abs().max() < 1e-5


def test_padding_content_and_other_samples_are_irrelevant(resampler):
    packed = wt.pack([sample(3), sample(4, 1), sample(6, 2)], 8)
    ref = resampler(packed)
    x = torch.where(packed.valid[..., None], packed.x, torch.full_like(packed.x, float("nan")))
    assert torch.equal(resampler(packed.replace(x=x)).x, ref.x)
    x = packed.x.clone()
    x[0, :3, 0] += 1.0  # one channel: the norm before the keys removes a common offset
    moved = resampler(packed.replace(x=x)).x
    assert (moved[0, 4:8] - ref.x[0, 4:8]).abs().max() < 1e-6
    assert (moved[0, :4] - ref.x[0, :4]).abs().max() > 1e-3


@pytest.mark.parametrize("with_layout", [True, False])
def test_a_sample_without_valid_tokens_gives_zeros_and_finite_gradients(resampler, with_layout):
    x = torch.full((2, 3, DIM), float("nan"))
    x[0] = 1.0
    x.requires_grad_()
    valid = torch.tensor([[True] * 3, [False] * 3])
    layout = wt.Layout.simple([3, 0], "bidirectional") if with_layout else None
    out = resampler(wt.Tokens(x=x, valid=valid, layout=layout))
    assert out.shape == (2, 4, DIM) and not out.valid[1].any() and out.valid[0].all()
    assert torch.equal(out.x[1], torch.zeros(4, DIM))
    out.x.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in resampler.parameters())


def test_rows_without_tokens(resampler):
    out = resampler(wt.Tokens(x=torch.zeros(2, 0, DIM)))
    assert out.shape == (2, 4, DIM) and not out.valid.any() and not out.x.any()


def test_tokens_of_another_width_need_context_dim():
    torch.manual_seed(0)
    wide = wt.Resampler(DIM, latents=3, depth=1, heads=4, context_dim=24)
    assert wide(wt.Tokens(x=torch.randn(2, 5, 24))).shape == (2, 3, DIM)
    with pytest.raises(ValueError, match="context_dim=16"):
        wide(wt.Tokens(x=torch.randn(2, 5, DIM)))
    with pytest.raises(ValueError, match="latents=0"):
        wt.Resampler(DIM, latents=0)


def test_its_tokens_are_valid_input_of_a_trunk_and_gradients_reach_every_weight(resampler):
    tokens = wt.pack([sample(3), sample(4, 1), sample(6, 2)], 8)
    out = wt.Transformer(DIM, 1, 2)(resampler(tokens))
    assert set(out.modality[out.valid].tolist()) == {modality_id("latents")}
    assert out.pos[0, :8, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    (out.x * torch.randn(out.shape)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in resampler.parameters())


def test_save_and_load(resampler, tmp_path):
    resampler.save(tmp_path / "r")
    t = sample(5)
    assert torch.equal(wt.load(tmp_path / "r")(t).x, resampler(t).x)


def test_training_recovers_the_mean_of_the_tokens():
    """The error is far below that of a constant prediction."""
    torch.manual_seed(0)
    model = wt.Resampler(DIM, latents=2, depth=1, heads=2)
    head = torch.nn.Linear(DIM, DIM)
    params = [*model.parameters(), *head.parameters()]
    opt = torch.optim.AdamW(params, lr=3e-3)
    for _ in range(150):
        x = torch.randn(32, 6, DIM) + torch.randn(32, 1, DIM)
        loss = (head(model(wt.Tokens(x=x)).pool("mean")) - x.mean(1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    x = torch.randn(64, 6, DIM) + torch.randn(64, 1, DIM)
    with torch.no_grad():
        error = (head(model(wt.Tokens(x=x)).pool("mean")) - x.mean(1)).square().mean()
    assert error < 0.5 * x.mean(1).square().mean()
