"""Reader of audio: any file that PyAV (FFmpeg) decodes, or an array -> float (channels, time) and its sampling rate.

`read_audio` always returns the waveform together with its sampling rate. FFmpeg's packed channels (left, right,
left, ...) and integer samples are converted here.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.audio.container import DECODE_ERRORS, check_duration, check_truncated, open_media
from worldtokens.tokenizers.audio.resample import check_sample_rate

MAX_CHANNELS = 64
MAX_SAMPLES = 1 << 27  # per channel; 47 minutes at 48 kHz, 2.3 hours at 16 kHz, half a gigabyte
PEAK = 8.0  # float samples above this are not in [-1, 1] with some overshoot, they are in another scale


def read_audio(
    source: Any, sample_rate: int | None = None, *, mono: bool = False, seconds: float | None = None
) -> tuple[Tensor, int]:
    """One recording from a path, bytes, file, array or tensor.

    Args:
        source: a path, the bytes of a file, a binary file object; or an ndarray / tensor, (time,) or
            (channels, time), float in [-1, 1] or int16 / int32 / uint8; or a pair (array, sample_rate); or a mapping
            with `array` and `sampling_rate`, as Hugging Face's datasets have.
        sample_rate: Hz, required with a bare array. With a file it is the sampling rate that the caller expects.
        mono: average the channels.
        seconds: decode no more than this; None reads all.

    Returns:
        (waveform, sample_rate): float32 (C, T) and Hz. Integers are scaled by their type's range (int16 by 32,768);
        lossy files may overshoot 1 a little and are not clipped.

    Raises:
        InputError: it cannot be read, has no audio stream or no samples, is damaged or cut short, holds NaN, is not
            in [-1, 1], has more than 64 channels or a sampling rate outside 1 to 768 kHz or other than `sample_rate`.
    """
    name, source, own_rate = _parse(source)
    if own_rate is not None and sample_rate is not None and own_rate != sample_rate:
        raise InputError(
            f"{name}: it comes with {own_rate} Hz and `sample_rate` is {sample_rate} Hz; give one of them"
        )
    sample_rate = own_rate if own_rate is not None else sample_rate
    if isinstance(source, np.ndarray | Tensor):
        if sample_rate is None:
            raise InputError(
                f"{name}: an array has no sampling rate; give read(array, sample_rate=...) or (array, sample_rate)"
            )
        sample_rate = check_sample_rate(sample_rate, name)
        waveform = _from_array(source, name)
        if seconds is not None:
            waveform = waveform[:, : max(1, round(seconds * sample_rate))]
        waveform = waveform.mean(0, keepdim=True) if mono else waveform
    else:
        waveform, found = _from_file(source, name, mono, seconds)
        if sample_rate is not None and sample_rate != found:
            raise InputError(
                f"{name}: sampled at {found} Hz, `sample_rate` is {sample_rate} Hz; omit `sample_rate` for files"
            )
        sample_rate = found
    if waveform.shape[1] == 0:
        raise InputError(f"{name}: has no samples; drop the row")
    low, high = (v.item() for v in waveform.aminmax())  # NaN as soon as one sample is
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError(f"{name}: holds NaN or infinite samples; expected float in [-1, 1]")
    if max(-low, high) > PEAK:
        raise InputError(
            f"{name}: samples lie between {low:.4g} and {high:.4g}, expected float in [-1, 1]; give int16 samples as "
            "int16, or divide by 32768"
        )
    return waveform, sample_rate


def _parse(source: Any) -> tuple[str, Any, int | None]:
    """Name of the source for errors, the source without its sampling rate, and that rate."""
    sample_rate = None
    if isinstance(source, Mapping):
        if not {"array", "sampling_rate"} <= set(source):
            raise InputError(
                f"audio as a mapping has the keys {sorted(map(str, source))}, expected 'array' and 'sampling_rate'"
            )
        source = (source["array"], source["sampling_rate"])
    if isinstance(source, tuple):
        if len(source) != 2:
            raise InputError(f"audio as a tuple has {len(source)} items, expected (waveform, sample_rate)")
        source, sample_rate = source
        sample_rate = check_sample_rate(sample_rate, "(waveform, sample_rate)")
        if isinstance(source, list):
            try:
                source = np.asarray(source, dtype=np.float32)
            except (ValueError, TypeError) as e:
                raise InputError(
                    f"(waveform, sample_rate): the waveform is not an array of numbers ({e})"
                ) from e
    if isinstance(source, np.ndarray | Tensor):
        return f"array {tuple(source.shape)}", source, sample_rate
    if isinstance(source, str | os.PathLike):
        return os.fspath(source), source, sample_rate
    if isinstance(source, bytes | bytearray | memoryview):
        return f"{len(source)} bytes", io.BytesIO(source), sample_rate
    if hasattr(source, "read"):
        return str(getattr(source, "name", type(source).__name__)), source, sample_rate
    raise InputError(
        f"audio is a {type(source).__name__}, expected a path, bytes, a binary file, or (array, sample_rate)"
    )


def _from_array(source: np.ndarray | Tensor, name: str) -> Tensor:
    if isinstance(source, np.ndarray):
        if source.dtype.kind not in "fiu":
            raise InputError(
                f"{name}: dtype {source.dtype}, expected float in [-1, 1], int16, int32 or uint8"
            )
        # torch takes neither negative strides nor foreign byte order
        source = torch.from_numpy(np.array(source, dtype=source.dtype.newbyteorder("="), order="C"))
    waveform = source.detach().cpu()
    if waveform.ndim == 1:
        waveform = waveform[None]
    if waveform.ndim != 2 or not 1 <= waveform.shape[0] <= MAX_CHANNELS:
        raise InputError(
            f"{name}: expected (time,) or (channels, time) with 1 to {MAX_CHANNELS} channels; transpose an array of "
            "(time, channels) first"
        )
    if waveform.is_floating_point():
        return waveform.float()
    if waveform.dtype == torch.uint8:
        return (waveform.float() - 128) / 128
    if waveform.dtype in (torch.int16, torch.int32):
        return waveform.float() / -float(torch.iinfo(waveform.dtype).min)
    raise InputError(
        f"{name}: {waveform.dtype} has no known scale; expected float in [-1, 1], int16, int32 or uint8"
    )


def _from_file(source: Any, name: str, mono: bool, seconds: float | None) -> tuple[Tensor, int]:
    container, file = open_media(source, name)
    try:
        streams = container.streams.audio
        if not streams:
            kinds = sorted({s.type or "unknown" for s in container.streams})
            raise InputError(f"{name}: has no audio stream; its streams are {kinds}")
        stream = streams[0]
        if stream.codec_context is None:
            raise InputError(f"{name}: its audio codec is unknown to FFmpeg, or the file is damaged")
        sample_rate = check_sample_rate(stream.codec_context.sample_rate, name)
        limit = MAX_SAMPLES if seconds is None else min(MAX_SAMPLES, max(1, round(seconds * sample_rate)))
        chunks, total = [], 0
        for chunk in _decode(container, stream, name, sample_rate):
            chunks.append(chunk.mean(0, keepdims=True) if mono else chunk)
            total += chunk.shape[1]
            if total >= limit:
                break
        if total > limit and seconds is None:
            raise InputError(f"{name}: longer than {limit:,} samples; read less of it with `seconds`")
        if total < limit:
            check_duration(container, stream, name, total / sample_rate)
            check_truncated(container, stream, file or source, name)
    finally:
        container.close()
        if file is not None:
            file.close()
    if not chunks:
        raise InputError(f"{name}: has no samples; drop the row")
    return torch.from_numpy(np.concatenate(chunks, 1)[:, :limit]), sample_rate


def _decode(container: Any, stream: Any, name: str, sample_rate: int) -> Iterator[np.ndarray]:
    """Float32 (C, n) for every frame of the stream."""
    channels = None
    frames = _interleave_wide(container.decode(stream))
    while True:
        try:
            frame = next(frames)
            count, now = frame.layout.nb_channels, frame.sample_rate
            planar = frame.format.is_planar
            data = frame.to_ndarray()
        except StopIteration:
            return
        except DECODE_ERRORS as e:
            raise InputError(f"{name}: damaged or cut short, decoding stopped ({e})") from e
        if not 1 <= count <= MAX_CHANNELS:
            raise InputError(f"{name}: {count} channels, expected 1 to {MAX_CHANNELS}")
        if (channels or count, sample_rate) != (count, now):
            raise InputError(
                f"{name}: changes from {channels} channels at {sample_rate} Hz to {count} at {now} Hz midway; split it"
            )
        channels = count
        # packed frames come as one row: left, right, left, right
        data = data.reshape(count, -1) if planar else data.reshape(-1, count).T
        yield _to_float(data, name)


def _interleave_wide(frames: Iterator[av.AudioFrame]) -> Iterator[av.AudioFrame]:
    """Interleave planar frames of 8 channels and more.

    PyAV (18.1) finds the planes of a frame by walking a list up to a null that is missing when all 8 entries are
    taken, and crashes the interpreter.
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
    raise InputError(f"{name}: samples of type {data.dtype} are not supported")
