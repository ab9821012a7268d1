"""Hostile audio files."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
from cases import case, truncated
from image_cases import encode, noise
from video_cases import video


def wav(
    x: np.ndarray, sample_rate: int = 16000, *, tag: int | None = None, size: int | None = None, **head
) -> bytes:
    """(T,) or (T, C) of int16, uint8 or float32 -> a WAV file; `head` gives false header values."""
    channels, width = (1 if x.ndim == 1 else x.shape[1]), x.itemsize
    tag = tag or (3 if x.dtype.kind == "f" else 1)
    channels, sample_rate = head.get("channels", channels), head.get("sample_rate", sample_rate)
    block = channels * width & 0xFFFF
    fmt = struct.pack(
        "<HHIIHH", tag, channels, sample_rate, sample_rate * block & 0xFFFFFFFF, block, 8 * width
    )
    size = x.nbytes if size is None else size
    body = b"WAVEfmt " + struct.pack("<I", 16) + fmt + b"data" + struct.pack("<I", size) + x.tobytes()
    return b"RIFF" + struct.pack("<I", len(body) & 0xFFFFFFFF) + body


def tone(n: int, sample_rate: int = 16000, channels: int = 1) -> np.ndarray:
    """int16 (n, channels), a sine in the first channel and silence in the others."""
    x = np.zeros((n, channels), np.int16)
    x[:, 0] = np.round(16000 * np.sin(np.arange(n) * 2 * np.pi * 440 / sample_rate))
    return x


def encoded(
    form: str, codec: str, sample_rate: int = 44100, seconds: float = 1.0, sample: str = "fltp"
) -> bytes:
    """A sine in both channels of a stereo file."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as c:
        s = c.add_stream(codec, rate=sample_rate, layout="stereo")
        s.codec_context.format = sample
        x = (
            np.tile(tone(int(sample_rate * seconds), sample_rate), 2).reshape(1, -1).astype(np.float32)
            / 32768
        )
        frame = av.AudioFrame.from_ndarray(x, format="flt", layout="stereo")
        frame.sample_rate = sample_rate
        fifo, convert = av.AudioFifo(), av.AudioResampler(format=sample, layout="stereo", rate=sample_rate)
        for f in convert.resample(frame) + convert.resample(None):
            fifo.write(f)
        at, size = 0, s.codec_context.frame_size or 4096
        while (f := fifo.read(size) or fifo.read(0, True)) is not None:
            f.pts, f.time_base, at = at, Fraction(1, sample_rate), at + f.samples
            c.mux(s.encode(f))
        c.mux(s.encode(None))
    return out.getvalue()


def crc(data: bytes, bits: int, poly: int) -> int:
    value, top = 0, 1 << (bits - 1)
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = (value << 1 ^ (poly if value & top else 0)) & ((1 << bits) - 1)
    return value


