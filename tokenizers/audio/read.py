"""Reading sound: any file that PyAV (FFmpeg) reads -> float (channels, time) and the rate it was sampled at.

A wave without its rate is half of a sound, so the two never part here: `read_audio` gives both, `resample` asks
for both. What FFmpeg calls packed stereo (left, right, left, ...) and whole-number samples end here too.

Files are always opened by Python and handed to FFmpeg as streams, with its own protocols switched off: a
playlist that somebody named `song.mp3` must not make this process open other files or the network.
"""

from __future__ import annotations

import functools
import io
import math
import os
import stat
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import av
import numpy as np
import torch
import torchaudio
from torch import Tensor

from worldtokens.errors import InputError

MAX_CHANNELS = 64
MIN_RATE, MAX_RATE = 1_000, 768_000  # Hz
MAX_SAMPLES = 1 << 27  # per channel; 47 minutes at 48 kHz, 2.3 hours at 16 kHz, half a gigabyte
PEAK = 8.0  # a float wave above this is not in [-1, 1] with some overshoot, it's in another scale

ENDLESS = 0x7FFF0000  # sizes from here on are what programs write that do not know the length: sox, ffmpeg into a pipe
SLACK = 64  # bytes: some programs count the header in

# What a decoder may raise on a damaged file; av.FFmpegError covers most of it, the others come from PyAV itself.
_BROKEN = (av.FFmpegError, OSError, ValueError, ArithmeticError, LookupError, RuntimeError)


def read_audio(
    source: Any, rate: int | None = None, *, mono: bool = False, seconds: float | None = None
) -> tuple[Tensor, int]:
    """One sound from a path, bytes, file, array or tensor.

    Args:
        source: a path, the bytes of a file, a binary file object; or an ndarray / tensor, (time,) or
            (channels, time), float in [-1, 1] or int16 / int32 / uint8; or a pair (array, rate); or a mapping with
            `array` and `sampling_rate` as Hugging Face's datasets give it.
        rate: Hz, needed with a bare array. With a file it is the rate that the caller expects.
        mono: mean of the channels.
        seconds: decode no more than this; None reads all.

    Returns:
        (wave, rate): float32 (C, T) and Hz. Whole numbers are scaled by their type's range (int16 by 32,768);
        lossy files may overshoot 1 a little and are left so.

    Raises:
        InputError: it cannot be read, holds no sound or no sample, is damaged or cut short, holds NaN, is not
            in [-1, 1], has more than 64 channels or a rate outside 1 to 768 kHz, or is not of the `rate` given.
    """
    name, source, own_rate = _name(source)
    if own_rate is not None and rate is not None and own_rate != rate:
        raise InputError(f"{name}: it says {own_rate} Hz and `rate` says {rate} Hz; give one of them")
    rate = own_rate if own_rate is not None else rate
    if isinstance(source, np.ndarray | Tensor):
        if rate is None:
            raise InputError(
                f"{name}: an array does not know its rate; give read(array, rate=...) or (array, rate)"
            )
        rate = _check_rate(rate, name)
        wave = _from_array(source, name)
        if seconds is not None:
            wave = wave[:, : max(1, round(seconds * rate))]
        wave = wave.mean(0, keepdim=True) if mono else wave
    else:
        wave, found = _from_file(source, name, mono, seconds)
        if rate is not None and rate != found:
            raise InputError(
                f"{name}: sampled at {found} Hz, `rate` says {rate} Hz; leave `rate` out for files"
            )
        rate = found
    if wave.shape[1] == 0:
        raise InputError(f"{name}: holds no sample; leave the row out")
    low, high = (v.item() for v in wave.aminmax())  # NaN as soon as one sample is
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError(f"{name}: holds NaN or infinite samples; expected float in [-1, 1]")
    if max(-low, high) > PEAK:
        raise InputError(
            f"{name}: samples lie between {low:.4g} and {high:.4g}, expected float in [-1, 1]; give int16 samples as "
            "int16, or divide by 32768"
        )
    return wave, rate


