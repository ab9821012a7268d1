"""Reading of videos: a few frames, selected by time stamp, upright, without decoding the others.

The frame at a time is the last one whose time stamp is not later, as in a player: this is right for variable frame
rates, B-frames and files without a frame count. Seeking goes to the key frame before that time and decodes from there;
frames that no other frame references are skipped. Random access returns exactly the frames of decoding everything;
where a file's index is wrong, reading starts again from further back.

Memory holds the selected frames and the one being decoded, however long the video.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.audio.container import check_truncated, open_media

MAX_FRAME_PIXELS = 1 << 26  # twice 8K
MAX_BYTES = 1 << 30  # of all selected frames
SEEK_DISTANCE = 1.0  # seconds: seek to a key frame when the next time is further ahead than this
DECODE_MARGIN = 0.25  # seconds before a requested time within which every frame is decoded

_BROKEN = (av.FFmpegError, OSError, ValueError, ArithmeticError, LookupError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class FrameSampling:
    """Which frames of a video are selected.

    Args:
        frames: number of frames, evenly spaced (at the centres of equal intervals), none twice: a video of three frames
            gives three. With `fps` or `every` the maximum, from the start.
        fps: select the frame shown every 1 / fps seconds; a frame that lasts longer is repeated.
        every: select every n-th frame by count; all frames up to the last selected one are decoded.
    """

    frames: int = 16
    fps: float | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        if type(self.frames) is not int or self.frames < 1:
            raise InputError(f"frames is {self.frames!r}, expected 1 or more")
        if self.fps is not None and self.every is not None:
            raise InputError("fps and every exclude each other; give one of them")
        if self.fps is not None and not 0 < self.fps <= 1000:
            raise InputError(f"fps is {self.fps!r}, expected a number above 0, at most 1000")
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise InputError(f"every is {self.every!r}, expected 1 or more")

    def times(self, duration: float) -> list[float]:
        """Seconds after the start at which frames are selected (not for `every`)."""
        if self.fps is not None:
            # slightly before the end, so that rounding does not select a frame behind it
            count = min(self.frames, max(1, math.ceil(duration * self.fps - 1e-6)))
            return [i / self.fps for i in range(count)]
        return [(i + 0.5) * duration / self.frames for i in range(self.frames)]


def read_video(
    source: Any, sampling: FrameSampling, size: tuple[int, int] | None = None, fps: float = 25.0
) -> tuple[Tensor, Tensor]:
    """Selected frames of a video and their time stamps.

    Args:
        source: a path, bytes or binary file in any format of FFmpeg; or frames: a tensor uint8 (T, 3, H, W) or an
            ndarray uint8 (T, H, W, 3).
        sampling: which frames to select.
        size: (height, width) in pixels; each frame is scaled to cover it and centre-cropped. None: the video's own.
        fps: frame rate of frames given as an array.

    Returns:
        (frames, seconds): uint8 RGB (T, 3, H, W), upright; float64 (T,), time stamps from the start of the video; with
        `FrameSampling.fps` the requested times.

    Raises:
        InputError: it cannot be read, has no video stream, is damaged, or is too large; names the file.
    """
    if isinstance(source, np.ndarray | Tensor):
        return _from_array(source, sampling, size, fps)
    if isinstance(source, bytes | bytearray | memoryview):
        name, source = f"{len(source)} bytes", io.BytesIO(source)
    elif isinstance(source, str | os.PathLike):
        name = os.fspath(source)
    elif hasattr(source, "read"):
        name = str(getattr(source, "name", type(source).__name__))
    else:
        raise InputError(
            f"a video was given as {type(source).__name__}, expected a path, bytes, a file or frames"
        )
    container, file = open_media(source, name)
    try:
        video = _VideoStream(container, name)
        check_truncated(container, video.stream, file or source, name)
        return video.select(sampling, size)
    except _BROKEN as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{name}: damaged or cut short, decoding stopped ({e})") from e
    finally:
        container.close()
        if file is not None:
            file.close()


class _VideoStream:
    """The video stream of an open file; `at(seconds)` must be called with increasing times."""

    def __init__(self, container: Any, name: str) -> None:
        # the cover image of an audio file is a video stream of one frame
        streams = [
            s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic
        ]
        if not streams or streams[0].codec_context is None:
            kinds = sorted({s.type or "unknown" for s in container.streams})
            raise InputError(f"{name}: has no video stream that can be decoded; its streams are {kinds}")
        self.container, self.stream, self.name = container, streams[0], name
        self.base = float(self.stream.time_base)
        rate = self.stream.average_rate or self.stream.guessed_rate
        self.step = 1 / float(rate) if rate else 0.04
        self._restart(self.container.decode(self.stream))
        first = next(self.frames, None)
        if first is None:
            raise InputError(f"{name}: has no frames")
        self._check(first)
        self.start = self._stamp(first)
        self.can_seek = first.pts is not None
        self.ahead = first
        self.seek_distance = SEEK_DISTANCE
        self.skip_until = -math.inf  # before this time stamp, frames that no other references may be skipped
        self.end: float | None = None  # end of the last frame, once it has been reached

    def _check(self, frame: Any) -> None:
        if frame.width * frame.height > MAX_FRAME_PIXELS:
            raise InputError(
                f"{self.name}: frames of {frame.width} x {frame.height}, more than 8K; downscale it first"
            )

    def _restart(self, frames: Iterator[Any]) -> None:
        self.frames, self.shown, self.ahead = frames, None, None
        self.last, self.skipped = None, -math.inf

    def _stamp(self, frame: Any) -> float:
        """Seconds on the file's clock; a frame without a time stamp follows the last one at the file's frame rate."""
        if frame.pts is not None:
            self.last = frame.pts * self.base
        else:
            self.last = 0.0 if self.last is None else self.last + self.step
        return self.last

    def duration(self) -> float:
        """Seconds, from the header, else from the time stamps of the packets without decoding."""
        if self.stream.duration:
            return self.stream.duration * self.base
        if self.container.duration:
            return self.container.duration / av.time_base
        end = self.start + self.step
        for packet in self.container.demux(self.stream):
            if packet.pts is not None:
                end = max(
                    end, (packet.pts + (packet.duration or 0)) * self.base, packet.pts * self.base + self.step
                )
        self._back_to(self.start)
        return end - self.start

    def select(self, sampling: FrameSampling, size: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        selected, stamps, total = [], [], 0
        frames = self._counted(sampling) if sampling.every else self._timed(sampling)
        for frame, stamp in frames:
            self._check(frame)
            if selected and selected[-1][0] is frame:
                image = selected[-1][1]
            else:
                image = frame_to_rgb(frame, size)
                total += image.nbytes
            if total > MAX_BYTES:
                raise InputError(
                    f"{self.name}: more than a gigabyte of frames; give `size` or fewer `frames`"
                )
            if selected and image.shape != selected[0][1].shape:
                raise InputError(
                    f"{self.name}: the frame size changes within the video; give `size`, or split it"
                )
            selected.append((frame, image))
            stamps.append(stamp - self.start)
        array = np.stack([image for _, image in selected])
        return torch.from_numpy(array).permute(0, 3, 1, 2), torch.tensor(stamps, dtype=torch.float64)

    def _counted(self, sampling: FrameSampling) -> Iterator[tuple[Any, float]]:
        count, number, frame = 0, 0, self.ahead
        while frame is not None and count < sampling.frames:
            stamp = self.start if number == 0 else self._stamp(frame)
            if number % sampling.every == 0:
                count += 1
                yield frame, stamp
            number += 1
            frame = next(self.frames, None)

    def _timed(self, sampling: FrameSampling) -> list[tuple[Any, float]]:
        duration = self.duration()
        selected = [self.at(self.start + t) for t in sampling.times(duration)]
        # a header may declare more than there is (a longer audio stream, a truncated file): use the actual end
        end = self.end
        if (
            end is not None
            and sampling.fps is None
            and self.start + sampling.times(duration)[-1] > end + self.step
        ):
            self._back_to(self.start)
            selected = [self.at(self.start + t) for t in sampling.times(end - self.start)]
        elif end is not None and sampling.fps is not None:
            times = [t for t in sampling.times(duration) if self.start + t < end - 1e-6] or [0.0]
            selected = selected[: len(times)]
        if sampling.fps is not None:
            return [(frame, self.start + i / sampling.fps) for i, (frame, _) in enumerate(selected)]
        return [
            p
            for p, before in zip(selected, [None, *selected], strict=False)
            if before is None or p[1] > before[1]
        ]

    def at(self, t: float) -> tuple[Any, float]:
        """(the frame shown at t, its time stamp), on the file's clock; t must not decrease."""
        t += 1e-9 + self.base * 1e-3  # a time stamp equal to t counts as reached despite rounding
        if self.can_seek and self._position() < t - self.seek_distance and self._has_key_frame(t):
            self._seek(t)
        found = self._walk(t, skip=self.can_seek)
        if self.skipped > found[1] and self.skipped <= t:
            # the frame at t was skipped: again, decoding all
            self._seek(t)
            found = self._walk(t, skip=False)
        return found

    def _position(self) -> float:
        if self.ahead is not None:
            return self.ahead_stamp
        return -math.inf if self.shown is None else self.shown[1]

    @property
    def ahead_stamp(self) -> float:
        return self.start if self.ahead.pts is None else self.ahead.pts * self.base

    def _has_key_frame(self, t: float) -> bool:
        """Whether the index lists a key frame between the current position and t; True without an index."""
        entries = self.stream.index_entries
        if len(entries) < 2:
            return True
        at = entries.search_timestamp(int(t / self.base), backward=True)
        return at >= 0 and entries[at].timestamp * self.base > self._position()

    def _seek(self, t: float) -> None:
        """Go to the key frame at or before t."""
        here, back = self._position(), 0.0
        while True:
            target = max(t - back, self.start)
            self._back_to(target)
            key = next((f for f in self.frames if f.key_frame), None)
            if key is not None and self._stamp(key) <= t:
                break
            if target <= self.start:
                # the index has no entry before t: from the beginning, without it
                self.container.seek(0, backward=True)
                self._restart(self._decoded())
                key = next(self.frames, None)
                self.can_seek = False
                break
            back = max(1.0, back * 4)
        self.ahead = key
        if key is not None and self._stamp(key) <= here:
            self.seek_distance *= 4  # key frames are further apart than that

    def _back_to(self, t: float) -> None:
        self.container.seek(int(t / self.base), stream=self.stream, backward=True)
        self._restart(self._decoded())
        self.skip_until = -math.inf

    def _decoded(self) -> Iterator[Any]:
        context = self.stream.codec_context
        for packet in self.container.demux(self.stream):
            stamp = None if packet.pts is None else packet.pts * self.base
            skip = stamp is not None and stamp < self.skip_until
            context.skip_frame = "NONREF" if skip else "DEFAULT"
            if skip:
                self.skipped = max(self.skipped, stamp)
            yield from packet.decode()

    def _walk(self, t: float, skip: bool) -> tuple[Any, float]:
        self.skip_until = t - DECODE_MARGIN if skip else -math.inf
        while True:
            frame = self.ahead if self.ahead is not None else next(self.frames, None)
            self.ahead = None
            if frame is None:
                if self.shown is None:
                    raise InputError(f"{self.name}: damaged, no frame at {t - self.start:.2f} s")
                frame, stamp = self.shown
                self.end = stamp + ((frame.duration or 0) * self.base or self.step)
                return self.shown
            stamp = self._stamp(frame)
            if stamp > t and self.shown is not None:
                self.ahead = frame
                return self.shown
            if stamp > t:  # before the first frame
                self.ahead = frame
                return frame, stamp
            self.shown = (frame, stamp)


