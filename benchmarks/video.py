"""Speed of sampling a clip: 16 frames spread over ten minutes against decoding all of it, in one process, in turns.

    OMP_NUM_THREADS=2 python benchmarks/video.py [--minutes 10] [--rounds 3] [--gop 250]

The clip is made here: a moving pattern in noise, 320 x 240 at 25 a second, H.264 with B-frames and a key frame every
`gop` frames (250 is x264's own). Both ways give 224 x 224 RGB frames and the same ones, which is checked. The figure is
the ratio of the times and its range; peak memory is the process's after each.
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
from turns import keep

from worldtokens.tokenizers.video.read import Sampling, read_video, upright


def film(minutes: float, gop: int) -> bytes:
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


def whole(data: bytes, wanted: set[int]) -> torch.Tensor:
    """Decode every frame, convert those that are wanted: the plain way with the least waste."""
    kept = []
    with av.open(io.BytesIO(data)) as c:
        for i, frame in enumerate(c.decode(video=0)):
            if i in wanted:
                kept.append(upright(frame, (224, 224)))
    return torch.from_numpy(np.stack(kept)).permute(0, 3, 1, 2)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gop", type=int, default=250)
    args = parser.parse_args()
    data = film(args.minutes, args.gop)
    print(
        f"{args.minutes:g} minutes, {len(data) / 1e6:.0f} MB, a key frame every {args.gop}; memory {peak():.0f} MB"
    )
    sampling = Sampling(16)
    ours, plain = [], []
    for _ in range(args.rounds):
        start = time.perf_counter()
        few, seconds = read_video(data, sampling, (224, 224))
        ours.append(time.perf_counter() - start)
        after = peak()
        start = time.perf_counter()
        ref = whole(data, {round(s * 25) for s in seconds.tolist()})
        plain.append(time.perf_counter() - start)
        assert torch.equal(few, ref), "random access and decoding everything differ"
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    print(
        f"16 frames: {statistics.median(ours):.2f} s (memory {after:.0f} MB); whole: {statistics.median(plain):.2f} s"
    )
    print(f"share of the time: {statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})")
    keep(
        {
            "what": f"16 frames of {args.minutes:g} minutes of film",
            "ours": f"{statistics.median(ours):.2f} s",
            "peer": f"decoding all: {statistics.median(plain):.2f} s",
            "ratio": f"{1 / statistics.median(ratios):.1f} ({1 / max(ratios):.1f} to {1 / min(ratios):.1f})",
            "note": "",
        }
    )


if __name__ == "__main__":
    main()
