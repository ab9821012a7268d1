"""What changes to a built model share: finding a front-end in it, and putting a part of other sizes in a part's place.

A part keeps its identity: whatever holds it (a task, a tied head, a second column) goes on holding it. Its parameters are
new objects where their shapes change, so an optimizer is made after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tokenizers.base import Tokenizer

Front = TypeVar("Front", bound=Tokenizer)


def find_front(model: nn.Module, kind: type[Front], column: str | None) -> Front:
    """The one front-end of a kind in a model, or the model itself.

    Args:
        model: a task, an encoder, or a front-end.
        kind: its class.
        column: its name in the model, where there are several.

    Raises:
        InputError: there is none, or more than one.
    """
    found = {name: m for name, m in model.named_modules() if isinstance(m, kind)}
    if column is not None:
        found = {name: m for name, m in found.items() if column in name.split(".")}
    if len(found) == 1:
        return next(iter(found.values()))
    where = f" under {column!r}" if column is not None else ""
    if not found:
        has = sorted({type(m).__name__ for m in model.modules() if isinstance(m, Tokenizer)})
        raise InputError(
            f"{type(model).__name__} has no {kind.__name__}{where}; its front-ends are {has or 'none'}"
        )
    raise InputError(
        f"{type(model).__name__} has several {kind.__name__}s{where}: {list(found)}; name one with column="
    )


def arguments(part: Part, **changes: Any) -> dict[str, Any]:
    """What to call a part's class with for another one of its settings, but for the changes."""
    args = part.config_args() | changes
    return {k: dict(v) if isinstance(v, nn.ModuleDict) else v for k, v in args.items()}


def remake(
    part: Part,
    changes: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    fit: Callable[[str, Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Build a part anew with other settings and put it in its own place, weights, device, mode and freezing kept.

    Args:
        part: changed in place.
        changes: constructor arguments that differ.
        tensors: new values of weights, by name.
        fit: (name, old value, start value of the new shape) -> new value, for other weights whose shape differs.

    Raises:
        InputError: a weight's shape differs and nothing tells what becomes of it.
    """
    given = dict(tensors or {})
    state = {k: v.detach().clone() for k, v in part.state_dict().items()}
    trains = {k: p.requires_grad for k, p in part.named_parameters()}
    like = next(part.parameters(), torch.empty(0))
    training = part.training
    new = type(part)(**arguments(part, **changes)).to(like.device, like.dtype)
    own = new.state_dict()
    if odd := own.keys() ^ (state | given).keys():
        raise InputError(
            f"{type(part).__name__} holds other weights than its settings make: {sorted(odd)[:5]}; merge adapters first "
            "(wt.merge_lora)"
        )
    with torch.no_grad():
        for name, value in own.items():
            kept = given.get(name, state.get(name))
            if kept.shape != value.shape:
                if fit is None:
                    raise InputError(
                        f"{type(part).__name__}: {name} is {tuple(kept.shape)} and becomes {tuple(value.shape)}, which "
                        "this change does not know how to do"
                    )
                kept = fit(name, kept, value)
            value.copy_(kept)
    for name, p in new.named_parameters():
        p.requires_grad_(trains.get(name, True))
    hooks = {k: v for k, v in part.__dict__.items() if k.endswith("_hooks")}
    derived = {
        k
        for k in part.__dict__
        if k not in new.__dict__ and isinstance(getattr(type(part), k, None), functools.cached_property)
    }
    for name in derived:  # made again when asked for
        del part.__dict__[name]
    part.__dict__.update(new.__dict__ | hooks)
    part.train(training)


def owners(model: nn.Module, front: nn.Module) -> list[Part]:
    """The parts of a model that hold a front-end, the innermost first."""
    held = [(name, m) for name, m in model.named_modules() if m is not front and front in set(m.modules())]
    return [m for _, m in sorted(held, key=lambda pair: -len(pair[0].split("."))) if isinstance(m, Part)]