def frame_to_rgb(frame: Any, size: tuple[int, int] | None) -> np.ndarray:
    """A decoded frame -> uint8 RGB (H, W, 3), rotated by its display matrix, scaled and centre-cropped to `size`."""
    turns = round(frame.rotation / 90) % 4  # counterclockwise quarter turns
    height, width = (frame.width, frame.height) if turns % 2 else (frame.height, frame.width)
    if size is None:
        scaled = height, width
    else:
        ratio = max(size[0] / height, size[1] / width)
        scaled = max(size[0], round(height * ratio)), max(size[1], round(width * ratio))
    if scaled[0] * scaled[1] > MAX_FRAME_PIXELS:
        raise InputError(
            f"a frame of {width} x {height} is too thin to cover {size[1]} x {size[0]}; give size=None"
        )
    rows, columns = scaled[::-1] if turns % 2 else scaled
    image = frame.to_ndarray(format="rgb24", width=columns, height=rows, interpolation="BICUBIC")
    image = np.rot90(image, turns)
    if size is not None:
        top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
        image = image[top : top + size[0], left : left + size[1]]
    return np.ascontiguousarray(image)


def _from_array(
    source: Any, sampling: FrameSampling, size: tuple[int, int] | None, fps: float
) -> tuple[Tensor, Tensor]:
    name, ndarray = f"frames {tuple(source.shape)}", isinstance(source, np.ndarray)
    axis = 3 if ndarray else 1
    if str(source.dtype).removeprefix("torch.") != "uint8" or source.ndim != 4 or source.shape[axis] != 3:
        raise InputError(
            f"{name} {source.dtype}: expected uint8, a tensor (T, 3, H, W) or an ndarray (T, H, W, 3)"
        )
    if not all(source.shape):
        raise InputError(f"{name}: have no pixels")
    if not 0 < fps <= 1000:
        raise InputError(f"{name}: fps is {fps!r}, expected frames per second, above 0 and at most 1000")
    x = torch.from_numpy(np.array(source)).permute(0, 3, 1, 2) if ndarray else source.detach().cpu()
    if sampling.every:
        index = list(range(0, len(x), sampling.every))[: sampling.frames]
    else:
        times = sampling.times(len(x) / fps)
        index = [min(len(x) - 1, int(t * fps + 1e-6)) for t in times]
        if sampling.fps is None:
            index = sorted(set(index))
    x = x[index]
    if size is not None and tuple(x.shape[2:]) != tuple(size):
        frames = [
            av.VideoFrame.from_ndarray(f.permute(1, 2, 0).contiguous().numpy(), format="rgb24") for f in x
        ]
        x = torch.from_numpy(np.stack([frame_to_rgb(f, size) for f in frames])).permute(0, 3, 1, 2)
    seconds = torch.tensor(index if sampling.fps is None else times, dtype=torch.float64)
    return x, seconds / fps if sampling.fps is None else seconds
