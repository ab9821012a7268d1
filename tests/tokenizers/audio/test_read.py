"""Reading audio: each file format gives the waveform that was written and its true sampling rate; anything else raises."""

import io
import os
import wave as wave_module
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worldtokens.errors import InputError
from worldtokens.tokenizers.audio.read import read_audio
from worldtokens.tokenizers.audio.resample import resample
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer

ASSETS = os.environ.get("WORLDTOKENS_ASSETS")


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
def test_lossless_files_are_decoded_bit_for_bit(encode, tones, form, codec, sample, step):
    x = tones().astype(np.float32)
    got, sample_rate = read_audio(encode(x, form, codec, sample=sample))
    assert sample_rate == 44100 and got.shape == x.shape and got.dtype == torch.float32
    assert np.abs(got.numpy() - x).max() <= step


@pytest.mark.parametrize(
    ("form", "codec", "sample_rate", "sample"),
    [
        ("mp3", "libmp3lame", 44100, "fltp"),
        ("ogg", "libopus", 48000, "flt"),
        ("ipod", "aac", 44100, "fltp"),  # .m4a
        ("matroska", "libopus", 48000, "flt"),
    ],
)
def test_lossy_files_keep_timing_channels_and_scale(encode, form, codec, sample_rate, sample):
    rng = np.random.default_rng(0)
    smooth = np.hanning(64) / 32
    x = np.stack([np.convolve(rng.standard_normal(sample_rate), smooth, "same") for _ in range(2)]) * 0.2
    got, found = read_audio(encode(x, form, codec, sample_rate, sample))
    got = got.numpy()
    assert found == sample_rate and got.shape[0] == 2
    assert x.shape[1] <= got.shape[1] <= x.shape[1] + 1024  # no more than a codec's frame is added at the end
    for ours, true, other in zip(got, x, x[::-1], strict=True):
        ours = ours[: len(true)]
        shift = np.fft.irfft(np.fft.rfft(ours) * np.fft.rfft(true).conj()).argmax()
        assert shift == 0  # the encoder's delay is removed
        assert np.corrcoef(ours, true)[0, 1] > 0.98
        assert abs(np.corrcoef(ours, other)[0, 1]) < 0.2
        assert 0.9 < ours.std() / true.std() < 1.1


def test_packed_stereo_of_16_bits_keeps_its_length_and_channels():
    """Written by another program than FFmpeg: left rises, right is constant."""
    out = io.BytesIO()
    left = np.arange(1000, dtype=np.int16) * 32
    with wave_module.open(out, "wb") as f:
        f.setnchannels(2), f.setsampwidth(2), f.setframerate(8000)
        f.writeframes(np.stack([left, np.full(1000, -16384, np.int16)], 1).tobytes())
    got, sample_rate = read_audio(out.getvalue())
    assert got.shape == (2, 1000) and sample_rate == 8000
    assert torch.equal(got[0], torch.from_numpy(left) / 32768)
    assert torch.equal(got[1], torch.full((1000,), -0.5))


def test_eight_channels_and_192_khz(encode, tones):
    x = tones(192000, 0.2, 8)
    data = encode(x, "wav", "pcm_f32le", 192000, "flt")
    got, sample_rate = read_audio(data)
    assert got.shape == (8, 38400) and sample_rate == 192000
    assert np.abs(got.numpy() - x).max() < 1e-6
    raw = AudioTokenizer(8).read(data)
    assert raw.shape == (3200,)
    ref = resample(torch.from_numpy(x.mean(0)).float(), 192000, 16000)
    assert (raw - ref).abs().max() < 1e-6
    for args in (("ipod", "aac", 48000, "fltp"), ("ogg", "libopus", 48000, "flt")):  # decoded to eight planes
        x = tones(48000, 0.5, 8)
        got, sample_rate = read_audio(encode(x, *args))
        middle = slice(8000, 16000)
        for i, (ours, true) in enumerate(zip(got.numpy(), x, strict=True)):
            if i != 3:  # the 7.1 layout's fourth is the bass channel, which codecs filter
                assert np.corrcoef(ours[middle], true[middle])[0, 1] > 0.99


def test_all_kinds_of_source_give_the_same_waveform(encode, tones, tmp_path):
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
        tok.read(torch.from_numpy(x), sample_rate=16000),
        tok.read(x.astype(np.float64), 16000),
        tok.read(x[:, ::-1][:, ::-1].astype(">f4"), 16000),
        tok.read({"array": x, "sampling_rate": 16000}),
        tok.read(path, sample_rate=16000),
    ]
    for raw in raws:
        assert raw.dtype == torch.float32 and raw.shape == ref.shape
        assert (raw - ref).abs().max() < 1e-6


