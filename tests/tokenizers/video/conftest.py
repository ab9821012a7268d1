"""Videos of numbered frames, encoded once per call."""

import io
from fractions import Fraction

import av
import numpy as np
import pytest

COUNT = 120


def _encode_video(form="mp4", codec="libx264", n=COUNT, stamps=None, gop=25, b_frames=2, size=(64, 96)):
    """A video whose frames show their number as ten light or dark bars; time stamps in milliseconds."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as c:
        s = c.add_stream(codec, rate=25)
        s.height, s.width = size
        s.pix_fmt, s.gop_size, s.max_b_frames = "yuv420p", gop, b_frames
        s.codec_context.time_base = Fraction(1, 1000)
        for i in range(n):
            image = np.full((*size, 3), 20, np.uint8)
            for bit in range(10):
                if i >> bit & 1:
                    image[8 : size[0] - 8, bit * 9 + 3 : bit * 9 + 10] = 230
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.time_base, frame.pts = Fraction(1, 1000), i * 40 if stamps is None else stamps[i]
            c.mux(s.encode(frame))
        c.mux(s.encode(None))
    return out.getvalue()


@pytest.fixture(scope="session")
def encode_video():
    """The encoder as a function: (form, codec, n, stamps, gop, b_frames, size) -> bytes."""
    return _encode_video
