"""Handwritten digits: our ViT beside timm's of the same size, by the same recipe on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from worldtokens.backbone.transformer import Transformer
from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import classes_of, figures, fit_best
from worldtokens.evals.classification.base import line, picture, read_recipe, train_measured
from worldtokens.tasks.classification.mixing import pictures_of
from worldtokens.tasks.classification.model import Classifier
from worldtokens.tokenizers.base import Batch
from worldtokens.tokenizers.image.tokenizer import ImageTokenizer

ABOUT = "handwritten digits: ours beside a timm ViT of the same size, same recipe"


class TimmViT(Classifier):
    """timm's VisionTransformer behind our reading, loss and evaluation: only the network is another.

    Args:
        tokenizer: reads and normalises; its weights are not used.
        classes, label, label_smoothing: as in `Classifier`.
        dim, depth, heads, drop_path: of the network.
    """

    def __init__(
        self,
        tokenizer: ImageTokenizer,
        classes: list[str],
        label: str,
        label_smoothing: float,
        dim: int,
        depth: int,
        heads: int,
        drop_path: float,
    ) -> None:
        super().__init__(
            tokenizer, Transformer(dim, 1, heads), classes, label=label, label_smoothing=label_smoothing
        )
        from timm.models.vision_transformer import VisionTransformer

        tokenizer.requires_grad_(False)
        self.trunk = VisionTransformer(
            img_size=tokenizer.size,
            patch_size=tokenizer.patch,
            num_classes=len(classes),
            embed_dim=dim,
            depth=depth,
            num_heads=heads,
            drop_path_rate=drop_path,
            class_token=tokenizer.class_token is not None,
            global_pool="avg" if tokenizer.class_token is None else "token",
        )
        self.head = nn.Identity()

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        return {**self._args, "tokenizer": self.tokenizers[self.column]}

    def features(self, batch: Batch) -> Tensor:
        return self.trunk(pictures_of(self.tokenizers[self.column], batch[self.column]))


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """Train both and a linear model; count their right answers on the 600 test rows."""
    recipe = read_recipe("classify_digits", out / "ours", scale)
    rows, validation = recipe.rows()
    test = samples.open("digits", split="test")
    ours, augment = recipe.build(rows)
    report = train_measured(ours, rows, validation, recipe, augment)
    scored = ours.evaluate(test)
    picture(ours, test, out / "confusion.png", "digits, test rows")

    recipe = read_recipe("classify_digits", out / "timm", scale)
    front, cfg = ours.tokenizers["image"], ours.trunk.cfg
    torch.manual_seed(recipe.train.seed)
    theirs = TimmViT(
        ImageTokenizer(**{**front._args}), ours.names, ours.label, ours.label_smoothing, cfg.dim, cfg.depth, cfg.heads,
        cfg.drop_path,
    )  # fmt: skip
    train_measured(theirs, rows, validation, recipe, augment)
    beside = theirs.evaluate(test)
    weights = sum(p.numel() for p in theirs.trunk.parameters())

    raw = {}
    for name, side in (("train", rows), ("validation", validation), ("test", test)):
        x = torch.stack([front.read(row["image"])[0].flatten() for row in side])
        raw[name] = x / 255, classes_of(side, ours.names)
    linear = figures(fit_best(*raw["train"], *raw["validation"], 10)(raw["test"][0]), raw["test"][1])["top1"]
    facts = {
        "task": "Classifier: handwritten digits",
        "data": f"digits, {len(rows):,} train / {len(test)} test",
        "metric": "top-1 %",
        "value": scored["top1"],
        "chance": 0.1,
    }
    return [
        line(
            ours, report, **facts, baseline="timm ViT of the same size, same recipe and batches", baseline_value=beside["top1"],
            note=f"timm's has {weights:,} parameters; one of the {len(test)} test rows is {100 / len(test):.2f} %",
        ),
        line(ours, report, **facts, baseline="logistic regression on the pixels", baseline_value=linear),
    ]  # fmt: skip
