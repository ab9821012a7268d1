"""Freezing parts of a model by name."""

from __future__ import annotations

import difflib
import fnmatch

from torch import nn

from worldtokens.errors import InputError
from worldtokens.parts import clean_name


def freeze(model: nn.Module, *patterns: str) -> list[str]:
    """Keep parameters as they are in training: ``wt.freeze(model, "tokenizers", "trunk.blocks.[0-5].*")``.

    Gradients, weight decay, the optimizer and averaged weights leave them out. A module of which every parameter is
    frozen stays in eval mode when the model is put in training mode, so it drops no paths and learns no statistics; it
    gives what it gave. Freezing is a matter of a run, not of a model: `save` does not keep it.

    Args:
        model: any module.
        patterns: names of parameters or modules (then all in it), in which ``*`` stands for anything, dots too, ``?`` for
            one character and ``[0-5]`` for one of several.

    Returns:
        The names of the parameters that the patterns name.

    Raises:
        InputError: a pattern names nothing; the nearest names are told.
    """
    return _set(model, patterns, False)


def unfreeze(model: nn.Module, *patterns: str) -> list[str]:
    """The reverse of `freeze`; ``wt.freeze(model, "*")`` and then ``wt.unfreeze(model, "head")`` trains a head alone."""
    return _set(model, patterns, True)


def _set(model: nn.Module, patterns: tuple[str, ...], trains: bool) -> list[str]:
    if not patterns:
        raise InputError("expected one or more patterns of names, such as 'trunk.blocks.0.*'")
    params = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = [
            n for n in params if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"{pattern}.*")
        ]
        if not found:
            raise InputError(
                f"{pattern!r} names nothing in {type(model).__name__}; near it: {_near(pattern, params)}"
            )
        chosen |= dict.fromkeys(found)
    for name in chosen:
        params[name].requires_grad_(trains)
    model.train(model.training)  # what is frozen goes to eval mode now, and what is not any more comes back
    return list(chosen)


def _near(pattern: str, names: dict) -> list[str]:
    every = {".".join(n.split(".")[: k + 1]): None for n in names for k in range(n.count(".") + 1)}
    near = difflib.get_close_matches(pattern, every, 5, cutoff=0.5)
    return near or list(dict.fromkeys(n.split(".")[0] for n in names))
