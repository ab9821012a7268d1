"""Streaming of weights into a built model, tensor by tensor: no concatenated or renamed copy of all weights is in memory.

A table maps a pattern of the source's names to ours, as in `mapping.rename`; ``[part]`` after one of ours names the rows
that the source tensor fills (query, key and value of one projection, for example). Loading is as strict as
`mapping.load_weights`: an unknown weight, a missing one, or another shape is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.pretrained.mapping import compile_pattern, substitute

Rows = Mapping[str, tuple[int, int]]


def stream_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor] | Iterable[tuple[str, Callable[[], Tensor]]],
    table: Mapping[str, str],
    source: str,
    rows: Rows | None = None,
    transforms: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    skip: Iterable[str] = (),
    zero: Iterable[str] = (),
) -> None:
    """Copy weights into a model's parameters.

    Args:
        model: ours.
        weights: the source's by name; or pairs of a name and a function that makes the tensor, called once.
        table: pattern of the source's names -> ours; ``*`` stands for one component. A name of ours may end with ``[part]``.
        source: name of the source, for errors.
        rows: part -> (first row, number of rows).
        transforms: pattern of the source's names -> function applied to such a tensor first.
        skip: patterns of the source's names that are no weights, such as a causal mask.
        zero: patterns of ours that become zero where the source has nothing, such as an absent bias; with ``[part]``
            these rows alone.

    Raises:
        InputError: a weight is unknown, missing or of another shape; named.
    """
    rules = [(compile_pattern(theirs), ours) for theirs, ours in table.items()]
    functions = [(compile_pattern(theirs), f) for theirs, f in (transforms or {}).items()]
    skipped = [compile_pattern(p) for p in skip]
    own = dict(model.state_dict())
    first_name = {v.data_ptr(): k for k, v in reversed(own.items())}  # tied weights are one tensor
    rows_left = {k: v.shape[0] if v.ndim else 1 for k, v in own.items()}
    unknown, wrong, misshapen, copied = [], [], set(), set()
    for key, value in weights.items() if isinstance(weights, Mapping) else weights:
        if any(s.match(key) for s in skipped):
            continue
        ours = _map_name(key, rules)
        if ours is None:
            unknown.append(key)
            continue
        name, _, part = ours.removesuffix("]").partition("[")
        if name not in own:
            unknown.append(key)
            continue
        value = value if isinstance(value, Tensor) else value()
        for pattern, function in functions:
            value = function(value) if pattern.match(key) else value
        target = own[name]
        if part:
            first, count = rows[part]
            target = target[first : first + count]
        if target.shape != value.shape:
            wrong.append(f"{key} is {tuple(value.shape)}, expected {tuple(target.shape)}")
            misshapen.add(name)
            continue
        with torch.no_grad():
            target.copy_(value)
        rows_left[name] -= len(target) if target.ndim else 1
        copied.add(key)
    rows_left = {
        k: n for k, n in rows_left.items() if n and k not in misshapen and first_name[own[k].data_ptr()] == k
    }
    for pattern in zero:
        name, _, part = pattern.removesuffix("]").partition("[")
        for key in [k for k in rows_left if compile_pattern(name).match(k)]:
            first, count = rows[part] if part else (0, len(own[key]))
            if part or rows_left[key] == count:
                with torch.no_grad():
                    own[key][first : first + count].zero_()
                rows_left[key] -= count
    missing = [_source_names(k, table, copied) for k, n in rows_left.items() if n > 0]
    duplicates = [k for k, n in rows_left.items() if n < 0]
    _raise_problems(source, unknown, wrong, missing, duplicates)


def _map_name(key: str, rules: list[tuple[re.Pattern, str]]) -> str | None:
    for rule, ours in rules:
        if match := rule.match(key):
            return substitute(ours, match.groups())
    return None


def _raise_problems(
    source: str, unknown: list[str], wrong: list[str], missing: list[str], duplicates: list[str]
) -> None:
    problems = []
    if unknown:
        problems.append(f"weights that worldtokens cannot map: {_first_few(unknown)}")
    problems += wrong[:5]
    if missing:
        problems.append(f"missing {_first_few(missing)}")
    if duplicates:
        problems.append(f"given more than once: {_first_few(duplicates)}")
    if problems:
        raise InputError(f"{source} does not fit its config: " + "; ".join(problems))


def _first_few(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _source_names(name: str, table: Mapping[str, str], copied: set[str]) -> str:
    """The source's names of what is missing in one of our parameters, for an error."""
    names = []
    for theirs, ours in table.items():
        if match := compile_pattern(ours.partition("[")[0]).match(name):
            names.append(substitute(theirs, match.groups()))
    return " + ".join(n for n in names if n not in copied) or name
