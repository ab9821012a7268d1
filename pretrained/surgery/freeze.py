"""Freeze parameters of a model by name."""

from __future__ import annotations

import difflib
import fnmatch

from torch import nn

from worldtokens.errors import InputError
from worldtokens.parts import clean_name


def freeze(model: nn.Module, *patterns: str) -> list[str]:
    """Freeze parameters: ``wt.freeze(model, "tokenizers", "trunk.blocks.[0-5].*")``.

    They have no gradient, no weight decay, no optimizer state and no moving average. A module of which every parameter
    is frozen stays in eval mode in training: no drop path, no update of statistics, so its output does not change.
    `save` does not store what is frozen.

    Args:
        model: any module.
        patterns: names of parameters or modules (then all parameters in it). ``*`` matches anything, dots too, ``?`` one
            character, ``[0-5]`` one of several.

    Returns:
        Names of the matched parameters.

    Raises:
        InputError: a pattern matches nothing; the error lists close names.
    """
    return _set(model, patterns, False)


def unfreeze(model: nn.Module, *patterns: str) -> list[str]:
    """The reverse of `freeze`; ``wt.freeze(model, "*")`` then ``wt.unfreeze(model, "head")`` trains the head alone."""
    return _set(model, patterns, True)


def _set(model: nn.Module, patterns: tuple[str, ...], requires_grad: bool) -> list[str]:
    if not patterns:
        raise InputError("expected one or more patterns of names, such as 'trunk.blocks.0.*'")
    params = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    matched: dict[str, None] = {}
    for pattern in patterns:
        names = [
            n for n in params if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"{pattern}.*")
        ]
        if not names:
            raise InputError(
                f"{pattern!r} matches nothing in {type(model).__name__}; close names: {_close_names(pattern, params)}"
            )
        matched |= dict.fromkeys(names)
    for name in matched:
        params[name].requires_grad_(requires_grad)
    model.train(model.training)  # sets eval mode of frozen modules, training mode of the others
    return list(matched)


def _close_names(pattern: str, names: dict) -> list[str]:
    prefixes = {".".join(n.split(".")[: k + 1]): None for n in names for k in range(n.count(".") + 1)}
    close = difflib.get_close_matches(pattern, prefixes, 5, cutoff=0.5)
    return close or list(dict.fromkeys(n.split(".")[0] for n in names))
