"""Shared by all surgery: find a front-end in a model, and rebuild a part with other settings in place.

A rebuilt part keeps its identity: a task, a tied head or a second column that refers to it needs no update. Parameters
whose shape changes are new objects, so create the optimizer afterwards.
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
    """The only front-end of a class in a model, or the model itself.

    Args:
        model: a task, an encoder, or a front-end.
        kind: class of the front-end.
        column: its name in the model, needed if there are several.

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


def constructor_args(part: Part, **changes: Any) -> dict[str, Any]:
    """Constructor arguments of a part, with changes."""
    args = part.config_args() | changes
    return {k: dict(v) if isinstance(v, nn.ModuleDict) else v for k, v in args.items()}


def rebuild(
    part: Part,
    changes: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    fit: Callable[[str, Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Rebuild a part in place with other settings; weights, device, mode and frozen parameters are kept.

    Args:
        part: changed in place.
        changes: constructor arguments that differ.
        tensors: new values of weights, by name.
        fit: (name, old value, initial value of the new shape) -> new value, for other weights whose shape differs.

    Raises:
        InputError: a weight's shape differs and neither `tensors` nor `fit` covers it.
    """
    replaced = dict(tensors or {})
    state = {k: v.detach().clone() for k, v in part.state_dict().items()}
    trainable = {k: p.requires_grad for k, p in part.named_parameters()}
    like = next(part.parameters(), torch.empty(0))
    training = part.training
    new = type(part)(**constructor_args(part, **changes)).to(like.device, like.dtype)
    own = new.state_dict()
    if differing := own.keys() ^ (state | replaced).keys():
        raise InputError(
            f"{type(part).__name__} has other weights than its settings define: {sorted(differing)[:5]}; merge adapters first "
            "(wt.merge_lora)"
        )
    with torch.no_grad():
        for name, value in own.items():
            old = replaced.get(name, state.get(name))
            if old.shape != value.shape:
                if fit is None:
                    raise InputError(
                        f"{type(part).__name__}: {name} is {tuple(old.shape)} and would become "
                        f"{tuple(value.shape)}, which this change does not support"
                    )
                old = fit(name, old, value)
            value.copy_(old)
    for name, p in new.named_parameters():
        p.requires_grad_(trainable.get(name, True))
    hooks = {k: v for k, v in part.__dict__.items() if k.endswith("_hooks")}
    cached = {
        k
        for k in part.__dict__
        if k not in new.__dict__ and isinstance(getattr(type(part), k, None), functools.cached_property)
    }
    for name in cached:  # computed again on access
        del part.__dict__[name]
    part.__dict__.update(new.__dict__ | hooks)
    part.train(training)


def owners(model: nn.Module, front: nn.Module) -> list[Part]:
    """Parts of a model that contain a front-end, innermost first."""
    found = [(name, m) for name, m in model.named_modules() if m is not front and front in set(m.modules())]
    return [m for _, m in sorted(found, key=lambda pair: -len(pair[0].split("."))) if isinstance(m, Part)]
