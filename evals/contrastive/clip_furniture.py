"""Point clouds, images and names of held-out furniture in one embedding space; baseline: CCA per pair of modalities."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from worldtokens.data import samples
from worldtokens.data.rows import Rows
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.cca import image_features, linear_pairs, point_features, text_features
from worldtokens.evals.contrastive.base import CachedReader, pair_results, size_of, speed_result
from worldtokens.evals.training import parameter_count, percent, read_recipe, train_measured
from worldtokens.tasks.metrics.probe import linear_probe, zero_shot_top1
from worldtokens.tasks.metrics.retrieval import retrieval_table

ABOUT = "meshes, icons and names of furniture in one embedding space"
# zero-shot classes: an object belongs to one if its English name has exactly one of these words
CLASSES = (
    "bed",
    "bench",
    "bookcase",
    "cabinet",
    "car",
    "chair",
    "door",
    "lamp",
    "plant",
    "sink",
    "sofa",
    "table",
    "tree",
    "window",
)


def class_of(name: str) -> str | None:
    """The only word of `CLASSES` in a name, or None: "Office chair" -> "chair", "Table lamp" -> None."""
    found = set(re.findall(r"\w+", name.casefold())) & set(CLASSES)
    return found.pop() if len(found) == 1 else None


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Train on four fifths of the objects; retrieve among the test objects."""
    trial = () if scale == 1 else ("--train.batch_size", "16")  # a trial has few rows
    recipe = read_recipe("clip_furniture", out / "ours", scale, 0, *trial)
    rows, validation = recipe.rows()
    model, augment = recipe.build(rows)
    read = CachedReader(model, ("points", "image"))
    test = samples.open("furniture", split="test")
    if scale < 1:  # a trial reads few meshes
        rows, validation, test = (
            r[:: max(1, round(0.2 / max(scale, 0.02)))] for r in (rows, validation, test)
        )
    train, validation, test = (read(map(_with_class, r)) for r in (rows, validation, test))
    report = train_measured(model, train, validation, recipe, augment)
    ours = model.evaluate(test)
    linear = linear_pairs(_features(train), _features(validation), _features(test))
    for title, figures in (("one embedding space", ours), ("linear models, one per pair", linear)):
        with open(out / "tables.txt", "a", encoding="utf-8") as file:
            for console in (Console(), Console(file=file, width=100)):
                console.print(retrieval_table(figures, f"{len(test)} test objects: {title}"))
    data = f"furniture, {len(train)} train / {len(test)} test"
    note = "names in six languages in training, in English in the test"
    results = pair_results(model, report, ours, linear, "CLIP: furniture, retrieval", data, note)
    facts = {
        "size": size_of(model),
        "parameters": parameter_count(model),
        "steps": report.steps,
        "minutes": round(report.seconds / 60, 1),
        "metric": "top-1 %",
    }
    zero_shot = zero_shot_top1(model, test, "kind", CLASSES, ("{}", "a {}"), column="points")
    results.append(
        Result(
            task="CLIP: furniture, zero-shot classification of point clouds",
            data=f"{int(zero_shot['samples'])} test objects whose name has one of {len(CLASSES)} class names",
            value=percent(zero_shot["top1"]),
            baseline="the most frequent class",
            baseline_value=percent(zero_shot["majority"]),
            chance=percent(zero_shot["chance"]),
            **facts,
        )
    )
    probes = [linear_probe(m, "points", train, test, "class", validation) for m in (model, _RawFeatures())]
    results.append(
        Result(
            task="CLIP: furniture, linear probe of point clouds",
            data=f"{data}, {len(probes[0].classes)} classes",
            value=percent(probes[0].top1),
            baseline="logistic regression on occupied cells",
            baseline_value=percent(probes[1].top1),
            chance=percent(probes[0].majority),
            note="chance is the most frequent class",
            **facts,
        )
    )
    return [*results, speed_result(recipe, train, model, max(2, round(20 * scale)), "CLIP: furniture")]


def _with_class(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "kind": class_of(row["text"][0])} if row.get("text") else row


class _RawFeatures:
    """Occupied cells instead of a model's embeddings."""

    def embed(self, column: str, sources: Sequence[Tensor], batch_size: int = 64) -> Tensor:
        return torch.stack([point_features(s[:, :3].float()) for s in sources])


def _features(rows: Rows) -> dict[str, tuple[Tensor, list[Hashable]]]:
    """Input of the linear models: features of each column, and the row of each."""
    found: dict[str, tuple[list[Tensor], list[Hashable]]] = {c: ([], []) for c in ("points", "image", "text")}
    for n, row in enumerate(rows):
        values = {
            "points": [point_features(row["points"][:, :3].float())],
            "image": [image_features(row["image"])],
            "text": [text_features(t) for t in dict.fromkeys(row.get("text", []))],
        }
        for column, features in values.items():
            found[column][0].extend(features)
            found[column][1].extend([n] * len(features))
    return {c: (torch.stack(x), owners) for c, (x, owners) in found.items()}
