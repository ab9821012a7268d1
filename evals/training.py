"""Training of a shipped recipe inside an evaluation, measured in processor time."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import worldtokens as wt
from worldtokens.tasks.base import Task
from worldtokens.training.loop import train
from worldtokens.training.recipe import Recipe
from worldtokens.training.settings import TrainReport


def read_recipe(name: str, out: Path, scale: float, seed: int = 0, *overrides: str) -> Recipe:
    """A shipped recipe that writes to `out`, with its steps times `scale` and one evaluation, at the end."""
    steps = Recipe.read(name).train.steps
    options = [
        "--train.out",
        str(out),
        "--train.overwrite",
        "--train.eval_every",
        "null",
        "--train.tensorboard",
        "false",
    ]
    options += ["--train.steps", str(max(2, round(steps * scale))), "--train.seed", str(seed), *overrides]
    return Recipe.read(name, options)


def train_recipe(recipe: Recipe, rows: Any = None, validation: Any = None) -> tuple[Any, TrainReport]:
    """Train a recipe's model on the recipe's rows, or on `rows` and `validation`.

    Returns:
        The task, and the run's report, whose `seconds` are processor time.
    """
    rows, validation = recipe.rows() if rows is None else (rows, validation)
    task, augment = recipe.build(rows)
    return task, train_measured(task, rows, validation, recipe, augment)


def train_measured(task: Task, rows: Any, validation: Any, recipe: Recipe, augment: Any) -> TrainReport:
    """A training run with a recipe's settings; the report's `seconds` are processor time, independent of other load."""
    start = time.process_time()
    report = train(task, rows, validation, train=recipe.train, optim=recipe.optim, augment=augment)
    report.seconds = time.process_time() - start
    return report


def trained(recipe: Recipe) -> tuple[Any, float]:
    """A recipe's model, and the minutes of processor time that its training took.

    A finished model of the same recipe in the recipe's folder is loaded; a stopped training of it is resumed.
    """
    out, text = Path(recipe.train.out), str(recipe)
    begun, spent, finished = out / "begun", out / "seconds.json", out / "finished"
    same = begun.exists() and begun.read_text() == text and (out / "last").exists()
    before = json.loads(spent.read_text()) if same and spent.exists() else 0.0
    if same and finished.exists():
        return wt.load(out / "last"), before / 60
    finished.unlink(missing_ok=True)
    rows, validation = recipe.rows()
    model, augment = recipe.build(rows)
    settings = dataclasses.replace(recipe.train, resume=same)
    start = time.process_time()
    try:
        out.mkdir(parents=True, exist_ok=True)
        begun.write_text(text)
        train(model, rows, validation, train=settings, optim=recipe.optim, augment=augment)
    finally:
        seconds = before + time.process_time() - start
        spent.write_text(json.dumps(seconds))
    finished.touch()
    return model, seconds / 60


def percent(value: float) -> float:
    """A share as a percentage with one decimal."""
    return round(100 * value, 1)


def parameter_count(model: Any) -> int:
    """Number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())