def resample(wave: Tensor, rate: int, to: int) -> Tensor:
    """Change the rate by torchaudio's windowed sinc: (..., T) at `rate` Hz -> (..., ceil(T x to / rate)).

    A ratio of large coprime numbers (44,101 to 16,000) would need a filter of gigabytes; it's replaced by the
    nearest one whose filter has a million taps, here two millionths off, at worst a thousandth.
    """
    rate, to = _check_rate(rate, "wave"), _check_rate(to, "wave")
    if rate == to:
        return wave
    ratio = Fraction(to, rate)
    if ratio.numerator * ratio.denominator > 1 << 20:
        wide = max(ratio, 1 / ratio)
        near = wide.limit_denominator(max(1, math.isqrt(int((1 << 20) / wide))))
        ratio = near if ratio > 1 else 1 / near
    with torch.no_grad():
        return _resampler(ratio.denominator, ratio.numerator)(wave.float())


@functools.lru_cache(maxsize=64)
def _resampler(rate: int, to: int) -> torchaudio.transforms.Resample:
    # the transform computes its filter in float64, once; the function does it in float32, at every call
    return torchaudio.transforms.Resample(rate, to)


def _check_rate(rate: Any, name: str) -> int:
    whole = (
        isinstance(rate, int | float | np.integer | np.floating)
        and not isinstance(rate, bool)
        and rate == rate
    )
    if not whole or int(rate) != rate or not MIN_RATE <= rate <= MAX_RATE:
        raise InputError(
            f"{name}: the rate is {rate!r}, expected whole Hz between {MIN_RATE:,} and {MAX_RATE:,}"
        )
    return int(rate)


def _name(source: Any) -> tuple[str, Any, int | None]:
    """What to call it in an error, the source without its rate, and that rate."""
    rate = None
    if isinstance(source, Mapping):
        if not {"array", "sampling_rate"} <= set(source):
            raise InputError(
                f"a sound given as a mapping has the keys {sorted(map(str, source))}, expected 'array' and "
                "'sampling_rate'"
            )
        source = (source["array"], source["sampling_rate"])
    if isinstance(source, tuple):
        if len(source) != 2:
            raise InputError(f"a sound given as a tuple has {len(source)} items, expected (wave, rate)")
        source, rate = source
        rate = _check_rate(rate, "(wave, rate)")
        if isinstance(source, list):
            try:
                source = np.asarray(source, dtype=np.float32)
            except (ValueError, TypeError) as e:
                raise InputError(f"(wave, rate): the wave is not an array of numbers ({e})") from e
    if isinstance(source, np.ndarray | Tensor):
        return f"array {tuple(source.shape)}", source, rate
    if isinstance(source, str | os.PathLike):
        return os.fspath(source), source, rate
    if isinstance(source, bytes | bytearray | memoryview):
        return f"{len(source)} bytes", io.BytesIO(source), rate
    if hasattr(source, "read"):
        return str(getattr(source, "name", type(source).__name__)), source, rate
    raise InputError(
        f"a sound was given as {type(source).__name__}, expected a path, bytes, a binary file, or (array, rate)"
    )


def _from_array(source: np.ndarray | Tensor, name: str) -> Tensor:
    if isinstance(source, np.ndarray):
        if source.dtype.kind not in "fiu":
            raise InputError(
                f"{name}: dtype {source.dtype}, expected float in [-1, 1], int16, int32 or uint8"
            )
        # torch takes neither negative strides nor foreign byte order
        source = torch.from_numpy(np.array(source, dtype=source.dtype.newbyteorder("="), order="C"))
    wave = source.detach().cpu()
    if wave.ndim == 1:
        wave = wave[None]
    if wave.ndim != 2 or not 1 <= wave.shape[0] <= MAX_CHANNELS:
        raise InputError(
            f"{name}: expected (time,) or (channels, time) with 1 to {MAX_CHANNELS} channels; an array of "
            "(time, channels) must be transposed first"
        )
    if wave.is_floating_point():
        return wave.float()
    if wave.dtype == torch.uint8:
        return (wave.float() - 128) / 128
    if wave.dtype in (torch.int16, torch.int32):
        return wave.float() / -float(torch.iinfo(wave.dtype).min)
    raise InputError(
        f"{name}: {wave.dtype} has no known scale; expected float in [-1, 1], int16, int32 or uint8"
    )


