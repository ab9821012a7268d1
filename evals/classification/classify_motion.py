"""Movements in rendered clips, of things that were not seen in training, beside logistic regression on mean frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import classes_of, figures, fit_best
from worldtokens.evals.classification.base import line, picture, read_recipe, train_recipe

ABOUT = "ten movements of real images in rendered clips, split by the thing that moves"


def mean_frames(rows: Sequence) -> Tensor:
    """(n, F): the mean of each clip's frames, at a quarter of its size so that 3,072 values do not outnumber the clips."""
    made = []
    for row in rows:
        frame = torch.from_numpy(row["video"]).float().mean(0) / 255  # (H, W, 3)
        made.append(torch.nn.functional.avg_pool2d(frame.permute(2, 0, 1), 4).flatten())
    return torch.stack(made)


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """Train on four fifths of the stamps; ask the test rows' stamps."""
    task, report = train_recipe(read_recipe("classify_motion", out / "ours", scale))
    sides = {side: samples.open("motion", split=side) for side in ("train", "validation", "test")}
    x = {side: (mean_frames(rows), classes_of(rows, task.names)) for side, rows in sides.items()}
    linear = figures(fit_best(*x["train"], *x["validation"], len(task.names))(x["test"][0]), x["test"][1])
    picture(task, sides["test"], out / "confusion.png", "movements, unseen things")
    things = {side: len(set(rows.column("object"))) for side, rows in sides.items()}
    return [
        line(
            task, report, task="Classifier: movements in clips",
            data=f"motion, {len(sides['train']):,} train ({things['train']} things) / {len(sides['test'])} test ({things['test']} others)",
            metric="top-1 %", value=task.evaluate(sides["test"])["top1"],
            baseline="logistic regression on the mean frame", baseline_value=linear["top1"], chance=1 / len(task.names),
            note="rendered here: 16 frames of 32 x 32 pixels",
        )
    ]  # fmt: skip
