"""What the checks of classifiers share: a recipe trained at a share of its length, and the line of a result."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import worldtokens as wt
from worldtokens.evals.base import Result
from worldtokens.figures.confusion import confusion_figure
from worldtokens.tasks.classification.model import Classifier
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


def trained(recipe: Recipe) -> tuple[Any, float]:
    """A recipe's model, and the minutes of processor time that it took.

    What the recipe's folder holds is taken: a finished model of this very recipe as it is, a stopped one is gone on with.
    """
    out, said = Path(recipe.train.out), str(recipe)
    begun, spent, finished = out / "begun", out / "seconds.json", out / "finished"
    same = begun.exists() and begun.read_text() == said and (out / "last").exists()
    before = json.loads(spent.read_text()) if same and spent.exists() else 0.0
    if same and finished.exists():
        return wt.load(out / "last"), before / 60
    finished.unlink(missing_ok=True)
    rows, held = recipe.rows()
    model, augment = recipe.build(rows)
    settings = dataclasses.replace(recipe.train, resume=same)
    began = time.process_time()
    try:
        out.mkdir(parents=True, exist_ok=True)
        begun.write_text(said)
        train(model, rows, held, train=settings, optim=recipe.optim, augment=augment)
    finally:
        seconds = before + time.process_time() - began
        spent.write_text(json.dumps(seconds))
    finished.touch()
    return model, seconds / 60


def picture(task: Classifier, rows: Sequence, out: Path, title: str) -> None:
    """The confusion matrix of these rows, drawn."""
    confusion_figure(task.confusion(rows), task.names, out, title)


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