def open_media(source: Any, name: str) -> tuple[av.container.InputContainer, Any]:
    """Open a path or binary file with PyAV, FFmpeg's own protocols switched off.

    Returns:
        (container, the file to close after it, or None where the caller owns it).

    Raises:
        InputError: there is no such file, or FFmpeg does not know what it is.
    """
    file = None
    if isinstance(source, str | os.PathLike):
        try:
            mode = os.stat(source).st_mode
            if not stat.S_ISREG(mode):  # a pipe or a device could block, or never end
                kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
                raise InputError(f"{name}: is {kind}, expected a sound or clip")
            file = source = open(source, "rb")  # noqa: SIM115
        except InputError:
            raise
        except (OSError, ValueError) as e:  # ValueError: a NUL in the path
            why = getattr(e, "strerror", None) or e  # an OSError in full would say the path again
            raise InputError(f"{name}: cannot be opened ({why}); expected a file on this machine") from e
    try:
        # "none" is no protocol's name: nested opens are refused, our own stream is not a protocol
        options = {"protocol_whitelist": "none"}
        return av.open(source, "r", container_options=options, metadata_errors="ignore"), file
    except _BROKEN as e:
        if file is not None:
            file.close()
        why = getattr(e, "strerror", None) or e
        raise InputError(f"{name}: not a sound or clip that FFmpeg knows, or damaged ({why})") from e


def _from_file(source: Any, name: str, mono: bool, seconds: float | None) -> tuple[Tensor, int]:
    container, file = open_media(source, name)
    try:
        streams = container.streams.audio
        if not streams:
            kinds = sorted({s.type or "unknown" for s in container.streams})
            raise InputError(f"{name}: holds no sound; its streams are {kinds}")
        stream = streams[0]
        if stream.codec_context is None:
            raise InputError(f"{name}: its sound is in a form that FFmpeg cannot decode, or damaged")
        rate = _check_rate(stream.codec_context.sample_rate, name)
        limit = MAX_SAMPLES if seconds is None else min(MAX_SAMPLES, max(1, round(seconds * rate)))
        parts, total = [], 0
        for part in _decode(container, stream, name, rate):
            parts.append(part.mean(0, keepdims=True) if mono else part)
            total += part.shape[1]
            if total >= limit:
                break
        if total > limit and seconds is None:
            raise InputError(f"{name}: longer than {limit:,} samples; read a part of it with `seconds`")
        if total < limit:
            _check_whole(container, stream, name, total / rate)
            check_promise(container, stream, file or source, name)
    finally:
        container.close()
        if file is not None:
            file.close()
    if not parts:
        raise InputError(f"{name}: holds no sample; leave the row out")
    return torch.from_numpy(np.concatenate(parts, 1)[:, :limit]), rate


def _decode(container: Any, stream: Any, name: str, rate: int) -> Iterator[np.ndarray]:
    """Float32 (C, n) for every frame of the stream."""
    channels = None
    frames = _packed_if_wide(container.decode(stream))
    while True:
        try:
            frame = next(frames)
            count, now = frame.layout.nb_channels, frame.sample_rate
            planar = frame.format.is_planar
            data = frame.to_ndarray()
        except StopIteration:
            return
        except _BROKEN as e:
            raise InputError(f"{name}: damaged or cut short, decoding stopped ({e})") from e
        if not 1 <= count <= MAX_CHANNELS:
            raise InputError(f"{name}: {count} channels, expected 1 to {MAX_CHANNELS}")
        if (channels or count, rate) != (count, now):
            raise InputError(
                f"{name}: changes from {channels} channels at {rate} Hz to {count} at {now} Hz midway; split it"
            )
        channels = count
        # packed frames come as one row: left, right, left, right
        data = data.reshape(count, -1) if planar else data.reshape(-1, count).T
        yield _to_float(data, name)


