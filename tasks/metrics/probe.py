"""Evaluation of embeddings by classes: a linear probe on frozen features, and zero-shot classification.

Notable: both need embeddings only, so they work for any model with `embed(column, sources)`. The probe uses `features`
where a model has them: the features before the projection into the shared space (as in Radford et al. 2021). It is
logistic regression in float64 by L-BFGS: a convex problem, so the result depends on the data and not on a schedule.

Shapes: n samples, D width, C classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from worldtokens.errors import InputError

STRENGTHS = tuple(10.0**e for e in range(-6, 2))  # of the L2 penalty, weak to strong


@dataclasses.dataclass(frozen=True)
class Probe:
    """The result of `linear_probe`.

    Args:
        top1: accuracy on the test samples, 0 to 1.
        majority: accuracy of always predicting the most frequent training class.
        strength: strength of the L2 penalty, chosen on validation samples.
        classes: classes of the training rows, in the order of the weights.
        weight: (C, D) float64.
        bias: (C,) float64.
        samples: number of training and of test samples.
    """

    top1: float
    majority: float
    strength: float
    classes: list[Hashable]
    weight: Tensor
    bias: Tensor
    samples: tuple[int, int]


def linear_probe(
    model: Any,
    column: str,
    train_rows: Sequence[Mapping[str, Any]],
    test_rows: Sequence[Mapping[str, Any]],
    label: str = "class",
    validation_rows: Sequence[Mapping[str, Any]] | None = None,
    strengths: Sequence[float] = STRENGTHS,
    batch_size: int = 64,
) -> Probe:
    """L2-regularised multinomial logistic regression on frozen features, as in CLIP (Radford et al. 2021).

    Features are standardised by the training samples. The penalty's strength is the one with the best validation
    accuracy; the final fit uses training and validation rows together.

    Args:
        model: has `features(column, sources, batch_size)` -> (n, D), such as `CLIP`, or `embed`.
        column: column to embed. Rows without it are skipped; every value of a list is a sample.
        train_rows, test_rows: dicts by column.
        label: column of a row's class. A test row of a class that is not in training counts as wrong.
        validation_rows: None: every fifth training row of each class.
        strengths: candidates for s in the penalty s |W|^2 / 2, added to the mean log-loss; the bias is not penalised.
        batch_size: samples per forward pass.

    Returns:
        A `Probe`.

    Raises:
        InputError: no row has the column and a class, or there is only one class.
    """
    train = list(_labelled_rows(train_rows, column, label))
    if validation_rows is None:
        counts: dict[Hashable, int] = {}
        held_out = []
        for row in train:
            counts[row[label]] = counts.get(row[label], 0) + 1
            held_out.append(counts[row[label]] % 5 == 0)
        validation = [r for r, h in zip(train, held_out, strict=True) if h]
        train = [r for r, h in zip(train, held_out, strict=True) if not h]
    else:
        validation = list(_labelled_rows(validation_rows, column, label))
    test = list(_labelled_rows(test_rows, column, label))
    classes = sorted({r[label] for r in train} | {r[label] for r in validation}, key=str)
    for split, rows in (("training", train), ("validation", validation), ("test", test)):
        if not rows:
            raise InputError(f"no {split} row has both {column!r} and {label!r}")
    if len(classes) < 2:
        raise InputError(f"all training rows have the class {classes[0]!r}, expected two or more classes")
    embed = getattr(model, "features", model.embed)
    sets = [_samples(embed, column, rows, label, classes, batch_size) for rows in (train, validation, test)]
    mean, std = sets[0][0].mean(0), sets[0][0].std(0, correction=0)
    # a constant feature carries no information, and must not become rounding noise of size 1
    std = torch.where(std > 1e-6 * std.max(), std, torch.inf)
    (x, y), (vx, vy), (tx, ty) = [((x - mean) / std, y) for x, y in sets]
    best, start = (-1.0, 0.0), None
    for strength in sorted(strengths, reverse=True):
        start = logistic_regression(x, y, len(classes), strength, start)
        accuracy = float((_predict(vx, *start) == vy).double().mean())
        if accuracy > best[0]:  # ties keep the stronger penalty
            best = accuracy, strength
    weight, bias = logistic_regression(torch.cat([x, vx]), torch.cat([y, vy]), len(classes), best[1])
    top1 = float((_predict(tx, weight, bias) == ty).double().mean())
    most_frequent = torch.cat([y, vy]).bincount(minlength=len(classes)).argmax()
    return Probe(
        top1=top1,
        majority=float((ty == most_frequent).double().mean()),
        strength=best[1],
        classes=classes,
        weight=weight / std,
        bias=bias - weight @ (mean / std),
        samples=(len(x) + len(vx), len(tx)),
    )


def logistic_regression(
    x: Tensor, y: Tensor, classes: int, strength: float, start: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Minimises mean cross-entropy + strength |W|^2 / 2 by L-BFGS.

    Args:
        x: (n, D) float64.
        y: (n,) int64, 0 to C - 1.
        classes: C.
        strength: strength of the penalty, above 0.
        start: initial weights and bias; None: zeros.

    Returns:
        (C, D) weights and (C,) bias, float64, with a gradient below 1e-6 unless 500 steps did not reach it.
    """
    if start is None:
        start = x.new_zeros(classes, x.shape[1]), x.new_zeros(classes)
    weight, bias = (v.clone().requires_grad_() for v in start)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=500,
        tolerance_grad=1e-6,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight.T + bias, y) + strength / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return weight.detach(), bias.detach()


