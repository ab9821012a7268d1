"""How good a space is, judged by classes that it was not trained on: a linear probe, and classes told in words.

Notable: both read vectors alone, so any model with `embed(column, sources)` can be judged; the probe takes `features` where a
model has them, what stands before the projection into the shared space (as Radford et al. 2021 did). It is logistic
regression in float64 by L-BFGS: a convex problem, so its answer follows from the data and not from a schedule.

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

STRENGTHS = tuple(10.0**e for e in range(-6, 2))  # of the penalty, weak to strong


@dataclasses.dataclass(frozen=True)
class Probe:
    """What `linear_probe` found.

    Args:
        top1: share of test samples whose class is the likeliest, 0 to 1.
        majority: the share that the most frequent training class alone would give.
        strength: of the L2 penalty, chosen on validation samples.
        classes: of the training rows, in the order of the weights.
        weight: (C, D) float64.
        bias: (C,) float64.
        samples: training and test samples.
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
    """L2-regularised multinomial logistic regression on frozen features, as CLIP (Radford et al. 2021) was judged.

    Features are standardised by the training samples. The penalty's strength is the one that is best on validation
    rows; the answer is then fitted anew on training and validation rows together.

    Args:
        model: has `features(column, sources, batch_size)` -> (n, D), such as `CLIP`, or `embed`.
        column: which front-end's. Rows without it are left out; of a list every value is a sample.
        train_rows, test_rows: dicts by column.
        label: the column of a row's class. A test row of a class that training lacks counts as wrong.
        validation_rows: None: every fifth training row of each class.
        strengths: s of the penalty s |W|^2 / 2 beside the mean log-loss, to choose from; the bias is free.

    Returns:
        A `Probe`.

    Raises:
        InputError: no row has the column and a class, or there is one class only.
    """
    train = list(_having(train_rows, column, label))
    if validation_rows is None:
        seen: dict[Hashable, int] = {}
        held = []
        for row in train:
            seen[row[label]] = seen.get(row[label], 0) + 1
            held.append(seen[row[label]] % 5 == 0)
        validation = [r for r, h in zip(train, held, strict=True) if h]
        train = [r for r, h in zip(train, held, strict=True) if not h]
    else:
        validation = list(_having(validation_rows, column, label))
    test = list(_having(test_rows, column, label))
    classes = sorted({r[label] for r in train} | {r[label] for r in validation}, key=str)
    for what, found in (("training", train), ("validation", validation), ("test", test)):
        if not found:
            raise InputError(f"no {what} row has both {column!r} and {label!r}")
    if len(classes) < 2:
        raise InputError(f"all training rows are of the class {classes[0]!r}, expected two or more classes")
    seen = getattr(model, "features", model.embed)
    sets = [_samples(seen, column, rows, label, classes, batch_size) for rows in (train, validation, test)]
    mean, std = sets[0][0].mean(0), sets[0][0].std(0, correction=0)
    # a constant feature tells nothing, and must not become rounding noise of size 1
    std = torch.where(std > 1e-6 * std.max(), std, torch.inf)
    (x, y), (vx, vy), (tx, ty) = [((x - mean) / std, y) for x, y in sets]
    best, start = (-1.0, 0.0), None
    for strength in sorted(strengths, reverse=True):
        start = logistic(x, y, len(classes), strength, start)
        right = float((_answers(vx, *start) == vy).double().mean())
        if right > best[0]:  # of equals the stronger
            best = right, strength
    weight, bias = logistic(torch.cat([x, vx]), torch.cat([y, vy]), len(classes), best[1])
    top1 = float((_answers(tx, weight, bias) == ty).double().mean())
    most = torch.cat([y, vy]).bincount(minlength=len(classes)).argmax()
    return Probe(
        top1=top1,
        majority=float((ty == most).double().mean()),
        strength=best[1],
        classes=classes,
        weight=weight / std,
        bias=bias - weight @ (mean / std),
        samples=(len(x) + len(vx), len(tx)),
    )


def logistic(
    x: Tensor, y: Tensor, classes: int, strength: float, start: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The minimum of mean cross-entropy + strength |W|^2 / 2.

    Args:
        x: (n, D) float64.
        y: (n,) int64, 0 to C - 1.
        classes: C.
        strength: above 0.
        start: weights and bias to begin from.

    Returns:
        (C, D) weights and (C,) bias, float64, whose gradient is below 1e-6 or as small as 500 steps make it.
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
    """Classes told in words: the share of samples whose nearest class is their own.

    Args:
        model: a `CLIP`.
        rows: dicts by column; those without `column` or `label` are left out, of a list every value is a sample.
        label: the column of a row's class.
        classes: their names; None: those of the rows.
        templates: prompts with ``{}`` for the name, or functions of it, averaged per class.

    Returns:
        ``top1`` (0 to 1), ``chance`` (1 / C), ``majority`` (the share of the largest class), ``classes`` and ``samples``.

    Raises:
        InputError: no row has both columns, or one has a class that `classes` lacks.
    """
    rows = list(_having(rows, column, label))
    if not rows:
        raise InputError(f"no row has both {column!r} and {label!r}")
    found = {r[label] for r in rows}
    classes = sorted(found, key=str) if classes is None else list(classes)
    if extra := found - set(classes):
        raise InputError(f"rows have the class {min(extra, key=str)!r}, which is not among the classes given")
    x, y = _samples(model.embed, column, rows, label, classes, batch_size)
    near = (x @ model.class_vectors(classes, templates, text).double().cpu().T).argmax(1)
    counts = y.bincount(minlength=len(classes))
    return {
        "top1": float((near == y).double().mean()),
        "chance": 1 / len(classes),
        "majority": float(counts.max() / counts.sum()),
        "classes": float(len(classes)),
        "samples": float(len(y)),
    }


def _having(rows: Sequence[Mapping[str, Any]], column: str, label: str) -> Any:
    def there(value: Any) -> bool:
        return value is not None and not (isinstance(value, list) and not value)

    return (r for r in rows if r.get(label) is not None and there(r.get(column)))


def _samples(
    vectors: Callable[..., Tensor],
    column: str,
    rows: Sequence[Mapping[str, Any]],
    label: str,
    classes: Sequence[Hashable],
    batch_size: int,
) -> tuple[Tensor, Tensor]:
    """(n, D) float64 features and (n,) class numbers, -1 for a class that is not known; on the CPU."""
    number = {c: i for i, c in enumerate(classes)}
    sources, y = [], []
    for row in rows:
        values = row[column] if isinstance(row[column], list) else [row[column]]
        sources += values
        y += [number.get(row[label], -1)] * len(values)
    with torch.no_grad():
        x = vectors(column, sources, batch_size)
    return x.double().cpu(), torch.tensor(y)


def _answers(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x @ weight.T + bias).argmax(1)
