"""ViT-S/16 and timm's module with the same weights: forward pass and training step.

    python benchmarks/vit.py [--rounds 7] [--batch 16]

Forward and training step (cross-entropy, backward, AdamW), in float32 and with bfloat16 autocast. Both get the same
normalised images; the largest difference of their logits is printed first.
"""

from __future__ import annotations

import argparse
import contextlib

import timm
import torch
import torch.nn.functional as F
from timing import interleaved, perturb, report

import worldtokens as wt


def autocast(half: bool):
    return torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()


def trainer(forward, model, labels, half):
    """A function that runs one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step():
        with autocast(half):
            logits = forward()
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--batch", type=int, default=16)
    args = p.parse_args()
    torch.manual_seed(0)
    theirs = perturb(timm.create_model("vit_small_patch16_224", num_classes=1000)).eval()
    ours = wt.from_timm(theirs).eval()
    pixels, labels = torch.randn(args.batch, 3, 224, 224), torch.randint(0, 1000, (args.batch,))
    runs = {
        "worldtokens": (ours, lambda: ours({"image": pixels})),
        "timm": (theirs, lambda: theirs(pixels)),
    }
    with torch.no_grad():
        a, b = (f() for _, f in runs.values())
        print(
            f"largest difference of logits: {float((a - b).abs().max()):.2g} (of {float(b.abs().max()):.3g})"
        )
        for half in (False, True):

            def forward(f, half=half):
                with torch.no_grad(), autocast(half):
                    f()

            seconds = interleaved({k: (lambda f=f: forward(f)) for k, (_, f) in runs.items()}, args.rounds)
            kind = "bf16" if half else "fp32"
            report(f"ViT-S/16 forward, {kind}, batch {args.batch}", seconds, args.batch, "images")
    for model, _ in runs.values():
        model.train()
    for half in (False, True):
        steps = {k: trainer(f, m, labels, half) for k, (m, f) in runs.items()}
        seconds = interleaved(steps, args.rounds)
        kind = "bf16" if half else "fp32"
        report(f"ViT-S/16 training step, {kind}, batch {args.batch}", seconds, args.batch, "images")


if __name__ == "__main__":
    main()
