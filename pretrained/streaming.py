"""Weights into a finished model, tensor by tensor: no joined or renamed copy of the whole is ever held.

A table maps a pattern of their names to ours, as in `mapping.rename`; ``[part]`` behind one of ours names the rows that
theirs fill (query, key and value of one map, for example). As strict as `mapping.fill`: what has no place, what is
missing and what has another shape are errors that name it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.pretrained.mapping import _fill, _matcher

Rows = Mapping[str, tuple[int, int]]


def pour(
    model: nn.Module,
    weights: Mapping[str, Tensor] | Iterable[tuple[str, Callable[[], Tensor]]],
    table: Mapping[str, str],
    source: str,
    rows: Rows | None = None,
    change: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    derived: Iterable[str] = (),
    zero: Iterable[str] = (),
) -> None:
    """Copy weights to their places in a model.

    Args:
        model: ours.
        weights: theirs by name; or pairs of a name and a function that makes the tensor, called once.
        table: pattern of theirs -> ours; ``*`` stands for one part of a name. A name of ours may end with ``[part]``.
        rows: part -> (first row, how many).
        change: pattern of theirs -> what to do with such a tensor first.
        derived: patterns of theirs that hold no weight, such as a mask.
        zero: patterns of ours that are zero where theirs fill nothing, a bias that the original lacks; with ``[part]``
            it lacks these rows alone.

    Raises:
        InputError: a weight has no place or another shape, or a place stays empty; named.
    """
    rules = [(_matcher(theirs), ours) for theirs, ours in table.items()]
    changes = [(_matcher(theirs), function) for theirs, function in (change or {}).items()]
    skipped = [_matcher(p) for p in derived]
    own = dict(model.state_dict())
    names = {v.data_ptr(): k for k, v in reversed(own.items())}  # tied weights are one place
    left = {k: v.shape[0] if v.ndim else 1 for k, v in own.items()}
    unknown, wrong, spoiled, given = [], [], set(), set()
    for key, value in weights.items() if isinstance(weights, Mapping) else weights:
        if any(s.match(key) for s in skipped):
            continue
        place = _place(key, rules)
        if place is None:
            unknown.append(key)
            continue
        name, _, part = place.removesuffix("]").partition("[")
        if name not in own:
            unknown.append(key)
            continue
        value = value if isinstance(value, Tensor) else value()
        for matcher, function in changes:
            value = function(value) if matcher.match(key) else value
        target = own[name]
        if part:
            first, count = rows[part]
            target = target[first : first + count]
        if target.shape != value.shape:
            wrong.append(f"{key} is {tuple(value.shape)}, expected {tuple(target.shape)}")
            spoiled.add(name)
            continue
        with torch.no_grad():
            target.copy_(value)
        left[name] -= len(target) if target.ndim else 1
        given.add(key)
    left = {k: n for k, n in left.items() if n and k not in spoiled and names[own[k].data_ptr()] == k}
    for pattern in zero:
        name, _, part = pattern.removesuffix("]").partition("[")
        for key in [k for k in left if _matcher(name).match(k)]:
            first, count = rows[part] if part else (0, len(own[key]))
            if part or left[key] == count:
                with torch.no_grad():
                    own[key][first : first + count].zero_()
                left[key] -= count
    left = {k: n for k, n in left.items() if n}
    missing = [_theirs(k, table, given) for k, n in left.items() if n > 0]
    _tell(source, unknown, wrong, missing, [k for k, n in left.items() if n < 0])


def _place(key: str, rules: list[tuple[re.Pattern, str]]) -> str | None:
    for rule, ours in rules:
        if found := rule.match(key):
            return _fill(ours, found.groups())
    return None


def _tell(source: str, unknown: list[str], wrong: list[str], missing: list[str], twice: list[str]) -> None:
    problems = []
    if unknown:
        problems.append(f"weights that worldtokens has no place for: {_some(unknown)}")
    problems += wrong[:5]
    if missing:
        problems.append(f"missing {_some(missing)}")
    if twice:
        problems.append(f"given more than once: {_some(twice)}")
    if problems:
        raise InputError(f"{source} does not fit its config: " + "; ".join(problems))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _theirs(name: str, table: Mapping[str, str], given: set[str]) -> str:
    """Their names for what is missing of a place of ours, for an error."""
    found = []
    for theirs, ours in table.items():
        if match := _matcher(ours.partition("[")[0]).match(name):
            found.append(_fill(theirs, match.groups()))
    return " + ".join(f for f in found if f not in given) or name