def zero_shot_top1(
    model: Any,
    rows: Sequence[Mapping[str, Any]],
    label: str = "class",
    classes: Sequence[str] | None = None,
    templates: Sequence[str | Callable[[str], str]] = ("{}",),
    column: str = "image",
    text: str = "text",
    batch_size: int = 64,
) -> dict[str, float]:
    """Zero-shot classification accuracy: the share of samples whose closest class embedding is their own class.

    Args:
        model: a `CLIP`.
        rows: dicts by column; those without `column` or `label` are skipped, every value of a list is a sample.
        label: column of a row's class.
        classes: class names; None: those of the rows.
        templates: prompts with ``{}`` for the name, or functions of it, averaged per class.
        column, text: columns of the samples and of the prompts.
        batch_size: samples per forward pass.

    Returns:
        ``top1`` (0 to 1), ``chance`` (1 / C), ``majority`` (share of the largest class), ``classes`` and ``samples``.

    Raises:
        InputError: no row has both columns, or one has a class that `classes` lacks.
    """
    rows = list(_labelled_rows(rows, column, label))
    if not rows:
        raise InputError(f"no row has both {column!r} and {label!r}")
    labels = {r[label] for r in rows}
    classes = sorted(labels, key=str) if classes is None else list(classes)
    if extra := labels - set(classes):
        raise InputError(f"rows have the class {min(extra, key=str)!r}, which is not in classes=")
    x, y = _samples(model.embed, column, rows, label, classes, batch_size)
    closest = (x @ model.class_vectors(classes, templates, text).double().cpu().T).argmax(1)
    counts = y.bincount(minlength=len(classes))
    return {
        "top1": float((closest == y).double().mean()),
        "chance": 1 / len(classes),
        "majority": float(counts.max() / counts.sum()),
        "classes": float(len(classes)),
        "samples": float(len(y)),
    }


def _labelled_rows(rows: Sequence[Mapping[str, Any]], column: str, label: str) -> Any:
    def present(value: Any) -> bool:
        return value is not None and not (isinstance(value, list) and not value)

    return (r for r in rows if r.get(label) is not None and present(r.get(column)))


def _samples(
    embed: Callable[..., Tensor],
    column: str,
    rows: Sequence[Mapping[str, Any]],
    label: str,
    classes: Sequence[Hashable],
    batch_size: int,
) -> tuple[Tensor, Tensor]:
    """(n, D) float64 features and (n,) class indices, -1 for an unknown class; on the CPU."""
    index = {c: i for i, c in enumerate(classes)}
    sources: list[Any] = []
    y: list[int] = []
    for row in rows:
        values = row[column] if isinstance(row[column], list) else [row[column]]
        sources += values
        y += [index.get(row[label], -1)] * len(values)
    with torch.no_grad():
        x = embed(column, sources, batch_size)
    return x.double().cpu(), torch.tensor(y)


def _predict(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x @ weight.T + bias).argmax(1)
