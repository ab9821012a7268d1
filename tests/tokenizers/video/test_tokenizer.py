"""Videos to tokens: tubelets against a convolution, times, factorised attention, and the contract."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import worldtokens as wt
from worldtokens.backbone.transformer import Transformer
from worldtokens.tokenizers.video.tokenizer import VideoTokenizer, by_position, by_time


def frames_of(t, h=32, w=48, seed=0):
    return torch.randint(
        0, 256, (t, 3, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


KINDS = {
    "learned": {"size": 32},
    "own size": {"size": None},
    "sincos, seconds": {"size": None, "positions": "sincos", "time": "seconds"},
    "single frames": {"tubelet": (1, 16, 16), "size": None, "positions": "none"},
    "odd": {"tubelet": (3, 16, 8), "size": None},
}


def make(kind, dim=24, **more):
    torch.manual_seed(0)
    return VideoTokenizer(dim, **{"tubelet": (2, 16, 16), "frames": 8, **KINDS[kind], **more}).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract(kind):
    samples = [frames_of(8), frames_of(20, 40, 56, 1), frames_of(3, 50, 33, 2), frames_of(1, 16, 16, 3)]
    run = wt.testing.check_tokenizer(
        make(kind), samples, bad=[b"", "missing.mp4", torch.zeros(2, 3, 4, 4)], tolerance=2e-5
    )
    assert len(run) == 13


def test_tubelets_equal_a_convolution():
    """The linear layer over tubelets equals ViViT's 3-D convolution on values normalised by hand."""
    tok = make("learned", positions="none", size=None)
    x = frames_of(8)
    conv = nn.Conv3d(3, 24, (2, 16, 16), (2, 16, 16))
    with torch.no_grad():
        conv.weight.copy_(tok.proj.weight.view_as(conv.weight))
        conv.bias.copy_(tok.proj.bias)
        mean, std = (torch.tensor(v).view(3, 1, 1, 1) for v in (tok.mean, tok.std))
        want = conv(((x.transpose(0, 1) / 255 - mean) / std)[None]).flatten(2).mT
        got = tok(tok.collate([x]))
    assert got.shape == (1, 4 * 2 * 3, 24) and (got.x - want).abs().max() < 1e-5
    assert got.pos[0, 6 * 2 + 3 * 1 + 2].tolist() == [2, 1, 2]


@pytest.mark.parametrize(("t", "steps"), [(1, 1), (4, 1), (16, 4), (17, 5), (18, 5)])
def test_frames_that_do_not_fill_a_tubelet_are_padded(t, steps):
    tok = make("own size", tubelet=(4, 16, 16), frames=18)
    x = frames_of(t)
    y = x.clone()
    y[-1] = 255 - y[-1]
    with torch.no_grad():
        a, b = tok(tok.collate([x])), tok(tok.collate([y]))
        filled = tok(tok.collate([torch.cat([x, x[-1:].expand(-t % 4, -1, -1, -1)])]))
    assert a.shape[1] == steps * 6 and torch.equal(a.x, filled.x)
    assert (a.x - b.x)[0, -6:].abs().max() > 1e-2 and torch.equal(a.x[0, :-6], b.x[0, :-6])


def test_time_in_seconds_is_from_the_time_stamps(encode_video):
    tok = VideoTokenizer(24, tubelet=(2, 32, 32), frames=4, size=32, time="seconds")
    raw = tok.read(encode_video())
    assert raw.seconds.tolist() == pytest.approx([0.6, 1.8, 3.0, 4.2], abs=1e-3)
    tokens = tok(tok.collate([raw]).to(torch.bfloat16))
    assert tokens.pos[0, :, 0].tolist() == pytest.approx([1.2, 3.6], abs=1e-3)
    array = tok.read(frames_of(8, 32, 32), fps=2.0)  # 4 s: frames at 0.5, 1.5, 2.5, 3.5 s
    assert array.seconds.tolist() == [0.5, 1.5, 2.5, 3.5]


def test_factorised_attention_separates_space_and_time():
    """By time and by position, outputs equal those of videos split by hand."""
    tok = make("own size")
    raws = [frames_of(8), frames_of(6, 32, 32, 1)]
    batch = tok.collate(raws)
    torch.manual_seed(0)
    trunk = Transformer(24, 2, 2).eval()
    with torch.no_grad():
        tokens = tok(batch)
        space, time = by_time(tokens, batch["grids"]), by_position(tokens, batch["grids"])
        for row, (steps, rows, columns) in enumerate(batch["grids"]):
            grid = tokens.x[row, : steps * rows * columns].view(steps, rows * columns, 24)
            want = trunk(wt.Tokens(x=grid)).x
            got = trunk(space).x[row, : grid.numel() // 24].view_as(grid)
            assert (got - want).abs().max() < 1e-5
            want = trunk(wt.Tokens(x=grid.transpose(0, 1).contiguous())).x
            got = trunk(time).x[row, : grid.numel() // 24].view_as(want)
            assert (got - want).abs().max() < 1e-5
        pooled = trunk(space).pool("mean")
    assert pooled.shape == (4 + 3, 24)
    assert (space.infer_layout().layout.lengths, time.infer_layout().layout.lengths) == (
        space.layout.lengths,
        time.layout.lengths,
    )
    assert time.pos[0, :5].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    "settings",
    [
        {"dim": 0}, {"tubelet": 0}, {"tubelet": (2, 16)}, {"frames": 0}, {"fps": 0}, {"fps": math.nan}, {"every": 0},
        {"fps": 2, "every": 2}, {"size": 0}, {"positions": "sin"}, {"positions": "sincos", "dim": 4}, {"time": "ms"},
        {"std": (1, 1, 0)},
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_raise(settings):
    with pytest.raises(wt.InputError):
        VideoTokenizer(**{"dim": 16, **settings})


def test_a_batch_of_other_tensors_raises():
    tok = make("own size")
    for bad in (
        torch.zeros(2, 3, 8, 8),
        frames_of(2)[:, :2],
        frames_of(2)[:0],
        np.zeros((2, 3, 8, 8), np.uint8),
    ):
        with pytest.raises(wt.InputError, match="video 1"):
            tok.collate([frames_of(2), bad])
    with pytest.raises(wt.InputError, match="no video"):
        tok.collate([])
