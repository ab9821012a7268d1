"""What the checks of classifiers share: a recipe trained at a share of its length, and the line of a result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worldtokens.apps.confusion import draw_confusion
from worldtokens.quality.base import Result
from worldtokens.tasks.classification import Classifier
from worldtokens.training.loop import train
from worldtokens.training.recipe import Recipe
from worldtokens.training.settings import TrainReport


def read_recipe(name: str, out: Path, scale: float, seed: int = 0, *overrides: str) -> Recipe:
    """A shipped recipe that writes to `out`, with its steps times `scale` and one evaluation, at the end."""
    steps = Recipe.read(name).train.steps
    words = [
        "--train.out",
        str(out),
        "--train.overwrite",
        "--train.eval_every",
        "null",
        "--train.tensorboard",
        "false",
    ]
    words += ["--train.steps", str(max(2, round(steps * scale))), "--train.seed", str(seed), *overrides]
    return Recipe.read(name, words)


def train_recipe(recipe: Recipe, rows: Any = None, validation: Any = None) -> tuple[Classifier, TrainReport]:
    """Train what a recipe says, on its own rows or on these.

    Returns:
        The task, and the run's report, its `seconds` those of one core, whatever else the machine was doing.
    """
    own, held = recipe.rows() if rows is None else (rows, validation)
    task, augment = recipe.build(own)
    return task, train_measured(task, own, held, recipe, augment)


def train_measured(task: Classifier, rows: Any, validation: Any, recipe: Recipe, augment: Any) -> TrainReport:
    """A run by a recipe's settings; the report's `seconds` are processor time."""
    began = time.process_time()
    report = train(task, rows, validation, train=recipe.train, optim=recipe.optim, augment=augment)
    report.seconds = time.process_time() - began
    return report


def picture(task: Classifier, rows: Sequence, out: Path, title: str) -> None:
    """The confusion matrix of these rows, drawn."""
    draw_confusion(task.confusion(rows), task.names, out, title)


def percent(value: float) -> float:
    """A share as a percentage with one decimal."""
    return round(100 * value, 1)


def line(model: Classifier, report: TrainReport, /, **facts: Any) -> Result:
    """A `Result` in percent, with the model's size and the training's length filled in."""
    cfg, front = model.trunk.cfg, model.tokenizers[model.column]
    front = getattr(front, "tokenizer", front)
    facts.setdefault("size", f"{cfg.dim} wide, {cfg.depth} deep, {type(front).__name__}")
    facts.setdefault("parameters", sum(p.numel() for p in model.parameters()))
    facts.setdefault("minutes", round(report.seconds / 60, 1))
    for name in ("value", "baseline_value", "chance"):
        facts[name] = percent(facts[name])
    return Result(steps=report.steps, **facts)
