"""What evaluations of classifiers share: the confusion figure, and a `Result` with the model's size filled in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worldtokens.evals.base import Result
from worldtokens.evals.training import parameter_count, percent
from worldtokens.figures.confusion import confusion_figure
from worldtokens.tasks.classification.model import Classifier
from worldtokens.training.settings import TrainReport


def save_confusion(task: Classifier, rows: Sequence, out: Path, title: str) -> None:
    """Draw the confusion matrix of these rows."""
    confusion_figure(task.confusion(rows), task.names, out, title)


def classifier_result(model: Classifier, report: TrainReport, /, **facts: Any) -> Result:
    """A `Result` in percent, with the model's size and the length of its training filled in."""
    cfg, front = model.trunk.cfg, model.tokenizers[model.column]
    front = getattr(front, "tokenizer", front)
    facts.setdefault("size", f"{type(front).__name__}, Transformer of dim {cfg.dim}, depth {cfg.depth}")
    facts.setdefault("parameters", parameter_count(model))
    facts.setdefault("minutes", round(report.seconds / 60, 1))
    for name in ("value", "baseline_value", "chance"):
        facts[name] = percent(facts[name])
    return Result(steps=report.steps, **facts)
