"""Kinds of instrument sounds: five-fold cross-validation over 165 recordings, beside logistic regression on log-mel."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import classes_of, figures, fit, fit_best, pooled_mel
from worldtokens.evals.classification.base import line, read_recipe, train_recipe
from worldtokens.figures.confusion import confusion_figure

ABOUT = "kinds of instrument sounds, 165 recordings: five-fold cross-validation"
FOLDS = 5


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """Each recording is asked once, of a model that did not hear it."""
    rows = samples.open("samples")
    # folds by hash within each class, so that the smallest ones are in every training set
    order = sorted(
        range(len(rows)), key=lambda i: (rows[i]["class"], hashlib.sha256(rows[i]["id"].encode()).digest())
    )
    fold = torch.empty(len(rows), dtype=torch.long)
    fold[torch.tensor(order)] = torch.arange(len(rows)) % FOLDS
    x = pooled_mel([row["audio"] for row in rows], sample_rate=16000, n_mels=64, seconds=2.56)
    answers, linear, confusion, seconds = [], [], 0, 0.0
    for k in range(FOLDS):
        away = [i for i in range(len(rows)) if fold[i] != k]
        asked = [i for i in range(len(rows)) if fold[i] == k]
        recipe = read_recipe("classify_samples", out / f"fold{k}", scale, k)
        task, report = train_recipe(recipe, rows.take(away), rows.take(asked))
        seconds += report.seconds
        held = rows.take(asked)
        answers.append((task.logits([row["audio"] for row in held]).cpu(), classes_of(held, task.names)))
        confusion = confusion + task.confusion(held)
        y = classes_of(rows, task.names)
        # the decay is picked on a fifth of the fold's training rows
        inner = [i for i in away if fold[i] == (k + 1) % FOLDS]
        rest = [i for i in away if fold[i] != (k + 1) % FOLDS]
        picked = fit_best(x[rest], y[rest], x[inner], y[inner], len(task.names))
        linear.append((fit(x[away], y[away], len(task.names), picked.decay)(x[asked]), y[asked]))
    confusion_figure(confusion, task.names, out / "confusion.png", "instrument sounds, five folds")
    ours, base = (
        figures(*(torch.cat(part) for part in zip(*found, strict=True))) for found in (answers, linear)
    )
    y = classes_of(rows, task.names)
    report.seconds = seconds
    return [
        line(
            task, report, task="Classifier: kinds of instrument sounds",
            data=f"samples, {len(rows)} recordings, {FOLDS}-fold cross-validation", metric=f"{metric} %", value=ours[key],
            baseline="logistic regression on the mean log-mel of each third", baseline_value=base[key], chance=chance,
            note=f"steps of each fold, minutes of all; one recording is {100 / len(rows):.1f} %",
        )
        for key, metric, chance in (
            ("top1", "top-1", float(y.bincount().max()) / len(y)),
            ("macro", "accuracy averaged over classes", 1 / len(task.names)),
        )
    ]  # fmt: skip
