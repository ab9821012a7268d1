"""What packing saves: padded share on a real mixed set, and images of native aspect through one trunk.

    python benchmarks/packing.py [--images 96] [--rounds 5] [--dim 384] [--depth 12]

The set is Tux Paint's stamps (fetched by name on first use): photos and drawings of every shape, their captions, their
spoken captions. Images keep their pixels, at most 256 patches of 16, none is scaled up. Forward passes without
gradients, in batches of 32, in turns in one process:

- packed: `Tokens.pack` into rows of at most 1,024, read by groups of equal length;
- padded: the same tokens in a padded batch, padding masked by key, through the same trunk;
- timm naflexvit: same width, depth, heads and patches, padded to its sequence length as its own collator does (the budget
  of 256), with its key mask.

The ratio is images per second, packed to the other, the median over rounds with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from turns import report

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
    """Our native batch as timm's collator would give it: padded to the budget, coordinates, validity."""
    b, n, p = batch["patches"].shape
    patches = torch.zeros(b, BUDGET, p)
    coords = torch.zeros(b, BUDGET, 2, dtype=torch.int64)
    patches[:, :n] = batch["patches"].float() / 255
    coords[:, :n] = batch["coords"]
    valid = torch.arange(BUDGET) < torch.tensor(batch["lengths"])[:, None]
    return {"patches": patches, "patch_coord": coords, "patch_valid": valid}


def padded_share(items: list[wt.Tokens]) -> tuple[float, float]:
    """Share of places that hold no token: in one padded batch, and packed."""
    stacked, packed = wt.Tokens.stack(items), wt.pack(items, ROW)
    return tuple(1 - float(t.valid.float().mean()) for t in (stacked, packed))


def mixed(count: int) -> dict[str, list[wt.Tokens]]:
    """Images, captions and spoken captions as single samples."""
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

    print(f"{'padded share':24}{'samples':>9}{'tokens':>9}{'one batch':>11}{'packed':>9}")
    sets = mixed(args.pictures)
    for name, items in [*sets.items(), ("all in one batch", [t for v in sets.values() for t in v])]:
        before, after = padded_share(items)
        tokens = sum(t.shape[1] for t in items)
        print(f"{name:24}{len(items):9}{tokens:9}{100 * before:10.1f}%{100 * after:8.1f}%")

    heads = args.dim // 64
    image = wt.ImageTokenizer(dim=args.dim, patch=PATCH, size=None, max_tokens=BUDGET).eval()
    trunk = wt.Transformer(args.dim, args.depth, heads).eval()
    peer = naflex(args.dim, args.depth, heads)
    rows = samples.open("stamps")[: args.pictures]
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
        took = {name: [] for name in contenders}
        for run in contenders.values():
            run()
        for i in range(args.rounds):
            for name in list(contenders) if i % 2 else list(contenders)[::-1]:
                start = time.perf_counter()
                contenders[name]()
                took[name].append(time.perf_counter() - start)
    for name in ("padded", "timm naflexvit"):
        report("packed images of native aspect", {k: took[k] for k in ("packed", name)}, len(raws), "images")
    for name, seconds in took.items():
        ratios = [s / own for s, own in zip(seconds, took["packed"], strict=True)]
        shown = f"packed is {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"{name:16}{len(raws) / statistics.median(seconds):8.1f} images/s   {shown if name != 'packed' else ''}"
        )


if __name__ == "__main__":
    main()
