"""CLIP ViT-B/32 and open_clip's module with the same weights: each tower, and the training step.

    python benchmarks/clip_b32.py [--rounds 5] [--batch 32]

The texts are captions of the emoji set, tokenised beforehand (`benchmarks/text.py` times that). open_clip's text tower
computes 77 positions; ours computes each caption at its own length, which gives the same embedding, since attention is
causal and pooling takes the end token. The largest differences are printed first.
"""

from __future__ import annotations

import argparse

import open_clip
import torch
from open_clip.loss import ClipLoss
from timing import interleaved, perturb, report

import worldtokens as wt
from worldtokens.data import samples


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--batch", type=int, default=32)
    args = p.parse_args()
    torch.manual_seed(0)
    theirs = perturb(open_clip.create_model("ViT-B-32")).eval()
    ours = wt.from_open_clip(theirs).eval()
    texts = [t for row in samples.open("emoji", split="train") for t in row["text"]][
        :: 8000 // (4 * args.batch)
    ]
    texts = texts[: args.batch]
    ids = open_clip.get_tokenizer("ViT-B-32")(texts)
    text = ours.tokenizers["text"]
    batch = text.collate([text.read(t) for t in texts])
    pixels = torch.randn(args.batch, 3, 224, 224)
    mean = sum(batch["lengths"]) / len(batch["lengths"])
    print(f"{len(texts)} captions of {mean:.1f} tokens on average, at most {max(batch['lengths'])}")

    towers = {
        "image tower": (
            lambda: ours.encode("image", pixels),
            lambda: theirs.encode_image(pixels, normalize=True),
        ),
        "text tower": (
            lambda: ours.encode("text", batch),
            lambda: theirs.encode_text(ids, normalize=True),
        ),
    }
    with torch.no_grad():
        for name, (a, b) in towers.items():
            print(f"{name}: largest difference {float((a() - b()).abs().max()):.2g}")
        for name, (a, b) in towers.items():
            seconds = interleaved({"worldtokens": a, "open_clip": b}, args.rounds)
            what = "captions" if "text" in name else "images"
            report(f"CLIP ViT-B/32 {name}, fp32, batch {args.batch}", seconds, args.batch, what)
    del towers

    whole = wt.Batch(
        weight=args.batch, has={"image": None, "text": None}, image=wt.Batch(pixels=pixels), text=batch
    )
    criterion = ClipLoss()
    ours.train()
    theirs.train()
    optimizers = {m: torch.optim.AdamW(m.parameters(), 1e-6, fused=True) for m in (ours, theirs)}

    def our_loss():
        return ours.loss(whole)["loss"]

    def their_loss():
        image, words, scale = theirs(pixels, ids)[:3]
        return criterion(image, words, scale)

    print(f"loss: ours {float(our_loss()):.5f}, open_clip {float(their_loss()):.5f}")

    def step(model, loss):
        loss().backward()
        optimizers[model].step()
        optimizers[model].zero_grad(set_to_none=True)

    seconds = interleaved(
        {"worldtokens": lambda: step(ours, our_loss), "open_clip": lambda: step(theirs, their_loss)},
        args.rounds,
    )
    report(f"CLIP ViT-B/32 training step, fp32, batch {args.batch}", seconds, args.batch, "pairs")


if __name__ == "__main__":
    main()
