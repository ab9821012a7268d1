"""Reading of videos: the right frame at the right time from any container, upright."""

import io
import struct

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt
from worldtokens.tokenizers.video import read
from worldtokens.tokenizers.video.read import FrameSampling, read_video

COUNT = 120


def numbers(frames):
    """Decode the bars: (T, 3, 64, 96) -> T ints."""
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
def test_random_access_equals_full_decoding(form, codec, b_frames, stamps, encode_video):
    """Frames selected by time stamp equal those of decoding everything, for every container and codec."""
    data = encode_video(form, codec, b_frames=b_frames, stamps=uneven() if stamps else None)
    every, times = read_video(data, FrameSampling(1000, every=1))
    assert numbers(every) == list(range(COUNT))
    true = np.array(uneven() if stamps else np.arange(COUNT) * 40) / 1000
    true = true - true[0]
    assert np.abs(times.numpy() - true).max() < 2e-3
    for count in (1, 2, 7, 16, 50):  # where one frame covers two intervals, it is returned once
        frames, at = read_video(data, FrameSampling(count))
        got = np.array(numbers(frames))
        assert np.abs(at.numpy() - times.numpy()[got]).max() < 1e-6 and (np.diff(got) > 0).all()
        # the centre of each interval of a video that ends with its last frame
        middle = (np.arange(count) + 0.5) / count
        ends = [times[-1].item() + d for d in (0.0, 0.5)]
        low, high = (np.searchsorted(times.numpy(), middle * e, side="right") - 1 for e in ends)
        if len(got) == count:
            assert ((low <= got) & (got <= high + 1)).all()
    frames, at = read_video(data, FrameSampling(8, fps=4))
    want = np.searchsorted(times.numpy(), np.arange(8) / 4 + 1e-3, side="right") - 1
    assert numbers(frames) == want.tolist()
    assert numbers(read_video(data, FrameSampling(5, every=7))[0]) == [0, 7, 14, 21, 28]


def test_evenly_spaced_frames_by_hand(encode_video):
    """120 frames of 40 ms are 4.8 s; four intervals of 1.2 s have their centres at 0.6, 1.8, 3.0, 4.2 s."""
    frames, at = read_video(encode_video(), FrameSampling(4))
    assert numbers(frames) == [15, 45, 75, 105]
    assert at.tolist() == pytest.approx([0.6, 1.8, 3.0, 4.2], abs=1e-3)
    # a video with fewer frames than requested returns each once; at a given fps, frames that last longer are repeated
    assert numbers(read_video(encode_video(n=2), FrameSampling(4))[0]) == [0, 1]
    frames, at = read_video(encode_video(n=2), FrameSampling(8, fps=50))
    assert numbers(frames) == [0, 0, 1, 1] and at.tolist() == [0.0, 0.02, 0.04, 0.06]
    # at 2 per second, the video has ten
    assert numbers(read_video(encode_video(), FrameSampling(100, fps=2))[0]) == [
        min(119, round(i * 12.5 - 0.01)) for i in range(10)
    ]


def test_few_frames_decode_few(monkeypatch, encode_video):
    """Two frames of 1,000, a key frame every 25: only the frames from the key frame before each are decoded."""
    decoded = []
    stamp = read._VideoStream._stamp
    monkeypatch.setattr(
        read._VideoStream, "_stamp", lambda video, frame: decoded.append(1) or stamp(video, frame)
    )
    frames, _ = read_video(encode_video(n=1000, gop=25), FrameSampling(2))
    assert numbers(frames) == [250, 750]
    assert len(decoded) < 60
    assert frames.untyped_storage().nbytes() == 2 * 64 * 96 * 3


def with_matrix(data, matrix):
    """Write a display matrix into an MP4's track header."""
    at = data.index(b"tkhd") + 4 + 40
    return data[:at] + struct.pack(">9i", *matrix) + data[at + 36 :]


ONE, W = 1 << 16, 1 << 30


@pytest.mark.parametrize(
    ("matrix", "turns"),
    [
        ((ONE, 0, 0, 0, ONE, 0, 0, 0, W), 0),
        ((0, ONE, 0, -ONE, 0, 0, 0, 0, W), -1),  # a phone held upright: rotated clockwise by 90 degrees
        ((-ONE, 0, 0, 0, -ONE, 0, 0, 0, W), 2),
        ((0, -ONE, 0, ONE, 0, 0, 0, 0, W), 1),
    ],
)
def test_rotated_videos_are_read_upright(matrix, turns, encode_video):
    data = encode_video(n=3)
    plain, _ = read_video(data, FrameSampling(1))
    frames, _ = read_video(with_matrix(data, matrix), FrameSampling(1))
    assert frames.shape[2:] == ((96, 64) if turns % 2 else (64, 96))
    assert torch.equal(frames, torch.rot90(plain, turns, (2, 3)))
    small, _ = read_video(with_matrix(data, matrix), FrameSampling(1), (32, 32))
    assert small.shape == (1, 3, 32, 32)


def test_other_inputs_raise(tmp_path, encode_video):
    sound = io.BytesIO()
    with av.open(sound, "w", format="wav") as c:
        s = c.add_stream("pcm_s16le", rate=8000, layout="mono")
        f = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        f.sample_rate = 8000
        c.mux(s.encode(f))
    (tmp_path / "text.mp4").write_text("not a video " * 99)
    data = encode_video()
    for bad in (
        sound.getvalue(), tmp_path / "text.mp4", tmp_path / "missing.mp4", tmp_path, b"", None, 3, data[: len(data) // 2],
        np.zeros((4, 3, 8, 8), np.uint8), torch.zeros(4, 8, 8, 3, dtype=torch.uint8), torch.zeros(4, 3, 8, 8),
        torch.zeros(0, 3, 8, 8, dtype=torch.uint8), torch.zeros(3, 8, 8, dtype=torch.uint8),
    ):  # fmt: skip
        with pytest.raises(wt.InputError):
            read_video(bad, FrameSampling(4))
    with pytest.raises(wt.InputError, match="no video stream"):
        read_video(sound.getvalue(), FrameSampling(4))


def test_a_truncated_file_returns_the_frames_it_has(encode_video):
    """A transport stream may end anywhere: frames are spaced over the part that exists, or it raises."""
    data = encode_video("matroska")
    for part in (0.3, 0.6, 0.9):
        try:
            frames, at = read_video(data[: int(len(data) * part)], FrameSampling(8))
        except wt.InputError:
            continue
        got = numbers(frames)
        assert got == sorted(got) and len(set(got)) == 8 and at[-1] < 4.8 * part + 0.5


@pytest.fixture(scope="module")
def files(encode_video):
    return {
        form: encode_video(form, codec, n=30)
        for form, codec in (("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4"))
    }


@settings(max_examples=25, deadline=5000)
@given(data=st.data())
@pytest.mark.parametrize("form", ["mp4", "matroska", "avi"])
def test_corrupted_bytes_give_frames_or_input_error(files, form, data):
    raw = bytearray(files[form])
    for _ in range(data.draw(st.integers(1, 20))):
        at = data.draw(st.integers(0, 300) | st.integers(0, len(raw) - 1))
        raw[min(at, len(raw) - 1)] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(1, len(raw)) | st.just(len(raw)))]
    try:
        frames, at = read_video(bytes(raw), FrameSampling(4), (32, 32))
    except wt.InputError:
        return
    assert frames.shape == (len(at), 3, 32, 32) and 1 <= len(at) <= 4
