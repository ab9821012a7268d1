"""Sampling of 16 frames from a ten-minute video, and decoding of all its frames.

    OMP_NUM_THREADS=2 python benchmarks/video.py [--minutes 10] [--rounds 3] [--gop 250]

The video is generated: a moving pattern in noise, 320 x 240 at 25 frames/s, H.264 with B-frames and a key frame every
`gop` frames (250 is the default of x264). Both give the same 224 x 224 RGB frames, which is asserted. The figure is the
ratio of the times with its range; peak memory is that of the process after each.
"""

import argparse
import io
import resource
import statistics
import time
from fractions import Fraction

import av
import numpy as np
import torch
from timing import record

from worldtokens.tokenizers.video.read import FrameSampling, frame_to_rgb, read_video


def encode_video(minutes: float, gop: int) -> bytes:
    out = io.BytesIO()
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 60, (16, 240, 320, 3), dtype=np.uint8)
    with av.open(out, "w", format="mp4") as c:
        s = c.add_stream("libx264", rate=25, options={"preset": "veryfast"})
        s.width, s.height, s.pix_fmt, s.gop_size = 320, 240, "yuv420p", gop
        for i in range(int(minutes * 60 * 25)):
            image = noise[i % 16].copy()
            image[:, i * 3 % 280 : i * 3 % 280 + 40] += 150
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, 25)
            c.mux(s.encode(frame))
        c.mux(s.encode(None))
    return out.getvalue()


def decode_all(data: bytes, indices: set[int]) -> torch.Tensor:
    """Decode every frame and convert the selected ones."""
    frames = []
    with av.open(io.BytesIO(data)) as c:
        for i, frame in enumerate(c.decode(video=0)):
            if i in indices:
                frames.append(frame_to_rgb(frame, (224, 224)))
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gop", type=int, default=250)
    args = parser.parse_args()
    data = encode_video(args.minutes, args.gop)
    print(
        f"{args.minutes:g} minutes, {len(data) / 1e6:.0f} MB, a key frame every {args.gop}; memory {peak():.0f} MB"
    )
    sampling = FrameSampling(16)
    ours, full = [], []
    for _ in range(args.rounds):
        start = time.perf_counter()
        sampled, seconds = read_video(data, sampling, (224, 224))
        ours.append(time.perf_counter() - start)
        after = peak()
        start = time.perf_counter()
        ref = decode_all(data, {round(s * 25) for s in seconds.tolist()})
        full.append(time.perf_counter() - start)
        assert torch.equal(sampled, ref), "the frames differ"
    ratios = [a / b for a, b in zip(ours, full, strict=True)]
    print(
        f"16 frames: {statistics.median(ours):.2f} s (memory {after:.0f} MB); all frames: {statistics.median(full):.2f} s"
    )
    print(f"ratio of the times: {statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})")
    record(
        {
            "what": f"16 frames of {args.minutes:g} minutes of video",
            "ours": f"{statistics.median(ours):.2f} s",
            "peer": f"all frames: {statistics.median(full):.2f} s",
            "ratio": f"{1 / statistics.median(ratios):.1f} ({1 / max(ratios):.1f} to {1 / min(ratios):.1f})",
            "note": "",
        }
    )


if __name__ == "__main__":
    main()
