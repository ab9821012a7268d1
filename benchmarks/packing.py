"""Packing: share of padding on a real mixed set, and images of native aspect ratio through one Transformer.

    python benchmarks/packing.py [--images 96] [--rounds 5] [--dim 384] [--depth 12]

The set is Tux Paint's stamps (downloaded on first use): photos and drawings of many sizes, their captions and spoken
captions. Images keep their aspect ratio, with at most 256 patches of 16 pixels, and are not upscaled. Forward passes
without gradients, in batches of 32, interleaved:

- packed: `Tokens.pack` into rows of at most 1,024 tokens, attention in groups of equal length;
- padded: the same tokens in a padded batch with a key mask, through the same Transformer;
- timm naflexvit: equal dim, depth, heads and patches, padded to the maximum of 256 as in its own collator, with its key
  mask.

The ratio is images/s of packed divided by the other: median, minimum and maximum over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from timing import report

import worldtokens as wt
from worldtokens.data import samples

BUDGET, PATCH, BATCH, ROW = 256, 16, 32, 1024


def naflex(dim: int, depth: int, heads: int) -> torch.nn.Module:
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    cfg = NaFlexVitCfg(
        patch_size=PATCH, embed_dim=dim, depth=depth, num_heads=heads, class_token=False, reg_tokens=0,
        global_pool="avg", embed_proj_type="linear",
    )  # fmt: skip
    return NaFlexVit(cfg, num_classes=0).eval()


def naflex_batch(batch: wt.Batch) -> dict[str, torch.Tensor]:
    """Our batch of native images in the format of timm's collator: padded patches, coordinates, validity."""
    b, n, p = batch["patches"].shape
    patches = torch.zeros(b, BUDGET, p)
    coords = torch.zeros(b, BUDGET, 2, dtype=torch.int64)
    patches[:, :n] = batch["patches"].float() / 255
    coords[:, :n] = batch["coords"]
    valid = torch.arange(BUDGET) < torch.tensor(batch["lengths"])[:, None]
    return {"patches": patches, "patch_coord": coords, "patch_valid": valid}


def padded_share(items: list[wt.Tokens]) -> tuple[float, float]:
    """Share of padding: in one padded batch, and packed."""
    stacked, packed = wt.Tokens.stack(items), wt.pack(items, ROW)
    return tuple(1 - float(t.valid.float().mean()) for t in (stacked, packed))


def mixed(count: int) -> dict[str, list[wt.Tokens]]:
    """Images, captions and spoken captions, one `Tokens` per sample."""
    dim = 16
    image = wt.ImageTokenizer(dim=dim, patch=PATCH, size=None, max_tokens=BUDGET)
    text, audio = wt.TextTokenizer.clip(dim=dim), wt.AudioTokenizer(dim=dim, preset="whisper")
    rows = [r for r in samples.open("stamps", audio="fr") if "audio" in r][:count]
    with torch.no_grad():
        return {
            "images": [image.tokens([r["image"]]) for r in rows],
            "captions": [
                text.tokens([(r["text"] if isinstance(r["text"], str) else r["text"][0])]) for r in rows
            ],
            "spoken captions": [audio.tokens([r["audio"]]) for r in rows],
        }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("images", 96), ("rounds", 5), ("dim", 384), ("depth", 12)):
        p.add_argument(f"--{name}", type=int, default=value)
    args = p.parse_args()
    torch.manual_seed(0)

    print(f"{'share of padding':24}{'samples':>9}{'tokens':>9}{'one batch':>11}{'packed':>9}")
    sets = mixed(args.images)
    for name, items in [*sets.items(), ("all in one batch", [t for v in sets.values() for t in v])]:
        before, after = padded_share(items)
        tokens = sum(t.shape[1] for t in items)
        print(f"{name:24}{len(items):9}{tokens:9}{100 * before:10.1f}%{100 * after:8.1f}%")

    heads = args.dim // 64
    image = wt.ImageTokenizer(dim=args.dim, patch=PATCH, size=None, max_tokens=BUDGET).eval()
    trunk = wt.Transformer(args.dim, args.depth, heads).eval()
    peer = naflex(args.dim, args.depth, heads)
    rows = samples.open("stamps")[: args.images]
    raws = [image.read(r["image"]) for r in rows]
    batches = [image.collate(raws[i : i + BATCH]) for i in range(0, len(raws), BATCH)]
    theirs = [naflex_batch(b) for b in batches]

    def packed():
        for b in batches:
            trunk(image(b).pack(ROW)).pool("mean")

    def padded():
        for b in batches:
            trunk(image(b), mode="padded").pool("mean")

    def timm():
        for b in theirs:
            peer(b)

    with torch.no_grad():
        a = torch.cat([trunk(image(b).pack(ROW)).pool("mean") for b in batches])
        b = torch.cat([trunk(image(b), mode="padded").pool("mean") for b in batches])
        print(f"\nlargest difference between packed and padded: {float((a - b).abs().max()):.2g}")
        contenders = {"packed": packed, "padded": padded, "timm naflexvit": timm}
        seconds = {name: [] for name in contenders}
        for run in contenders.values():
            run()
        for i in range(args.rounds):
            for name in list(contenders) if i % 2 else list(contenders)[::-1]:
                start = time.perf_counter()
                contenders[name]()
                seconds[name].append(time.perf_counter() - start)
    for name in ("padded", "timm naflexvit"):
        report(
            "packed images, native aspect ratio",
            {k: seconds[k] for k in ("packed", name)},
            len(raws),
            "images",
        )
    for name, times in seconds.items():
        ratios = [s / own for s, own in zip(times, seconds["packed"], strict=True)]
        text = f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"{name:16}{len(raws) / statistics.median(times):8.1f} images/s   {text if name != 'packed' else ''}"
        )


if __name__ == "__main__":
    main()