def test_integers_are_scaled_by_the_range_of_their_type():
    for dtype, low, one in (
        (np.int16, -32768, 16384),
        (np.int32, -(2**31), 2**30),
        (np.uint8, 0, 192),
    ):
        got, _ = read_audio(np.array([low, one], dtype=dtype), 8000)
        assert got.tolist() == [[-1.0, 0.5]]


def test_only_the_first_seconds_are_decoded(encode, tmp_path):
    """Audio cut to half a second equals the start of the whole, and the rest is not read."""
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


def test_a_video_without_audio_raises(encode):
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as c:
        s = c.add_stream("mpeg4", rate=10)
        s.width = s.height = 32
        s.pix_fmt = "yuv420p"
        for _ in range(5):
            c.mux(s.encode(av.VideoFrame(32, 32, "yuv420p")))
        c.mux(s.encode(None))
    with pytest.raises(InputError, match="no audio stream"):
        read_audio(out.getvalue())


BAD_ARRAYS = {
    "no sampling rate": (np.zeros(5), None),
    "sampling rate 0": (np.zeros(5), 0),
    "sampling rate of half a hertz": (np.zeros(5), 16000.5),
    "sampling rate NaN": (np.zeros(5), float("nan")),
    "sampling rate as text": (np.zeros(5), "16000"),
    "(time, channels)": (np.zeros((480, 2)), 16000),
    "three axes": (np.zeros((2, 3, 4)), 16000),
    "no axis": (np.zeros(()), 16000),
    "16-bit scale as float": (np.ones(5) * 2000, 8000),
    "NaN": (np.array([0, np.nan]), 8000),
    "infinite": (np.array([0, np.inf, -np.inf]), 8000),
    "no samples": (np.zeros(0), 8000),
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
def test_arrays_that_are_no_audio_raise(name):
    with pytest.raises(InputError):
        read_audio(*BAD_ARRAYS[name])


def test_sources_that_are_no_audio_raise(tmp_path):
    (tmp_path / "text.wav").write_text("no audio\n" * 50)
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


def test_two_sampling_rates_that_disagree_raise(encode, tones):
    data = encode(tones(48000), "wav", "pcm_s16le", 48000, "s16")
    with pytest.raises(InputError, match="48000 Hz"):
        read_audio(data, 16000)
    with pytest.raises(InputError, match="give one"):
        read_audio((np.zeros(5), 8000), 16000)


FORMS = {
    "wav": ("wav", "pcm_s16le", 16000, "s16"),
    "flac": ("flac", "flac", 16000, "s16"),
    "mp3": ("mp3", "libmp3lame", 16000, "fltp"),
    "opus": ("ogg", "libopus", 48000, "flt"),
    "m4a": ("ipod", "aac", 16000, "fltp"),
}


@pytest.fixture(scope="module")
def files(encode, tones):
    return {k: encode(tones(v[2], 0.1), *v) for k, v in FORMS.items()}


@settings(max_examples=25, deadline=5000)
@given(data=st.data())
@pytest.mark.parametrize("form", FORMS)
def test_flipped_bytes_give_audio_or_input_error(files, form, data):
    """Bytes flipped or removed anywhere: a valid waveform or an InputError."""
    raw = bytearray(files[form])
    for _ in range(data.draw(st.integers(1, 20))):
        # most harm is done in the header
        at = data.draw(st.integers(0, 100) | st.integers(0, len(raw) - 1))
        raw[min(at, len(raw) - 1)] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(1, len(raw)) | st.just(len(raw)))]
    tok = AudioTokenizer(8)
    try:
        waveform = tok.read(bytes(raw))
    except InputError:
        return
    assert waveform.ndim == 1 and 0 < len(waveform) <= tok.max_samples and bool(waveform.isfinite().all())


@pytest.mark.skipif(not ASSETS, reason="WORLDTOKENS_ASSETS names no folder of real data")
def test_real_speech_and_instrument_samples():
    root = Path(ASSETS) / "root"
    names = [p for kind in ("ogg", "wav", "flac") for p in sorted(root.rglob(f"*.{kind}"))[::40]]
    if not names:
        pytest.skip("no audio in the folder")
    tok = AudioTokenizer(8)
    for path in names:
        raw = tok.read(path)
        assert 0 < len(raw) <= tok.max_samples and raw.abs().max() > 1e-3, path
