"""Clips to tokens: the right frame at the right time from any kind of file, upright; tubelets that lose nothing."""

import io
import math
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import worldtokens as wt
from worldtokens.backbone.transformer import Transformer
from worldtokens.tokenizers.video import read as clips
from worldtokens.tokenizers.video.read import Sampling, read_video
from worldtokens.tokenizers.video.tokenizer import VideoTokenizer, by_place, by_time

COUNT = 120


def film(form="mp4", codec="libx264", n=COUNT, stamps=None, gop=25, b_frames=2, size=(64, 96)):
    """A clip whose frames carry their number as ten light or dark bars; stamps in milliseconds."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as c:
        s = c.add_stream(codec, rate=25)
        s.height, s.width = size
        s.pix_fmt, s.gop_size, s.max_b_frames = "yuv420p", gop, b_frames
        s.codec_context.time_base = Fraction(1, 1000)
        for i in range(n):
            image = np.full((*size, 3), 20, np.uint8)
            for bit in range(10):
                if i >> bit & 1:
                    image[8 : size[0] - 8, bit * 9 + 3 : bit * 9 + 10] = 230
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.time_base, frame.pts = Fraction(1, 1000), i * 40 if stamps is None else stamps[i]
            c.mux(s.encode(frame))
        c.mux(s.encode(None))
    return out.getvalue()


def numbers(frames):
    """Read the bars: (T, 3, 64, 96) -> T ints."""
    return [
        sum(int(f[0, 20:44, b * 9 + 5 : b * 9 + 8].float().mean() > 120) << b for b in range(10))
        for f in frames
    ]


def uneven():
    """Frames that last between 5 and 400 ms."""
    return np.cumsum(np.random.default_rng(0).integers(5, 400, COUNT)).tolist()


FORMS = [
    ("mp4", "libx264", 2, None), ("mp4", "libx264", 2, "uneven"), ("matroska", "libx264", 3, None),
    ("matroska", "libx264", 3, "uneven"), ("webm", "libvpx", 0, None), ("mpegts", "libx264", 2, None),
    ("mpegts", "libx264", 2, "uneven"), ("avi", "mpeg4", 0, None), ("mp4", "mpeg4", 2, "uneven"),
    ("flv", "libx264", 0, None),
]  # fmt: skip


@pytest.mark.parametrize(("form", "codec", "b_frames", "stamps"), FORMS)
def test_the_frame_shown_at_a_time_whatever_the_file(form, codec, b_frames, stamps):
    """Random access by time stamp gives what decoding everything gives."""
    data = film(form, codec, b_frames=b_frames, stamps=uneven() if stamps else None)
    every, times = read_video(data, Sampling(1000, every=1))
    assert numbers(every) == list(range(COUNT))
    true = np.array(uneven() if stamps else np.arange(COUNT) * 40) / 1000
    true = true - true[0]
    assert np.abs(times.numpy() - true).max() < 2e-3
    for count in (1, 2, 7, 16, 50):  # where one frame fills two shares of the time, it comes once
        frames, at = read_video(data, Sampling(count))
        got = np.array(numbers(frames))
        assert np.abs(at.numpy() - times.numpy()[got]).max() < 1e-6 and (np.diff(got) > 0).all()
        # the middle of each share of a clip that ends with its last frame
        middle = (np.arange(count) + 0.5) / count
        ends = [times[-1].item() + d for d in (0.0, 0.5)]
        low, high = (np.searchsorted(times.numpy(), middle * e, side="right") - 1 for e in ends)
        if len(got) == count:
            assert ((low <= got) & (got <= high + 1)).all()
    frames, at = read_video(data, Sampling(8, fps=4))
    want = np.searchsorted(times.numpy(), np.arange(8) / 4 + 1e-3, side="right") - 1
    assert numbers(frames) == want.tolist()
    assert numbers(read_video(data, Sampling(5, every=7))[0]) == [0, 7, 14, 21, 28]


def test_evenly_spread_frames_by_hand():
    """120 frames of 40 ms are 4.8 s; four shares of 1.2 s have their middles at 0.6, 1.8, 3.0, 4.2 s."""
    frames, at = read_video(film(), Sampling(4))
    assert numbers(frames) == [15, 45, 75, 105]
    assert at.tolist() == pytest.approx([0.6, 1.8, 3.0, 4.2], abs=1e-3)
    # a clip with fewer frames than asked for gives each once; at a rate, what lasts longer comes again
    assert numbers(read_video(film(n=2), Sampling(4))[0]) == [0, 1]
    frames, at = read_video(film(n=2), Sampling(8, fps=50))
    assert numbers(frames) == [0, 0, 1, 1] and at.tolist() == [0.0, 0.02, 0.04, 0.06]
    # at 2 a second, the clip has ten
    assert numbers(read_video(film(), Sampling(100, fps=2))[0]) == [
        min(119, round(i * 12.5 - 0.01)) for i in range(10)
    ]


def test_few_frames_decode_little(monkeypatch):
    """Two frames of 1,000, a key frame every 25: no more than the way from the key frame before each is decoded."""
    decoded = []
    stamp = clips._Film._stamp
    monkeypatch.setattr(clips._Film, "_stamp", lambda film, frame: decoded.append(1) or stamp(film, frame))
    frames, _ = read_video(film(n=1000, gop=25), Sampling(2))
    assert numbers(frames) == [250, 750]
    assert len(decoded) < 60
    assert frames.untyped_storage().nbytes() == 2 * 64 * 96 * 3


def turned(data, matrix):
    """Write a display matrix into an MP4's track header."""
    at = data.index(b"tkhd") + 4 + 40
    return data[:at] + struct.pack(">9i", *matrix) + data[at + 36 :]


