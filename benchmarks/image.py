"""Images to tokens: JPEG preprocessing and open_clip's transform, patch embedding and timm's.

    python benchmarks/image.py --photos FOLDER     # the largest JPEGs of a folder, upscaled to 12 megapixels
    python benchmarks/image.py                     # matplotlib's sample photograph

Photographs are upscaled with Lanczos and get noise like that of a sensor, so that their files have the size and detail of
phone photographs. Every contender reads the same files, interleaved, on one core. Figures are images/s of the best round,
and the pixel difference from open_clip's transform in levels of 255.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import tempfile
import time
from pathlib import Path

import matplotlib.cbook
import numpy as np
import open_clip
import torch
from PIL import Image
from timing import record
from timm.layers import PatchEmbed

import worldtokens as wt


def photographs(folder: str | None, count: int) -> list[Path]:
    if folder is None:
        return [Path(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))]
    files = [p for p in Path(folder).rglob("*.jp*g") if p.is_file()]
    return sorted(files, key=lambda p: -p.stat().st_size)[:count]


def upscale(path: Path, to: Path, megapixels: float, rng: np.random.Generator) -> None:
    im = Image.open(path).convert("RGB")
    scale = (megapixels * 1e6 / (im.width * im.height)) ** 0.5
    im = im.resize((round(im.width * scale), round(im.height * scale)), Image.Resampling.LANCZOS)
    grain = rng.normal(0, 5, (im.height, im.width, 1)).astype(np.int16)
    pixels = (np.asarray(im).astype(np.int16) + grain).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(to, "JPEG", quality=90)


def rounds(contenders: dict, files: list[Path], n: int) -> dict[str, float]:
    """Images/s of each contender: the best of n interleaved rounds."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(n):
        for name, one in contenders.items():
            start = time.perf_counter()
            for f in files:
                one(f)
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: len(files) / seconds for name, seconds in best.items()}


def files_to_tensors(args: argparse.Namespace, files: list[Path]) -> None:
    fast, exact = (
        wt.ImageTokenizer(8, size=args.size),
        wt.ImageTokenizer(8, size=args.size, preprocess={"draft": False}),
    )
    native = wt.ImageTokenizer(8, size=None, max_tokens=196)
    transform = open_clip.image_transform(args.size, is_train=False)
    scale, shift = torch.tensor(fast.std)[:, None, None] * 255, torch.tensor(fast.mean)[:, None, None] * 255

    def theirs(f):
        with Image.open(f) as im:
            return transform(im)

    def ours(tokenizer):
        # up to the same result: a normalised float image
        return lambda f: (tokenizer.collate([tokenizer.read(f)])["pixels"][0].float() - shift) / scale

    contenders = {
        "open_clip transform": theirs,
        "worldtokens, draft=False": ours(exact),
        "worldtokens": ours(fast),
        "worldtokens, native aspect": lambda f: native.collate([native.read(f)]),
    }
    found = rounds(contenders, files, args.rounds)
    base = found["open_clip transform"]
    print(
        f"\nJPEG to {args.size} px, {len(files)} files, {np.mean([f.stat().st_size for f in files]) / 1e6:.1f} MB on average"
    )
    for name, rate in found.items():
        print(f"  {name:28s} {rate:7.1f} images/s   {rate / base:5.2f} x")
        if name != "open_clip transform":
            record(
                {
                    "what": f"JPEG to {args.size} px, one thread: {name.removeprefix('worldtokens, ')}",
                    "ours": f"{rate:.1f} images/s",
                    "peer": f"open_clip transform: {base:.1f}",
                    "ratio": f"{rate / base:.2f}",
                    "note": "",
                }
            )
    for name in ("worldtokens, draft=False", "worldtokens"):
        levels = torch.cat([((contenders[name](f) - theirs(f)) * scale).abs().flatten() for f in files])
        share = (levels > 4).float().mean()
        print(
            f"  {name:28s} pixels differ by {levels.mean():.2f} levels on average, at most {levels.max():.0f}, {share:.2%} by more than 4"
        )


def patches_to_tokens(args: argparse.Namespace) -> None:
    tokenizer, reference = wt.ImageTokenizer(args.dim).eval(), PatchEmbed(224, 16, 3, args.dim).eval()
    pixels = torch.randint(0, 256, (32, 3, 224, 224), dtype=torch.uint8)
    mean, std = torch.tensor(tokenizer.mean)[:, None, None], torch.tensor(tokenizer.std)[:, None, None]
    normal = (pixels / 255 - mean) / std
    contenders = {
        "timm PatchEmbed, floats": lambda: reference(normal),
        "worldtokens, floats": lambda: tokenizer(normal),
        "timm PatchEmbed, from uint8": lambda: reference((pixels.float() / 255 - mean) / std),
        "worldtokens, from uint8": lambda: tokenizer(pixels),
    }
    with torch.inference_mode():
        found = rounds({k: (lambda _, f=f: f()) for k, f in contenders.items()}, [Path()], 5 * args.rounds)
    print(
        f"\nPatch embedding, 32 images of 224 px, patch 16, dim {args.dim} (ours with positions, theirs without)"
    )
    for name, rate in found.items():
        print(f"  {name:28s} {32 * rate:7.0f} images/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--photos", help="folder searched for JPEGs; default: matplotlib's sample")
    parser.add_argument("--count", type=int, default=12, help="number of photographs")
    parser.add_argument("--megapixels", type=float, default=12.0)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}  {platform.machine()}, one thread, torch {torch.__version__}")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i, path in enumerate(photographs(args.photos, args.count)):
            files.append(Path(folder) / f"{i}.jpg")
            upscale(path, files[-1], args.megapixels, rng)
        files_to_tensors(args, files)
    patches_to_tokens(args)


if __name__ == "__main__":
    main()
