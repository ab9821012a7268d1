"""How a typed program uses worldtokens; `make types` checks it, nothing runs it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import worldtokens as wt


def compose() -> Tensor:
    image = wt.ImageTokenizer(dim=192, patch=16, size=64)
    text = wt.TextTokenizer.clip(dim=192)
    trunk = wt.Transformer(dim=192, depth=2, heads=3)
    row: wt.Tokens = wt.pack([image.tokens(["a.png"]), text.tokens(["a cat"])], max_len=128)
    out: wt.Tokens = trunk(row)
    first: wt.Tokens = out.select("image").unpack()
    count: int = len(first)
    assert count
    return out.pool("mean")


def contrast(folder: Path) -> Tensor:
    text = wt.TextTokenizer.from_file(folder / "tokenizer.json", dim=192)
    front = wt.ImageTokenizer(192, size=None, max_tokens=100)
    model = wt.CLIP({"image": front, "text": text}, trunk=wt.Transformer(192, 2, 3), dim=64)
    written: Path = model.save(folder)
    assert written
    vectors: Tensor = model.embed("image", [folder / "a.png", torch.zeros(3, 8, 8, dtype=torch.uint8)])
    return vectors


def train(folder: Path) -> float:
    rows = wt.open_rows(folder / "pairs.csv")
    classifier = wt.Classifier(wt.ImageTokenizer(96, patch=4, size=20), wt.Transformer(96, 2, 3), ["a", "b"])
    report: wt.TrainReport = wt.train(
        classifier,
        rows,
        train=wt.TrainSettings(out=str(folder / "run"), steps=3),
        optim=wt.OptimSettings(lr=1e-3),
    )
    return report.loss


def generate(model: wt.LanguageModel) -> list[str]:
    return model.generate(["Once"], max_new_tokens=5, temperature=0.8, top_k=40)
