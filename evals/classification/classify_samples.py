"""Instrument classes: five-fold cross-validation over 165 recordings; baseline: logistic regression on log-mel."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import accuracies, classes_of, fit, fit_best, pooled_mel
from worldtokens.evals.classification.base import classifier_result
from worldtokens.evals.training import read_recipe, train_recipe
from worldtokens.figures.confusion import confusion_figure

ABOUT = "classes of instrument recordings: five-fold cross-validation over 165 recordings"
FOLDS = 5


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Each recording is classified once, by a model that was not trained on it."""
    rows = samples.open("samples")
    # folds by hash within each class, so that the smallest classes are in every training set
    order = sorted(
        range(len(rows)), key=lambda i: (rows[i]["class"], hashlib.sha256(rows[i]["id"].encode()).digest())
    )
    fold = torch.empty(len(rows), dtype=torch.long)
    fold[torch.tensor(order)] = torch.arange(len(rows)) % FOLDS
    x = pooled_mel([row["audio"] for row in rows], sample_rate=16000, n_mels=64, seconds=2.56)
    logits, linear, confusion, seconds = [], [], 0, 0.0
    for k in range(FOLDS):
        training = [i for i in range(len(rows)) if fold[i] != k]
        held_out = [i for i in range(len(rows)) if fold[i] == k]
        recipe = read_recipe("classify_samples", out / f"fold{k}", scale, k)
        task, report = train_recipe(recipe, rows.select(training), rows.select(held_out))
        seconds += report.seconds
        test = rows.select(held_out)
        logits.append((task.logits([row["audio"] for row in test]).cpu(), classes_of(test, task.names)))
        confusion = confusion + task.confusion(test)
        y = classes_of(rows, task.names)
        # the decay is chosen on a quarter of the fold's training rows
        inner = [i for i in training if fold[i] == (k + 1) % FOLDS]
        rest = [i for i in training if fold[i] != (k + 1) % FOLDS]
        chosen = fit_best(x[rest], y[rest], x[inner], y[inner], len(task.names))
        linear.append(
            (fit(x[training], y[training], len(task.names), chosen.decay)(x[held_out]), y[held_out])
        )
    confusion_figure(confusion, task.names, out / "confusion.png", "instrument recordings, five folds")
    ours, base = (
        accuracies(*(torch.cat(part) for part in zip(*found, strict=True))) for found in (logits, linear)
    )
    y = classes_of(rows, task.names)
    report.seconds = seconds
    return [
        classifier_result(
            task, report, task="Classifier: instrument recordings",
            data=f"samples, {len(rows)} recordings, {FOLDS}-fold cross-validation", metric=f"{metric} %", value=ours[key],
            baseline="logistic regression on the mean log-mel of each third", baseline_value=base[key], chance=chance,
            note=f"steps per fold, minutes of all folds; one recording is {100 / len(rows):.1f} %",
        )
        for key, metric, chance in (
            ("top1", "top-1", float(y.bincount().max()) / len(y)),
            ("macro", "mean class accuracy", 1 / len(task.names)),
        )
    ]  # fmt: skip