ONE, W = 1 << 16, 1 << 30


@pytest.mark.parametrize(
    ("matrix", "turns"),
    [
        ((ONE, 0, 0, 0, ONE, 0, 0, 0, W), 0),
        ((0, ONE, 0, -ONE, 0, 0, 0, 0, W), -1),  # a phone held upright: shown a quarter turn clockwise
        ((-ONE, 0, 0, 0, -ONE, 0, 0, 0, W), 2),
        ((0, -ONE, 0, ONE, 0, 0, 0, 0, W), 1),
    ],
)
def test_phone_clips_come_upright(matrix, turns):
    data = film(n=3)
    plain, _ = read_video(data, Sampling(1))
    frames, _ = read_video(turned(data, matrix), Sampling(1))
    assert frames.shape[2:] == ((96, 64) if turns % 2 else (64, 96))
    assert torch.equal(frames, torch.rot90(plain, turns, (2, 3)))
    small, _ = read_video(turned(data, matrix), Sampling(1), (32, 32))
    assert small.shape == (1, 3, 32, 32)


def test_what_is_no_clip_is_refused(tmp_path):
    sound = io.BytesIO()
    with av.open(sound, "w", format="wav") as c:
        s = c.add_stream("pcm_s16le", rate=8000, layout="mono")
        f = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        f.sample_rate = 8000
        c.mux(s.encode(f))
    (tmp_path / "text.mp4").write_text("not a clip " * 99)
    data = film()
    for bad in (
        sound.getvalue(), tmp_path / "text.mp4", tmp_path / "missing.mp4", tmp_path, b"", None, 3, data[: len(data) // 2],
        np.zeros((4, 3, 8, 8), np.uint8), torch.zeros(4, 8, 8, 3, dtype=torch.uint8), torch.zeros(4, 3, 8, 8),
        torch.zeros(0, 3, 8, 8, dtype=torch.uint8), torch.zeros(3, 8, 8, dtype=torch.uint8),
    ):  # fmt: skip
        with pytest.raises(wt.InputError):
            read_video(bad, Sampling(4))
    with pytest.raises(wt.InputError, match="no moving image"):
        read_video(sound.getvalue(), Sampling(4))


def test_a_file_cut_short_gives_what_is_there():
    """A transport stream may end anywhere: frames are spread over what it holds, or it's refused."""
    data = film("matroska")
    for part in (0.3, 0.6, 0.9):
        try:
            frames, at = read_video(data[: int(len(data) * part)], Sampling(8))
        except wt.InputError:
            continue
        got = numbers(frames)
        assert got == sorted(got) and len(set(got)) == 8 and at[-1] < 4.8 * part + 0.5


@pytest.fixture(scope="module")
def files():
    return {
        form: film(form, codec, n=30)
        for form, codec in (("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4"))
    }


@settings(max_examples=25, deadline=5000)
@given(data=st.data())
@pytest.mark.parametrize("form", ["mp4", "matroska", "avi"])
def test_flipped_bytes_give_frames_or_input_error(files, form, data):
    raw = bytearray(files[form])
    for _ in range(data.draw(st.integers(1, 20))):
        at = data.draw(st.integers(0, 300) | st.integers(0, len(raw) - 1))
        raw[min(at, len(raw) - 1)] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(1, len(raw)) | st.just(len(raw)))]
    try:
        frames, at = read_video(bytes(raw), Sampling(4), (32, 32))
    except wt.InputError:
        return
    assert frames.shape == (len(at), 3, 32, 32) and 1 <= len(at) <= 4


