"""Classes of furniture from point clouds; baseline: logistic regression on the occupancy of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import accuracies, classes_of, fit_best
from worldtokens.evals.classification.base import classifier_result, save_confusion
from worldtokens.evals.training import read_recipe, train_recipe
from worldtokens.tokenizers.points.tokenizer import PointTokenizer

ABOUT = "twelve classes of furniture from point clouds"
GRID = 6  # cells per side


def occupancy(clouds: Sequence[Tensor]) -> Tensor:
    """(n, GRID ** 3 + 3): share of points in each cell of the bounding box, and the box's proportions."""
    rows = []
    for cloud in clouds:
        points = cloud[:, :3].float()
        low, high = points.amin(0), points.amax(0)
        sides = (high - low).clamp(min=1e-9)
        cell = ((points - low) / sides.max() * GRID).long().clamp(max=GRID - 1)
        number = (cell[:, 0] * GRID + cell[:, 1]) * GRID + cell[:, 2]
        share = torch.bincount(number, minlength=GRID**3) / len(points)
        rows.append(torch.cat([share.sqrt(), sides / sides.max()]))
    return torch.stack(rows)


def read_once(front: PointTokenizer, rows: dict[str, dict], path: Path) -> dict[str, Tensor]:
    """Point cloud of each mesh by its id; reading all takes minutes, so they are stored in a file."""
    if path.is_file():
        return load_file(path)
    clouds = {name: front.read(row["points"]) for name, row in rows.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(clouds, path)
    return clouds


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Train on four fifths of the objects; evaluate on the test rows."""
    recipe = read_recipe("classify_furniture", out / "ours", scale)
    front = recipe.build([])[0].tokenizers["points"]
    every = {row["id"]: row for row in samples.open("furniture")}
    clouds = read_once(front, every, out / "clouds.safetensors")
    sides: dict[str, list] = {"train": [], "validation": [], "test": []}
    for name, row in every.items():
        sides[row["split"]].append({"points": clouds[name], "class": row["class"]})
    task, report = train_recipe(recipe, sides["train"], sides["validation"])
    x = {
        side: (occupancy([row["points"] for row in rows]), classes_of(rows, task.names))
        for side, rows in sides.items()
    }
    linear = accuracies(fit_best(*x["train"], *x["validation"], len(task.names))(x["test"][0]), x["test"][1])
    save_confusion(task, sides["test"], out / "confusion.png", "furniture, test rows")
    ours, y = task.evaluate(sides["test"]), x["test"][1]
    return [
        classifier_result(
            task, report, task="Classifier: furniture from point clouds",
            data=f"furniture, {len(sides['train'])} train / {len(y)} test", metric=f"{metric} %", value=ours[key],
            baseline=f"logistic regression on the occupancy of {GRID} x {GRID} x {GRID} cells", baseline_value=linear[key],
            chance=chance, note=f"one test row is {100 / len(y):.1f} %",
        )
        for key, metric, chance in (
            ("top1", "top-1", float(y.bincount().max()) / len(y)),
            ("macro", "mean class accuracy", 1 / len(y.unique())),
        )
    ]  # fmt: skip
