"""Media files by PyAV (FFmpeg), shared by audio and video: opening them safely, and detecting truncated ones.

Files are always opened by Python and passed to FFmpeg as streams, with FFmpeg's own protocols switched off: a playlist
named `song.mp3` must not make this process open other files or the network.
"""

from __future__ import annotations

import io
import os
import stat
from typing import Any

import av

from worldtokens.errors import InputError

# sizes from here on are written by programs that do not know the length: sox, or ffmpeg into a pipe
UNKNOWN_SIZE = 0x7FFF0000
SLACK = 64  # bytes: some programs count the header in

# What a decoder may raise on a damaged file; av.FFmpegError covers most of it, the others come from PyAV itself.
DECODE_ERRORS = (av.FFmpegError, OSError, ValueError, ArithmeticError, LookupError, RuntimeError)


def open_media(source: Any, name: str) -> tuple[av.container.InputContainer, Any]:
    """Open a path or binary file with PyAV, FFmpeg's own protocols switched off.

    Returns:
        (container, the file to close after it, or None where the caller owns it).

    Raises:
        InputError: there is no such file, or FFmpeg does not know its format.
    """
    file = None
    if isinstance(source, str | os.PathLike):
        try:
            mode = os.stat(source).st_mode
            if not stat.S_ISREG(mode):  # a pipe or a device could block, or never end
                kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
                raise InputError(f"{name}: is {kind}, expected an audio or video file")
            file = source = open(source, "rb")  # noqa: SIM115
        except InputError:
            raise
        except (OSError, ValueError) as e:  # ValueError: a NUL in the path
            why = getattr(e, "strerror", None) or e  # a full OSError would repeat the path
            raise InputError(f"{name}: cannot be opened ({why}); expected a file on this machine") from e
    try:
        # "none" is no protocol's name: nested opens are refused; our own stream is not a protocol
        options = {"protocol_whitelist": "none"}
        return av.open(source, "r", container_options=options, metadata_errors="ignore"), file
    except DECODE_ERRORS as e:
        if file is not None:
            file.close()
        why = getattr(e, "strerror", None) or e
        raise InputError(f"{name}: no audio or video format that FFmpeg knows, or damaged ({why})") from e


def check_truncated(container: Any, stream: Any, file: Any, name: str) -> None:
    """Raise for a file whose header declares data beyond the end of the file.

    WAV and AVI headers give a number of bytes, an MP4 index the offset of each packet. FFmpeg decodes the first two up
    to the end of the file without an error. Streams (MP3, MPEG-TS, a WAV written into a pipe) declare no size and are
    decoded as far as they go.

    Args:
        container, stream: of an open file; its position is not changed.
        file: the binary file under it; one that cannot seek is not checked.

    Raises:
        InputError: names both sizes, in bytes.
    """
    kind = container.format.name
    if kind not in ("wav", "avi") and "mp4" not in kind:
        return
    try:
        here = file.tell()
        try:
            end = file.seek(0, io.SEEK_END)
            declared = _mp4_end(stream) if "mp4" in kind else _riff_end(file)
        finally:
            file.seek(here)
    except (AttributeError, OSError, ValueError):  # cannot seek
        return
    if declared > end + SLACK:
        raise InputError(
            f"{name}: cut short, its header declares {declared:,} bytes and {end:,} are there; get the whole file, or "
            "re-encode what is there, e.g. with ffmpeg"
        )


def _mp4_end(stream: Any) -> int:
    """Offset of the byte after the last packet in an MP4's index."""
    entries = stream.index_entries
    last = entries[len(entries) - 1] if len(entries) else None
    return last.pos + last.size if last is not None else 0


def _riff_end(file: Any) -> int:
    """Offset of the byte after the data that a RIFF header declares: a WAV's samples, an AVI's list; 0 if unknown."""
    file.seek(0)
    head = file.read(12)
    if head[8:12] == b"AVI ":
        size = int.from_bytes(head[4:8], "little")
        return 8 + size if size < UNKNOWN_SIZE else 0
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
            return at + 8 + size if size < UNKNOWN_SIZE or long else 0
        at += 8 + size + size % 2
    return 0


# Containers whose header declares the exact duration; the others only estimate it.
_EXACT = {"wav", "flac", "aiff", "w64", "caf", "au"}


def check_duration(container: Any, stream: Any, name: str, seconds: float) -> None:
    """Raise if fewer `seconds` were decoded than the header of a WAV, FLAC, AIFF, W64, CAF or AU file declares.

    Raises:
        InputError: names both durations.
    """
    if container.format.name not in _EXACT or not stream.duration or stream.time_base is None:
        return
    declared = float(stream.duration * stream.time_base)
    if seconds < declared - 0.05 - 0.001 * declared:
        raise InputError(
            f"{name}: cut short, the header declares {declared:.2f} s and {seconds:.2f} s were decoded"
        )