def flac_bomb(samples: int, sample_rate: int = 16000) -> bytes:
    """Silence: 65,535 samples in 13 bytes, so that 30 KB decompress to half a gigabyte."""
    info = struct.pack(">HH", 65535, 65535) + bytes(6)
    info += ((sample_rate << 44) | (15 << 36)).to_bytes(8, "big") + bytes(16)  # mono, 16 bits, length unknown
    out = [b"fLaC\x80\0\0\x22" + info]
    for i in range(samples // 65535 + 1):
        number = bytes([i]) if i < 128 else chr(i).encode("utf-8", "surrogatepass")
        start = b"\xff\xf8\x70\x08" + number + struct.pack(">H", 65534)
        start += bytes([crc(start, 8, 7)])
        frame = start + b"\0\0\0"  # one constant, 0
        out.append(frame + struct.pack(">H", crc(frame, 16, 0x8005)))
    return b"".join(out)


def with_nan() -> np.ndarray:
    x = np.zeros(1600, np.float32)
    x[800] = np.nan
    return x


def duration_is(seconds: float) -> Callable:
    return lambda raw: abs(len(raw) / 16000 - seconds) < 0.04


A = "audio"
case(A, "48-khz.wav", 50, lambda: wav(tone(48000), 48000), duration_is(1))
case(A, "192-khz-8-channels.wav", 50, lambda: wav(tone(192000, 192000, 8), 192000), duration_is(1))
case(A, "stereo.wav", 50, lambda: wav(tone(16000, channels=2)), lambda raw: 0.2 < raw.max() < 0.26)
case(A, "stereo.flac", 50, lambda: encoded("flac", "flac", 16000, sample="s16"), duration_is(1))
case(A, "stereo.mp3", 50, lambda: encoded("mp3", "libmp3lame"), duration_is(1))
case(A, "stereo.opus", 50, lambda: encoded("ogg", "libopus", 48000, sample="flt"), duration_is(1))
case(A, "stereo.m4a", 50, lambda: encoded("ipod", "aac", 48000), duration_is(1))
case(A, "8-bit.wav", 50, lambda: wav(np.full(16000, 128, np.uint8)), lambda raw: not raw.any())
for n, expected in ((1, 1), (7, 1), (368, 1), (799, 2), (800, 3), (801, 3)):  # hop 160, then stride 2
    case(A, f"{n}-samples.wav", expected, lambda n=n: wav(tone(n)))
case(A, "0-samples.wav", "no sample", lambda: wav(tone(0)))
case(A, "cut.wav", r"cut short, .* 32,044 bytes and 16,022", truncated(lambda: wav(tone(16000))))
case(A, "cut-8-bit.wav", "cut short", truncated(lambda: wav(np.full(16000, 128, np.uint8))))
case(A, "cut-float.wav", "cut short", truncated(lambda: wav(np.zeros(16000, np.float32))))
case(A, "cut.flac", "cut short|damaged", truncated(lambda: encoded("flac", "flac", sample="s16")))
case(A, "cut.m4a", "damaged", truncated(lambda: encoded("ipod", "aac")))
half = lambda raw: 7000 < len(raw) < 10000  # noqa: E731
case(
    A, "cut.mp3", 24, truncated(lambda: encoded("mp3", "libmp3lame", 16000)), half
)  # the header declares no length: what is there is read
case(A, "into-a-pipe.wav", 50, lambda: wav(tone(16000), size=0xFFFFFFFF), duration_is(1))
case(A, "nan.wav", "NaN", lambda: wav(with_nan()))
case(A, "floats-of-int16.wav", "divide by 32768", lambda: wav(tone(1600).astype(np.float32)))
case(A, "rate-0.wav", "", lambda: wav(tone(1600), sample_rate=0))
case(A, "rate-4-ghz.wav", "", lambda: wav(tone(1600), sample_rate=4_000_000_000))
case(A, "65535-channels.wav", "", lambda: wav(tone(1600), channels=65535))
case(A, "no-channel.wav", "", lambda: wav(tone(1600), channels=0))
case(A, "unknown-codec.wav", "", lambda: wav(tone(1600), tag=0xFACE))
case(A, "empty.mp3", "", lambda: b"")
case(A, "text.mp3", "", lambda: b"la la la\n" * 200)
case(A, "playlist.mp3", "", lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\nhttp://127.0.0.1:9/x.mp3\n")
case(A, "concat.wav", "", lambda: b"ffconcat version 1.0\nfile /dev/zero\n")
case(A, "image.wav", "", lambda: encode(noise(16, 16, 3)))
case(A, "video-without-audio.mp4", "no audio", lambda: video())
case(A, "missing.wav", r"^[^\0]*wav: cannot be opened \(No such file or directory\)", lambda path: None)
case(A, "pipe.wav", "", lambda path: os.mkfifo(path))
case("audio whole", "decompresses.flac", "longer than", lambda: flac_bomb(1 << 27))
# half as many samples, resampled to 16 kHz
case(
    "audio whole",
    "decompresses-at-8-khz.flac",
    "do not fit",
    lambda: flac_bomb((1 << 26) + 65535, 8000),
)
case("audio", "two-hours-of-silence.flac", 1500, lambda: flac_bomb(1 << 27), duration_is(30))
W = "audio wave"
case(W, "75108-samples.wav", 234, lambda: wav(tone(75108)))  # (75108 - 400) // 320 + 1
for n, expected in ((7, 1), (368, 1), (400, 1), (719, 1), (720, 2)):
    case(W, f"{n}-samples.wav", expected, lambda n=n: wav(tone(n)))

case("video", "audio-only.m4a", "no video", lambda: encoded("ipod", "aac"))
case("video", "audio.wav", "no video", lambda: wav(tone(1600)))
