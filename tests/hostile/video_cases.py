"""Hostile videos."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
from cases import case, truncated
from image_cases import halves, head, png, upright


def video(
    form: str = "mp4", codec: str = "libx264", n: int = 24, size=(32, 64), stamps=None, fast=False
) -> bytes:
    """Frames that are red on the left and blue on the right, at 25 frames per second or at `stamps` in milliseconds."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as c:
        s = c.add_stream(codec, rate=25)
        s.height, s.width = size
        s.pix_fmt = "yuv420p"
        s.codec_context.time_base = Fraction(1, 1000)
        for i in range(n):
            frame = av.VideoFrame.from_ndarray(halves(size[1], size[0]), format="rgb24")
            frame.time_base, frame.pts = Fraction(1, 1000), i * 40 if stamps is None else stamps[i]
            c.mux(s.encode(frame))
        c.mux(s.encode(None))
    return out.getvalue()


def repeated(n: int) -> bytes:
    """n frames of 640 x 480: the packets of one second, repeated."""
    with av.open(io.BytesIO(video(n=25, size=(480, 640))), "r") as source:
        stream = source.streams.video[0]
        packets = [p for p in source.demux(stream) if p.size]
        second = round(1 / stream.time_base)
        out = io.BytesIO()
        with av.open(out, "w", format="mp4") as c:
            to = c.add_stream_from_template(stream)
            for i in range(n):
                p = packets[i % 25]
                new = av.Packet(bytes(p))
                new.stream, new.time_base, new.is_keyframe = to, stream.time_base, p.is_keyframe
                shift = i // 25 * second
                new.pts, new.dts, new.duration = p.pts + shift, p.dts + shift, p.duration
                c.mux(new)
    return out.getvalue()


def phone() -> bytes:
    """A portrait recording: the display matrix rotates it by 90 degrees clockwise."""
    data = video()
    at = data.index(b"tkhd") + 44
    return data[:at] + struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30) + data[at + 36 :]


def index_first() -> bytes:
    """An MP4 with the index before the frames (fast start)."""
    data = video()
    boxes, at = {}, 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        boxes[data[at + 4 : at + 8]] = data[at : at + size]
        at += size
    moov = bytearray(boxes[b"moov"])
    at = moov.index(b"stco")
    for i in range(int.from_bytes(moov[at + 8 : at + 12], "big")):
        here = at + 12 + 4 * i
        moov[here : here + 4] = (int.from_bytes(moov[here : here + 4], "big") + len(moov)).to_bytes(4, "big")
    return boxes[b"ftyp"] + bytes(moov) + b"".join(b for k, b in boxes.items() if k not in (b"ftyp", b"moov"))


def uneven() -> bytes:
    return video(stamps=np.cumsum(np.random.default_rng(0).integers(5, 400, 24)).tolist())


def shape_is(*sides: int) -> Callable:
    return lambda raw: tuple(raw.shape) == sides


V = "video"  # 18 frames of 32 x 32, tubelet 4 x 16 x 16: 4 tokens per time step
case(V, "phone.mp4", 20, phone, lambda raw: upright(raw[0]) and len(raw) == 18)
for n, steps in ((18, 5), (17, 5), (1, 1)):
    case(V, f"{n}-frames.mp4", 4 * steps, lambda n=n: video(n=n), shape_is(n, 3, 32, 32))
case(V, "20400-frames.mp4", 20, lambda: repeated(20_400), shape_is(18, 3, 32, 32))
case(V, "no-count.webm", 20, lambda: video("webm", "libvpx"))
case(V, "no-count.ts", 20, lambda: video("mpegts"))
case(V, "no-count.mkv", 20, lambda: video("matroska"))
case(V, "whole.avi", 20, lambda: video("avi", "mpeg4"))
case(V, "uneven.mp4", 16, uneven)  # long frames cover several sampling points and are used once
case(V, "index-first.mp4", 20, index_first, shape_is(18, 3, 32, 32))
case(V, "cut-index-first.mp4", "cut short, .* bytes", truncated(index_first, 0.9))
case(V, "cut-index-last.mp4", "damaged", truncated(video, 0.9))
case(V, "cut.avi", "cut short", truncated(lambda: video("avi", "mpeg4"), 0.7))
case(V, "empty.mp4", "", lambda: b"")
case(V, "text.mp4", "", lambda: b"Once upon a time\n" * 100)
case(
    V,
    "playlist.mp4",
    "",
    lambda: b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/dev/zero\n#EXT-X-ENDLIST\n",
)
huge = lambda: png(head(9000, 9000, 1), (b"IDAT", zlib.compress(bytes(9000 * 1126), 9)), (b"IEND", b""))  # noqa: E731
case(V, "81-megapixels.mp4", "more than 8K", huge)
case(V, "missing.mp4", "No such file", lambda path: None)