def _packed_if_wide(frames: Iterator[av.AudioFrame]) -> Iterator[av.AudioFrame]:
    """Interleave planar frames of 8 channels and more.

    PyAV (18.1) finds the planes of a frame by walking a list up to a null that is not there when all 8 places are
    taken, and brings the interpreter down.
    """
    packer = None
    for frame in frames:
        if not frame.format.is_planar or frame.layout.nb_channels < 8:
            yield frame
            continue
        packer = packer or av.AudioResampler(format=frame.format.packed.name)
        yield from packer.resample(frame)
    if packer is not None:
        yield from packer.resample(None)


def _to_float(data: np.ndarray, name: str) -> np.ndarray:
    if data.dtype.kind == "f":
        return np.ascontiguousarray(data, dtype=np.float32)
    if data.dtype == np.uint8:
        return (data.astype(np.float32) - np.float32(128)) / np.float32(128)
    if data.dtype.kind == "i":
        return data.astype(np.float32) * np.float32(2.0 ** (1 - 8 * data.dtype.itemsize))
    raise InputError(f"{name}: samples of type {data.dtype} are not known")


# Containers whose header states the exact length; the others only estimate it.
_EXACT = {"wav", "flac", "aiff", "w64", "caf", "au"}


def check_promise(container: Any, stream: Any, file: Any, name: str) -> None:
    """Refuse a file whose header places samples beyond its end: it was cut short.

    WAV and AVI state the bytes to come, MP4 where each packet lies. FFmpeg reads the first two to where they end without a
    word. Streams (MP3, MPEG-TS, a WAV written into a pipe) promise nothing and give what is there.

    Args:
        container, stream: of an open file; its place is not moved.
        file: the binary file under it; one that cannot seek is not checked.

    Raises:
        InputError: names both lengths, in bytes.
    """
    kind = container.format.name
    if kind not in ("wav", "avi") and "mp4" not in kind:
        return
    try:
        here = file.tell()
        try:
            end = file.seek(0, io.SEEK_END)
            promised = _last_packet(stream) if "mp4" in kind else _riff_end(file)
        finally:
            file.seek(here)
    except (AttributeError, OSError, ValueError):  # no seeking here
        return
    if promised > end + SLACK:
        raise InputError(
            f"{name}: cut short, its header promises {promised:,} bytes and {end:,} are there; get the whole file, or "
            "write what there is anew, e.g. with ffmpeg"
        )


def _last_packet(stream: Any) -> int:
    """The byte after the last packet that an MP4's index knows."""
    entries = stream.index_entries
    last = entries[len(entries) - 1] if len(entries) else None
    return last.pos + last.size if last is not None else 0


def _riff_end(file: Any) -> int:
    """The byte after what a RIFF header promises: a WAV's samples, an AVI's list; 0 where it does not tell."""
    file.seek(0)
    head = file.read(12)
    if head[8:12] == b"AVI ":
        size = int.from_bytes(head[4:8], "little")
        return 8 + size if size < ENDLESS else 0
    if head[:4] not in (b"RIFF", b"RF64", b"BW64") or head[8:12] != b"WAVE":
        return 0
    at, long = 12, 0
    for _ in range(1000):
        file.seek(at)
        chunk = file.read(24)
        if len(chunk) < 8:
            return 0
        size = int.from_bytes(chunk[4:8], "little")
        if chunk[:4] == b"ds64":
            long = int.from_bytes(chunk[16:24], "little")
        if chunk[:4] == b"data":
            size = long if size == 0xFFFFFFFF else size
            return at + 8 + size if size < ENDLESS or long else 0
        at += 8 + size + size % 2
    return 0


def _check_whole(container: Any, stream: Any, name: str, found: float) -> None:
    if container.format.name not in _EXACT or not stream.duration or stream.time_base is None:
        return
    said = float(stream.duration * stream.time_base)
    if found < said - 0.05 - 0.001 * said:
        raise InputError(f"{name}: cut short, the header says {said:.2f} s and {found:.2f} s were found")
