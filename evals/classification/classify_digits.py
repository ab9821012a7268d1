"""Handwritten digits: our ViT and a timm ViT of the same size, trained with the same recipe on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from worldtokens.backbone.transformer import Transformer
from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import accuracies, classes_of, fit_best
from worldtokens.evals.classification.base import classifier_result, save_confusion
from worldtokens.evals.training import read_recipe, train_measured
from worldtokens.tasks.classification.mixing import normalized_images
from worldtokens.tasks.classification.model import Classifier
from worldtokens.tokenizers.base import Batch
from worldtokens.tokenizers.image.tokenizer import ImageTokenizer

ABOUT = "handwritten digits: our ViT and a timm ViT of the same size, trained with the same recipe"


class TimmViT(Classifier):
    """timm's VisionTransformer with our preprocessing, loss and evaluation: only the network differs.

    Args:
        tokenizer: its preprocessing is used, its weights are not.
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
        return self.trunk(normalized_images(self.tokenizers[self.column], batch[self.column]))


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Train both networks and a linear model; accuracy on the 600 test rows."""
    recipe = read_recipe("classify_digits", out / "ours", scale)
    rows, validation = recipe.rows()
    test = samples.open("digits", split="test")
    ours, augment = recipe.build(rows)
    report = train_measured(ours, rows, validation, recipe, augment)
    scores = ours.evaluate(test)
    save_confusion(ours, test, out / "confusion.png", "digits, test rows")

    recipe = read_recipe("classify_digits", out / "timm", scale)
    front, cfg = ours.tokenizers["image"], ours.trunk.cfg
    torch.manual_seed(recipe.train.seed)
    peer = TimmViT(
        ImageTokenizer(**{**front._args}), ours.names, ours.label, ours.label_smoothing, cfg.dim, cfg.depth, cfg.heads,
        cfg.drop_path,
    )  # fmt: skip
    train_measured(peer, rows, validation, recipe, augment)
    peer_scores = peer.evaluate(test)
    weights = sum(p.numel() for p in peer.trunk.parameters())

    features = {}
    for name, side in (("train", rows), ("validation", validation), ("test", test)):
        x = torch.stack([front.read(row["image"])[0].flatten() for row in side])
        features[name] = x / 255, classes_of(side, ours.names)
    (x, y), linear = features["test"], fit_best(*features["train"], *features["validation"], 10)
    facts = {
        "task": "Classifier: handwritten digits",
        "data": f"digits, {len(rows):,} train / {len(test)} test",
        "metric": "top-1 %",
        "value": scores["top1"],
        "chance": 0.1,
    }
    return [
        classifier_result(
            ours, report, **facts, baseline="timm ViT of the same size, same recipe and batches", baseline_value=peer_scores["top1"],
            note=f"the timm ViT has {weights:,} parameters; one test row is {100 / len(test):.2f} %",
        ),
        classifier_result(
            ours, report, **facts, baseline="logistic regression on the pixels", baseline_value=accuracies(linear(x), y)["top1"],
        ),
    ]  # fmt: skip