# ---- tokens --------------------------------------------------------------------------------------------------------


def clip(t, h=32, w=48, seed=0):
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
def test_the_contract_of_front_ends(kind):
    samples = [clip(8), clip(20, 40, 56, 1), clip(3, 50, 33, 2), clip(1, 16, 16, 3)]
    run = wt.testing.check_tokenizer(
        make(kind), samples, bad=[b"", "missing.mp4", torch.zeros(2, 3, 4, 4)], tolerance=2e-5
    )
    assert len(run) == 13


def test_tubelets_equal_a_convolution():
    """The linear layer over tubelets is ViViT's 3-D convolution, here on values normalised by hand."""
    tok = make("learned", positions="none", size=None)
    x = clip(8)
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
def test_frames_that_do_not_fill_a_tubelet_are_kept(t, steps):
    tok = make("own size", tubelet=(4, 16, 16), frames=18)
    x = clip(t)
    y = x.clone()
    y[-1] = 255 - y[-1]
    with torch.no_grad():
        a, b = tok(tok.collate([x])), tok(tok.collate([y]))
        filled = tok(tok.collate([torch.cat([x, x[-1:].expand(-t % 4, -1, -1, -1)])]))
    assert a.shape[1] == steps * 6 and torch.equal(a.x, filled.x)
    assert (a.x - b.x)[0, -6:].abs().max() > 1e-2 and torch.equal(a.x[0, :-6], b.x[0, :-6])


def test_time_in_seconds_comes_from_the_stamps():
    tok = VideoTokenizer(24, tubelet=(2, 32, 32), frames=4, size=32, time="seconds")
    raw = tok.read(film())
    assert raw.seconds.tolist() == pytest.approx([0.6, 1.8, 3.0, 4.2], abs=1e-3)
    tokens = tok(tok.collate([raw]).to(torch.bfloat16))
    assert tokens.pos[0, :, 0].tolist() == pytest.approx([1.2, 3.6], abs=1e-3)
    array = tok.read(clip(8, 32, 32), rate=2.0)  # 4 s: frames at 0.5, 1.5, 2.5, 3.5 s
    assert array.seconds.tolist() == [0.5, 1.5, 2.5, 3.5]


def test_factorised_readings_keep_space_and_time_apart():
    """By time, a change in one step stays in that step; by place, in that place; both are what clips cut by hand give."""
    tok = make("own size")
    raws = [clip(8), clip(6, 32, 32, 1)]
    batch = tok.collate(raws)
    torch.manual_seed(0)
    trunk = Transformer(24, 2, 2).eval()
    with torch.no_grad():
        tokens = tok(batch)
        space, time = by_time(tokens, batch["grids"]), by_place(tokens, batch["grids"])
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
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(wt.InputError):
        VideoTokenizer(**{"dim": 16, **settings})


def test_rows_that_are_no_clip_are_named():
    tok = make("own size")
    for bad in (torch.zeros(2, 3, 8, 8), clip(2)[:, :2], clip(2)[:0], np.zeros((2, 3, 8, 8), np.uint8)):
        with pytest.raises(wt.InputError, match="clip 1"):
            tok.collate([clip(2), bad])
    with pytest.raises(wt.InputError, match="no clip"):
        tok.collate([])
