"""Motion classes of rendered videos of unseen objects; baseline: logistic regression on the mean frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import accuracies, classes_of, fit_best
from worldtokens.evals.classification.base import classifier_result, save_confusion
from worldtokens.evals.training import read_recipe, train_recipe

ABOUT = "ten motion classes of rendered videos of real images, split by the object that moves"


def mean_frames(rows: Sequence) -> Tensor:
    """(n, F): mean frame of each video, at a quarter of its size so that features (3,072) do not outnumber videos."""
    frames = []
    for row in rows:
        frame = torch.from_numpy(row["video"]).float().mean(0) / 255  # (H, W, 3)
        frames.append(torch.nn.functional.avg_pool2d(frame.permute(2, 0, 1), 4).flatten())
    return torch.stack(frames)


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Train on four fifths of the stamps; evaluate on the test stamps."""
    task, report = train_recipe(read_recipe("classify_motion", out / "ours", scale))
    sides = {side: samples.open("motion", split=side) for side in ("train", "validation", "test")}
    x = {side: (mean_frames(rows), classes_of(rows, task.names)) for side, rows in sides.items()}
    linear = accuracies(fit_best(*x["train"], *x["validation"], len(task.names))(x["test"][0]), x["test"][1])
    save_confusion(task, sides["test"], out / "confusion.png", "motion classes, unseen objects")
    objects = {side: len(set(rows.column("object"))) for side, rows in sides.items()}
    return [
        classifier_result(
            task, report, task="Classifier: motion in videos",
            data=f"motion, {len(sides['train']):,} train ({objects['train']} objects) / {len(sides['test']):,} test "
            f"({objects['test']} other objects)",
            metric="top-1 %", value=task.evaluate(sides["test"])["top1"],
            baseline="logistic regression on the mean frame", baseline_value=linear["top1"], chance=1 / len(task.names),
            note="rendered videos of 16 frames, 32 x 32 pixels",
        )
    ]  # fmt: skip
