"""Shapes, images and names in one space, on furniture that training never saw, beside linear models of each pair."""

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
from worldtokens.evals.baselines.cca import cloud_features, linear_pairs, picture_features, text_features
from worldtokens.evals.classification.base import percent, read_recipe, train_measured
from worldtokens.evals.contrastive.base import ReadOnce, pair_lines, size_of, speed_line
from worldtokens.tasks.metrics.probe import linear_probe, zero_shot_top1
from worldtokens.tasks.metrics.retrieval import retrieval_table

ABOUT = "meshes, icons and names of furniture in one space"
# what a piece is, where its English name says so with one of these words and no other of them
KINDS = (
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


def kind_of(name: str) -> str | None:
    """The one word of `KINDS` that a name holds, or None: "Office chair" -> "chair", "Table lamp" -> None."""
    found = set(re.findall(r"\w+", name.casefold())) & set(KINDS)
    return found.pop() if len(found) == 1 else None


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """Train on four fifths of the pieces; find among the test pieces."""
    trial = () if scale == 1 else ("--train.batch_size", "16")  # which has few rows
    recipe = read_recipe("clip_furniture", out / "ours", scale, 0, *trial)
    rows, validation = recipe.rows()
    model, augment = recipe.build(rows)
    once = ReadOnce(model, ("points", "image"))
    test = samples.open("furniture", split="test")
    if scale < 1:  # a trial does not read hundreds of meshes
        rows, validation, test = (
            r[:: max(1, round(0.2 / max(scale, 0.02)))] for r in (rows, validation, test)
        )
    train, validation, test = (once(map(_kind, r)) for r in (rows, validation, test))
    report = train_measured(model, train, validation, recipe, augment)
    ours = model.evaluate(test)
    linear = linear_pairs(_features(train), _features(validation), _features(test))
    for title, figures in (("one space", ours), ("linear models, one a pair", linear)):
        with open(out / "tables.txt", "a", encoding="utf-8") as file:
            for console in (Console(), Console(file=file, width=100)):
                console.print(retrieval_table(figures, f"{len(test)} test pieces: {title}"))
    data = f"furniture, {len(train)} train / {len(test)} test"
    lines = pair_lines(
        model, report, ours, linear, "CLIP", data, "names in six languages in training, English in the test"
    )
    shared = {
        "size": size_of(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": report.steps,
        "minutes": round(report.seconds / 60, 1),
        "metric": "top-1 %",
    }
    told = zero_shot_top1(model, test, "kind", KINDS, ("{}", "a {}"), column="points")
    lines.append(
        Result(
            task="CLIP: zero-shot, kinds of furniture from shapes",
            data=f"{int(told['samples'])} test pieces whose name holds one of {len(KINDS)} words",
            value=percent(told["top1"]),
            baseline="the most frequent kind",
            baseline_value=percent(told["majority"]),
            chance=percent(told["chance"]),
            **shared,
        )
    )
    probes = [linear_probe(m, "points", train, test, "class", validation) for m in (model, _Raw())]
    lines.append(
        Result(
            task="CLIP: linear probe of shapes",
            data=f"{data}, {len(probes[0].classes)} categories",
            value=percent(probes[0].top1),
            baseline="logistic regression on occupied cells",
            baseline_value=percent(probes[1].top1),
            chance=percent(probes[0].majority),
            note="chance: the most frequent category",
            **shared,
        )
    )
    return [*lines, speed_line(recipe, train, model, max(2, round(20 * scale)), "CLIP: furniture")]


def _kind(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "kind": kind_of(row["text"][0])} if row.get("text") else row


class _Raw:
    """Occupied cells in place of a model."""

    def embed(self, column: str, sources: Sequence[Tensor], batch_size: int = 64) -> Tensor:
        return torch.stack([cloud_features(s[:, :3].float()) for s in sources])


def _features(rows: Rows) -> dict[str, tuple[Tensor, list[Hashable]]]:
    """What the linear models read, each thing with its piece."""
    things: dict[str, tuple[list[Tensor], list[Hashable]]] = {
        c: ([], []) for c in ("points", "image", "text")
    }
    for n, row in enumerate(rows):
        made = {
            "points": [cloud_features(row["points"][:, :3].float())],
            "image": [picture_features(row["image"])],
            "text": [text_features(t) for t in dict.fromkeys(row.get("text", []))],
        }
        for column, features in made.items():
            things[column][0].extend(features)
            things[column][1].extend([n] * len(features))
    return {c: (torch.stack(x), owners) for c, (x, owners) in things.items()}
