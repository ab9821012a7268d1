"""Reading clips: a few frames of a film, picked by their time stamps, upright, without decoding the rest.

What is shown at a time is the last frame whose time stamp is not later: that is what a player does, and the only thing
that stays right with a variable frame rate, B-frames or a file that does not know how many frames it has. Getting to a
time means going to the key frame before it; on the way, frames that no other frame needs are passed over undecoded.
Random access gives exactly what decoding everything gives; wherever a file's own index misleads, reading starts over
from further back.

Memory holds the frames that were asked for and the one being decoded, however long the film.
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
MAX_BYTES = 1 << 30  # of all frames of a clip
FAR = 1.0  # seconds: a key frame is sought when the next time asked for is further than this
NEAR = 0.25  # seconds before a wanted time from where every frame is decoded

_BROKEN = (av.FFmpegError, OSError, ValueError, ArithmeticError, LookupError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Which frames of a clip are taken.

    Args:
        frames: how many, spread evenly over the clip (each in the middle of its share of the time), none twice: a clip
            of three frames gives three. With `fps` or `every` the most that are taken, from the start.
        fps: what is shown every 1 / fps seconds; a frame that lasts longer comes again.
        every: each so many-th frame of the file, by count: needs everything up to the last one decoded.
    """

    frames: int = 16
    fps: float | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        if type(self.frames) is not int or self.frames < 1:
            raise InputError(f"frames is {self.frames!r}, expected 1 or more")
        if self.fps is not None and self.every is not None:
            raise InputError("fps and every are two ways to choose frames; give one of them")
        if self.fps is not None and not 0 < self.fps <= 1000:
            raise InputError(f"fps is {self.fps!r}, expected a number above 0, at most 1000")
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise InputError(f"every is {self.every!r}, expected 1 or more")

    def times(self, duration: float) -> list[float]:
        """The seconds after the start at which frames are taken (not for `every`)."""
        if self.fps is not None:
            # a hair's breadth off the end, so that rounding does not take a frame from after it
            return [
                i / self.fps for i in range(min(self.frames, max(1, math.ceil(duration * self.fps - 1e-6))))
            ]
        return [(i + 0.5) * duration / self.frames for i in range(self.frames)]


def read_video(
    source: Any, sampling: Sampling, size: tuple[int, int] | None = None, rate: float = 25.0
) -> tuple[Tensor, Tensor]:
    """Some frames of a clip and when they are shown.

    Args:
        source: a path, bytes or binary file of any kind that FFmpeg knows; or frames: a tensor uint8 (T, 3, H, W) or
            an ndarray uint8 (T, H, W, 3).
        sampling: which frames.
        size: (height, width) in pixels that each frame is scaled to cover, the rest cut off at both sides alike; None
            keeps the clip's own.
        rate: frames per second of frames that were given as an array.

    Returns:
        (frames, seconds): uint8 RGB (T, 3, H, W), upright; float64 (T,), the time stamps of the frames taken, from the
        clip's start; with `fps` the times asked for.

    Raises:
        InputError: it cannot be read, holds no moving image, is damaged, or is too large; names the file.
    """
    if isinstance(source, np.ndarray | Tensor):
        return _from_array(source, sampling, size, rate)
    if isinstance(source, bytes | bytearray | memoryview):
        name, source = f"{len(source)} bytes", io.BytesIO(source)
    elif isinstance(source, str | os.PathLike):
        name = os.fspath(source)
    elif hasattr(source, "read"):
        name = str(getattr(source, "name", type(source).__name__))
    else:
        raise InputError(
            f"a clip was given as {type(source).__name__}, expected a path, bytes, a file or frames"
        )
    container, file = open_media(source, name)
    try:
        film = _Film(container, name)
        check_truncated(container, film.stream, file or source, name)
        return film.take(sampling, size)
    except _BROKEN as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{name}: damaged or cut short, decoding stopped ({e})") from e
    finally:
        container.close()
        if file is not None:
            file.close()


