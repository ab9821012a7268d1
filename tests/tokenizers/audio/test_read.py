"""Reading sound: each kind of file gives the wave that was written, at its true rate; the rest is refused by name."""

import io
import os
import struct
import wave as wave_module
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worldtokens.errors import InputError
from worldtokens.tokenizers.audio.read import MAX_CHANNELS, read_audio, resample
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer

ASSETS = os.environ.get("WORLDTOKENS_ASSETS")


def encode(x, form, codec, rate=44100, sample="fltp"):
    """Float (C, T) -> the bytes of a file."""
    layout = {1: "mono", 2: "stereo", 8: "7.1"}[len(x)]
    out = io.BytesIO()
    with av.open(out, "w", format=form) as c:
        s = c.add_stream(codec, rate=rate, layout=layout)
        s.codec_context.format = sample
        packed = np.ascontiguousarray(x.T.reshape(1, -1), dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
        frame.sample_rate = rate
        convert = av.AudioResampler(format=sample, layout=layout, rate=rate)
        fifo = av.AudioFifo()
        for f in convert.resample(frame) + convert.resample(None):
            fifo.write(f)
        at, size = 0, s.codec_context.frame_size or 4096
        while (f := fifo.read(size) or fifo.read(0, True)) is not None:
            f.pts, f.time_base, at = at, Fraction(1, rate), at + f.samples
            c.mux(s.encode(f))
        c.mux(s.encode(None))
    return out.getvalue()


def tones(rate=44100, seconds=0.5, channels=2):
    """A different tone in each channel."""
    t = np.arange(int(rate * seconds)) / rate
    return np.stack([0.5 / (i + 1) * np.sin(2 * np.pi * 300 * (i + 1) * t) for i in range(channels)])


@pytest.mark.parametrize(
    ("form", "codec", "sample", "step"),
    [
        ("wav", "pcm_u8", "u8", 2.0**-7),
        ("wav", "pcm_s16le", "s16", 2.0**-15),
        ("wav", "pcm_s24le", "s32", 2.0**-23),
        ("wav", "pcm_s32le", "s32", 2.0**-24),  # float32 holds 24 bits
        ("wav", "pcm_f32le", "flt", 0),
        ("wav", "pcm_f64le", "dbl", 2.0**-24),
        ("aiff", "pcm_s16be", "s16", 2.0**-15),
        ("flac", "flac", "s16", 2.0**-15),
        ("flac", "flac", "s32", 2.0**-23),
    ],
)
def test_lossless_files_give_the_wave_to_the_last_bit(form, codec, sample, step):
    x = tones().astype(np.float32)
    got, rate = read_audio(encode(x, form, codec, sample=sample))
    assert rate == 44100 and got.shape == x.shape and got.dtype == torch.float32
    assert np.abs(got.numpy() - x).max() <= step


@pytest.mark.parametrize(
    ("form", "codec", "rate", "sample"),
    [
        ("mp3", "libmp3lame", 44100, "fltp"),
        ("ogg", "libopus", 48000, "flt"),
        ("ipod", "aac", 44100, "fltp"),  # .m4a
        ("matroska", "libopus", 48000, "flt"),
    ],
)
def test_lossy_files_keep_time_channels_and_scale(form, codec, rate, sample):
    rng = np.random.default_rng(0)
    smooth = np.hanning(64) / 32
    x = np.stack([np.convolve(rng.standard_normal(rate), smooth, "same") for _ in range(2)]) * 0.2
    got, found = read_audio(encode(x, form, codec, rate, sample))
    got = got.numpy()
    assert found == rate and got.shape[0] == 2
    assert x.shape[1] <= got.shape[1] <= x.shape[1] + 1024  # no more than a codec's frame is added at the end
    for mine, true, other in zip(got, x, x[::-1], strict=True):
        mine = mine[: len(true)]
        shift = np.fft.irfft(np.fft.rfft(mine) * np.fft.rfft(true).conj()).argmax()
        assert shift == 0  # the encoder's delay is taken off
        assert np.corrcoef(mine, true)[0, 1] > 0.98
        assert abs(np.corrcoef(mine, other)[0, 1]) < 0.2
        assert 0.9 < mine.std() / true.std() < 1.1


def test_packed_stereo_of_16_bits_keeps_its_length_and_channels():
    """Written by another program than FFmpeg: left rises, right is constant."""
    out = io.BytesIO()
    left = np.arange(1000, dtype=np.int16) * 32
    with wave_module.open(out, "wb") as f:
        f.setnchannels(2), f.setsampwidth(2), f.setframerate(8000)
        f.writeframes(np.stack([left, np.full(1000, -16384, np.int16)], 1).tobytes())
    got, rate = read_audio(out.getvalue())
    assert got.shape == (2, 1000) and rate == 8000
    assert torch.equal(got[0], torch.from_numpy(left) / 32768)
    assert torch.equal(got[1], torch.full((1000,), -0.5))


def test_eight_channels_and_192_khz():
    x = tones(192000, 0.2, 8)
    data = encode(x, "wav", "pcm_f32le", 192000, "flt")
    got, rate = read_audio(data)
    assert got.shape == (8, 38400) and rate == 192000
    assert np.abs(got.numpy() - x).max() < 1e-6
    raw = AudioTokenizer(8).read(data)
    assert raw.shape == (3200,)
    ref = resample(torch.from_numpy(x.mean(0)).float(), 192000, 16000)
    assert (raw - ref).abs().max() < 1e-6
    for args in (("ipod", "aac", 48000, "fltp"), ("ogg", "libopus", 48000, "flt")):  # decoded to eight planes
        x = tones(48000, 0.5, 8)
        got, rate = read_audio(encode(x, *args))
        middle = slice(8000, 16000)
        for i, (mine, true) in enumerate(zip(got.numpy(), x, strict=True)):
            if i != 3:  # the 7.1 layout's fourth is the bass channel, which codecs filter
                assert np.corrcoef(mine[middle], true[middle])[0, 1] > 0.99


def test_every_way_of_giving_a_sound_gives_the_same(tmp_path):
    x = tones(16000).astype(np.float32)
    data = encode(x, "wav", "pcm_f32le", 16000, "flt")
    path = tmp_path / "x.wav"
    path.write_bytes(data)
    tok = AudioTokenizer(8)
    ref = torch.from_numpy(x.mean(0))
    with open(path, "rb") as f:
        raws = [
            tok.read(s)
            for s in (
                path,
                str(path),
                data,
                bytearray(data),
                io.BytesIO(data),
                f,
                (x, 16000),
                (x.tolist(), 16000),
            )
        ]
        assert not f.closed
    raws += [
        tok.read(torch.from_numpy(x), rate=16000),
        tok.read(x.astype(np.float64), 16000),
        tok.read(x[:, ::-1][:, ::-1].astype(">f4"), 16000),
        tok.read({"array": x, "sampling_rate": 16000}),
        tok.read(path, rate=16000),
    ]
    for raw in raws:
        assert raw.dtype == torch.float32 and raw.shape == ref.shape
        assert (raw - ref).abs().max() < 1e-6


def test_whole_numbers_are_scaled_by_their_type():
    for dtype, low, one in (
        (np.int16, -32768, 16384),
        (np.int32, -(2**31), 2**30),
        (np.uint8, 0, 192),
    ):
        got, _ = read_audio(np.array([low, one], dtype=dtype), 8000)
        assert got.tolist() == [[-1.0, 0.5]]


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000, 44101])
def test_a_tone_is_the_same_tone_at_any_rate(rate):
    """The rate travels with the wave: 440 Hz stays 440 Hz, a second stays a second."""
    tok = AudioTokenizer(8)
    raw = tok.read((np.sin(2 * np.pi * 440 * np.arange(rate) / rate) * 0.5, rate))
    want = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(16000) / 16000)
    assert raw.shape == (16000,)
    assert (raw - want)[200:-200].abs().max() < (5e-3 if rate == 44101 else 2e-3)


