"""Fixtures of the audio tests: encoded files and a test signal."""

import io
from fractions import Fraction

import av
import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def chirp():
    """A function (samples, seed=0) -> a rising tone in noise at 16 kHz, float (samples,)."""

    def make(samples, seed=0):
        t = torch.arange(samples) / 16000
        noise = torch.randn(samples, generator=torch.Generator().manual_seed(seed))
        return 0.3 * torch.sin(2 * torch.pi * (200 + 50 * seed + 400 * t) * t) + 0.02 * noise

    return make


@pytest.fixture(scope="session")
def encode():
    """A function: float (C, T) -> the bytes of a file."""

    def make(x, form, codec, sample_rate=44100, sample="fltp"):
        layout = {1: "mono", 2: "stereo", 8: "7.1"}[len(x)]
        out = io.BytesIO()
        with av.open(out, "w", format=form) as c:
            s = c.add_stream(codec, rate=sample_rate, layout=layout)
            s.codec_context.format = sample
            packed = np.ascontiguousarray(x.T.reshape(1, -1), dtype=np.float32)
            frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
            frame.sample_rate = sample_rate
            convert = av.AudioResampler(format=sample, layout=layout, rate=sample_rate)
            fifo = av.AudioFifo()
            for f in convert.resample(frame) + convert.resample(None):
                fifo.write(f)
            at, size = 0, s.codec_context.frame_size or 4096
            while (f := fifo.read(size) or fifo.read(0, True)) is not None:
                f.pts, f.time_base, at = at, Fraction(1, sample_rate), at + f.samples
                c.mux(s.encode(f))
            c.mux(s.encode(None))
        return out.getvalue()

    return make


@pytest.fixture(scope="session")
def tones():
    """A function -> float (C, T) with a different tone in each channel."""

    def make(sample_rate=44100, seconds=0.5, channels=2):
        t = np.arange(int(sample_rate * seconds)) / sample_rate
        return np.stack([0.5 / (i + 1) * np.sin(2 * np.pi * 300 * (i + 1) * t) for i in range(channels)])

    return make