class _Film:
    """The video stream of an open file: `at(seconds)` for rising times."""

    def __init__(self, container: Any, name: str) -> None:
        # a sound file's cover is a video stream too, of one frame
        streams = [
            s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic
        ]
        if not streams or streams[0].codec_context is None:
            kinds = sorted({s.type or "unknown" for s in container.streams})
            raise InputError(f"{name}: holds no moving image that can be decoded; its streams are {kinds}")
        self.container, self.stream, self.name = container, streams[0], name
        self.base = float(self.stream.time_base)
        rate = self.stream.average_rate or self.stream.guessed_rate
        self.step = 1 / float(rate) if rate else 0.04
        self._restart(self.container.decode(self.stream))
        first = next(self.frames, None)
        if first is None:
            raise InputError(f"{name}: holds no frame")
        self._check(first)
        self.start = self._stamp(first)
        self.can_seek = first.pts is not None
        self.ahead = first
        self.far = FAR
        self.until = -math.inf  # before this time stamp, frames that no other needs may be passed over
        self.end: float | None = None  # where the last frame's time is over, once the end was reached

    def _check(self, frame: Any) -> None:
        if frame.width * frame.height > MAX_FRAME_PIXELS:
            raise InputError(
                f"{self.name}: frames of {frame.width} x {frame.height}, more than 8K; scale it down first"
            )

    def _restart(self, frames: Iterator[Any]) -> None:
        self.frames, self.shown, self.ahead = frames, None, None
        self.last, self.passed = None, -math.inf

    def _stamp(self, frame: Any) -> float:
        """Seconds in the file's own clock; frames without a stamp follow the last one at the file's rate."""
        if frame.pts is not None:
            self.last = frame.pts * self.base
        else:
            self.last = 0.0 if self.last is None else self.last + self.step
        return self.last

    def duration(self) -> float:
        """Seconds, from the header; where that does not say, from the packets' stamps, undecoded."""
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

    def take(self, sampling: Sampling, size: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        picked, stamps, total = [], [], 0
        frames = self._counted(sampling) if sampling.every else self._timed(sampling)
        for frame, stamp in frames:
            self._check(frame)
            if picked and picked[-1][0] is frame:
                image = picked[-1][1]
            else:
                image = upright(frame, size)
                total += image.nbytes
            if total > MAX_BYTES:
                raise InputError(
                    f"{self.name}: more than a gigabyte of frames; give `size` or fewer `frames`"
                )
            if picked and image.shape != picked[0][1].shape:
                raise InputError(f"{self.name}: changes its size midway; give `size`, or split it")
            picked.append((frame, image))
            stamps.append(stamp - self.start)
        array = np.stack([image for _, image in picked])
        return torch.from_numpy(array).permute(0, 3, 1, 2), torch.tensor(stamps, dtype=torch.float64)

    def _counted(self, sampling: Sampling) -> Iterator[tuple[Any, float]]:
        taken, frame = 0, self.ahead
        number = 0
        while frame is not None and taken < sampling.frames:
            stamp = self.start if number == 0 else self._stamp(frame)
            if number % sampling.every == 0:
                taken += 1
                yield frame, stamp
            number += 1
            frame = next(self.frames, None)

    def _timed(self, sampling: Sampling) -> list[tuple[Any, float]]:
        duration = self.duration()
        picked = [self.at(self.start + t) for t in sampling.times(duration)]
        # a header may promise more than there is (a sound that goes on, a cut file): spread over what there is
        end = self.end
        if (
            end is not None
            and sampling.fps is None
            and self.start + sampling.times(duration)[-1] > end + self.step
        ):
            self._back_to(self.start)
            picked = [self.at(self.start + t) for t in sampling.times(end - self.start)]
        elif end is not None and sampling.fps is not None:
            times = [t for t in sampling.times(duration) if self.start + t < end - 1e-6] or [0.0]
            picked = picked[: len(times)]
        if sampling.fps is not None:
            return [(frame, self.start + i / sampling.fps) for i, (frame, _) in enumerate(picked)]
        return [
            p
            for p, before in zip(picked, [None, *picked], strict=False)
            if before is None or p[1] > before[1]
        ]

    def at(self, t: float) -> tuple[Any, float]:
        """(the frame shown at t, its time stamp), in the file's own clock; t must not fall."""
        t += 1e-9 + self.base * 1e-3  # a stamp that equals t counts as reached, whatever the rounding
        if self.can_seek and self._position() < t - self.far and self._worth_it(t):
            self._seek(t)
        found = self._walk(t, skip=self.can_seek)
        if self.passed > found[1] and self.passed <= t:
            # a frame that was passed over would have been the one: again, with all of them
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

    def _worth_it(self, t: float) -> bool:
        """Whether the file's index knows a key frame between here and t; without an index, try."""
        entries = self.stream.index_entries
        if len(entries) < 2:
            return True
        at = entries.search_timestamp(int(t / self.base), backward=True)
        return at >= 0 and entries[at].timestamp * self.base > self._position()

    def _seek(self, t: float) -> None:
        """Go to a key frame at or before t."""
        here, back = self._position(), 0.0
        while True:
            target = max(t - back, self.start)
            self._back_to(target)
            key = next((f for f in self.frames if f.key_frame), None)
            if key is not None and self._stamp(key) <= t:
                break
            if target <= self.start:
                # the index has nothing before t: from the beginning, without it
                self.container.seek(0, backward=True)
                self._restart(self._decoded())
                key = next(self.frames, None)
                self.can_seek = False
                break
            back = max(1.0, back * 4)
        self.ahead = key
        if key is not None and self._stamp(key) <= here:
            self.far *= 4  # that cost more than it gained: key frames are further apart

    def _back_to(self, t: float) -> None:
        self.container.seek(int(t / self.base), stream=self.stream, backward=True)
        self._restart(self._decoded())
        self.until = -math.inf

    def _decoded(self) -> Iterator[Any]:
        context = self.stream.codec_context
        for packet in self.container.demux(self.stream):
            stamp = None if packet.pts is None else packet.pts * self.base
            skip = stamp is not None and stamp < self.until
            context.skip_frame = "NONREF" if skip else "DEFAULT"
            if skip:
                self.passed = max(self.passed, stamp)
            yield from packet.decode()

    def _walk(self, t: float, skip: bool) -> tuple[Any, float]:
        self.until = t - NEAR if skip else -math.inf
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


def upright(frame: Any, size: tuple[int, int] | None) -> np.ndarray:
    """A decoded frame -> uint8 RGB (H, W, 3), turned as its display matrix says, scaled and cut to `size`."""
    turns = round(frame.rotation / 90) % 4  # counterclockwise quarter turns
    height, width = (frame.width, frame.height) if turns % 2 else (frame.height, frame.width)
    if size is None:
        to = height, width
    else:
        ratio = max(size[0] / height, size[1] / width)
        to = max(size[0], round(height * ratio)), max(size[1], round(width * ratio))
    if to[0] * to[1] > MAX_FRAME_PIXELS:
        raise InputError(
            f"a frame of {width} x {height} is too thin to cover {size[1]} x {size[0]}; give size=None"
        )
    rows, columns = (to[1], to[0]) if turns % 2 else to
    image = frame.to_ndarray(format="rgb24", width=columns, height=rows, interpolation="BICUBIC")
    image = np.rot90(image, turns)
    if size is not None:
        top, left = (to[0] - size[0]) // 2, (to[1] - size[1]) // 2
        image = image[top : top + size[0], left : left + size[1]]
    return np.ascontiguousarray(image)


def _from_array(
    source: Any, sampling: Sampling, size: tuple[int, int] | None, rate: float
) -> tuple[Tensor, Tensor]:
    name, ndarray = f"frames {tuple(source.shape)}", isinstance(source, np.ndarray)
    axis = 3 if ndarray else 1
    if str(source.dtype).removeprefix("torch.") != "uint8" or source.ndim != 4 or source.shape[axis] != 3:
        raise InputError(
            f"{name} {source.dtype}: expected uint8, a tensor (T, 3, H, W) or an ndarray (T, H, W, 3)"
        )
    if not all(source.shape):
        raise InputError(f"{name}: hold no pixel")
    if not 0 < rate <= 1000:
        raise InputError(
            f"{name}: the rate is {rate!r}, expected frames per second, above 0 and at most 1000"
        )
    x = torch.from_numpy(np.array(source)).permute(0, 3, 1, 2) if ndarray else source.detach().cpu()
    if sampling.every:
        at = list(range(0, len(x), sampling.every))[: sampling.frames]
    else:
        times = sampling.times(len(x) / rate)
        at = [min(len(x) - 1, int(t * rate + 1e-6)) for t in times]
        if sampling.fps is None:
            at = sorted(set(at))
    x = x[at]
    if size is not None and tuple(x.shape[2:]) != tuple(size):
        frames = [
            av.VideoFrame.from_ndarray(f.permute(1, 2, 0).contiguous().numpy(), format="rgb24") for f in x
        ]
        x = torch.from_numpy(np.stack([upright(f, size) for f in frames])).permute(0, 3, 1, 2)
    seconds = torch.tensor(at if sampling.fps is None else times, dtype=torch.float64)
    return x, seconds / rate if sampling.fps is None else seconds