def test_an_odd_ratio_needs_no_filter_of_gigabytes():
    wave = torch.sin(torch.arange(767_999 * 2) * 0.001)[None]
    got = resample(wave, 767_999, 16_001)
    assert abs(got.shape[1] / 32_002 - 1) < 1e-3


def test_only_what_is_kept_is_decoded(tmp_path):
    """A sound cut to half a second equals the start of all of it, and the rest is not read."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 44100 * 20)) * 0.1
    data = encode(x, "wav", "pcm_s16le", sample="s16")
    short, full = AudioTokenizer(8, seconds=0.5), AudioTokenizer(8, seconds=None)
    got = short.read(data)
    assert got.shape == (8000,) and got.untyped_storage().nbytes() == 8000 * 4
    assert torch.equal(got, full.read(data)[:8000])

    class Counting(io.BytesIO):
        seen = 0

        def read(self, n=-1):
            got = super().read(n)
            self.seen += len(got)
            return got

    f = Counting(data)
    short.read(f)
    assert f.seen < len(data) / 2


def test_a_clip_gives_its_sound_and_a_picture_is_refused():
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as c:
        s = c.add_stream("mpeg4", rate=10)
        s.width = s.height = 32
        s.pix_fmt = "yuv420p"
        for _ in range(5):
            c.mux(s.encode(av.VideoFrame(32, 32, "yuv420p")))
        c.mux(s.encode(None))
    with pytest.raises(InputError, match="holds no sound"):
        read_audio(out.getvalue())


BAD_ARRAYS = {
    "no rate": (np.zeros(5), None),
    "rate 0": (np.zeros(5), 0),
    "rate of half a hertz": (np.zeros(5), 16000.5),
    "rate NaN": (np.zeros(5), float("nan")),
    "rate as text": (np.zeros(5), "16000"),
    "(time, channels)": (np.zeros((480, 2)), 16000),
    "three axes": (np.zeros((2, 3, 4)), 16000),
    "no axis": (np.zeros(()), 16000),
    "16-bit scale as float": (np.ones(5) * 2000, 8000),
    "NaN": (np.array([0, np.nan]), 8000),
    "infinite": (np.array([0, np.inf, -np.inf]), 8000),
    "no sample": (np.zeros(0), 8000),
    "no channel": (np.zeros((0, 5)), 8000),
    "int64": (np.zeros(5, np.int64), 8000),
    "bool": (np.zeros(5, bool), 8000),
    "complex": (np.zeros(5, complex), 8000),
    "text": (np.array(["a"]), 8000),
    "objects": (np.array([None]), 8000),
    "complex tensor": (torch.zeros(5, dtype=torch.complex64), 8000),
    "bool tensor": (torch.zeros(5, dtype=torch.bool), 8000),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_arrays_that_mean_no_sound_are_refused(name):
    with pytest.raises(InputError):
        read_audio(*BAD_ARRAYS[name])


def test_sources_that_mean_no_sound_are_refused(tmp_path):
    (tmp_path / "text.wav").write_text("not a sound\n" * 50)
    (tmp_path / "empty.wav").write_bytes(b"")
    png = b"\x89PNG\r\n\x1a\n" + bytes(50)
    for source in (
        tmp_path / "text.wav", tmp_path / "empty.wav", tmp_path, tmp_path / "missing.wav", "a\0b", b"", png, None, 7,
        (np.zeros(5),), (np.zeros(5), 8000, 1), {"array": np.zeros(5)}, ([["a"], [1, 2]], 8000), ["x.wav"],
    ):  # fmt: skip
        with pytest.raises(InputError):
            read_audio(source)
    with pytest.raises(InputError, match=r"missing\.wav"):
        read_audio(tmp_path / "missing.wav")


def test_two_rates_that_disagree_are_refused():
    data = encode(tones(48000), "wav", "pcm_s16le", 48000, "s16")
    with pytest.raises(InputError, match="48000 Hz"):
        read_audio(data, 16000)
    with pytest.raises(InputError, match="give one"):
        read_audio((np.zeros(5), 8000), 16000)


def test_files_without_samples_or_cut_short_are_refused():
    with pytest.raises(InputError, match="no sample"):
        read_audio(wav_header(size=0))
    for args in (
        ("wav", "pcm_f32le", 44100, "flt"),
        ("flac", "flac", 44100, "s16"),
        ("ipod", "aac", 44100, "fltp"),
    ):
        data = encode(tones(seconds=2), *args)
        with pytest.raises(InputError, match=r"cut short|damaged"):
            read_audio(data[: len(data) // 2])


def wav_header(channels=1, rate=8000, bits=16, size=1000):
    head = struct.pack(
        "<HHIIHH",
        1,
        channels,
        rate & 0xFFFFFFFF,
        (rate * 2) & 0xFFFFFFFF,
        (channels * bits // 8) & 0xFFFF,
        bits,
    )
    return (
        b"RIFF"
        + struct.pack("<I", 36 + size)
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + head
        + b"data"
        + struct.pack("<I", size)
    )


@pytest.mark.parametrize(
    "head",
    [
        {"rate": 0}, {"rate": 7}, {"rate": 2**31 - 1}, {"channels": 0}, {"channels": MAX_CHANNELS + 1},
        {"channels": 65535}, {"bits": 0}, {"bits": 13},
    ],
    ids=str,
)  # fmt: skip
def test_headers_that_lie_are_refused_or_read_right(head):
    try:
        got, rate = read_audio(wav_header(**head) + bytes(1000))
    except InputError:
        return
    assert rate == 8000 and got.numel() > 0 and bool((got == 0).all())


@pytest.mark.parametrize(
    "text",
    [
        "ffconcat version 1.0\nfile {path}\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nfile://{path}\n#EXT-X-ENDLIST\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    ],
    ids=["concat", "playlist of files", "playlist of addresses", "stream description"],
)
def test_a_file_that_points_elsewhere_opens_nothing(tmp_path, text):
    path = tmp_path / "secret.ts"
    path.write_bytes(encode(tones(), "mpegts", "aac"))
    assert read_audio(path)[1] == 44100
    (tmp_path / "song.mp3").write_text(text.format(path=path))
    with pytest.raises(InputError):
        read_audio(tmp_path / "song.mp3")


FORMS = {
    "wav": ("wav", "pcm_s16le", 16000, "s16"),
    "flac": ("flac", "flac", 16000, "s16"),
    "mp3": ("mp3", "libmp3lame", 16000, "fltp"),
    "opus": ("ogg", "libopus", 48000, "flt"),
    "m4a": ("ipod", "aac", 16000, "fltp"),
}


@pytest.fixture(scope="module")
def files():
    return {k: encode(tones(v[2], 0.1), *v) for k, v in FORMS.items()}


@settings(max_examples=25, deadline=5000)
@given(data=st.data())
@pytest.mark.parametrize("form", FORMS)
def test_flipped_bytes_give_sound_or_input_error(files, form, data):
    """Whatever is flipped or cut: tokens can be made of it, or it's an InputError."""
    raw = bytearray(files[form])
    for _ in range(data.draw(st.integers(1, 20))):
        # the header is where most of the harm is
        at = data.draw(st.integers(0, 100) | st.integers(0, len(raw) - 1))
        raw[min(at, len(raw) - 1)] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(1, len(raw)) | st.just(len(raw)))]
    tok = AudioTokenizer(8)
    try:
        wave = tok.read(bytes(raw))
    except InputError:
        return
    assert wave.ndim == 1 and 0 < len(wave) <= tok.limit and bool(wave.isfinite().all())


@pytest.mark.skipif(not ASSETS, reason="WORLDTOKENS_ASSETS names no folder of real data")
def test_real_voices_samples_and_spoken_captions():
    root = Path(ASSETS) / "root"
    names = [p for kind in ("ogg", "wav", "flac") for p in sorted(root.rglob(f"*.{kind}"))[::40]]
    if not names:
        pytest.skip("no sound in the folder")
    tok = AudioTokenizer(8)
    for path in names:
        raw = tok.read(path)
        assert 0 < len(raw) <= tok.limit and raw.abs().max() > 1e-3, path
