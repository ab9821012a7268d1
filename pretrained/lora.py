"""LoRA (Hu et al. 2021) is peft's: it is put into a model of ours in place, saved with it, and merged.

    import peft
    peft.inject_adapter_in_model(peft.LoraConfig(r=8, target_modules=r"trunk\\..*\\.(qkv|fc1)"), model)
    worldtokens.train(model, rows, train=..., optim=...)     # a run saves and resumes with its adapters
    wt.merge_lora(model).save("out")                         # an ordinary model again

`inject_adapter_in_model` freezes what it doesn't adapt (`wt.unfreeze(model, "head")` lets a new head learn too) and leaves
the task a task, which the training loop needs; of `peft.get_peft_model(model, config)` the same is
``.get_base_model()``. A recipe's task gets its adapters between being built and being trained::

    recipe = Recipe.read("digits")
    rows, validation = recipe.rows()
    task, augment = recipe.build(rows)
    peft.inject_adapter_in_model(config, task)
    train(task, rows, validation, train=recipe.train, optim=recipe.optim, augment=augment)
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from worldtokens.errors import InputError

Model = TypeVar("Model", bound=nn.Module)


def merge_lora(model: Model) -> Model:
    """Add adapters into the weights that they change, and take them out: the same numbers from plain layers.

    Frozen weights stay frozen: `wt.unfreeze(model, "*")` lets all learn again.

    Args:
        model: with adapters of `peft`; changed in place.

    Returns:
        The model.

    Raises:
        InputError: it has none.
    """
    layers = _peft("peft.tuners.tuners_utils").BaseTunerLayer
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, layers)]
    if not found:
        raise InputError(f"{type(model).__name__} has no adapters of peft to merge")
    for name, layer in found:
        layer.merge(safe_merge=True)
        holder, _, own = name.rpartition(".")
        setattr(model.get_submodule(holder), own, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model


def settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The adapters' settings as plain values, by their names; what peft takes anyway isn't told."""
    made = {}
    for name, config in model.peft_config.items():
        usual = _plain(type(config)().to_dict())
        given = _plain(config.to_dict())
        kept = {k: v for k, v in given.items() if v != usual.get(k) and k != "peft_version"}
        made[name] = {"peft_type": given["peft_type"], **kept}
    return made


def put_in(model: nn.Module, adapters: Mapping[str, Mapping[str, Any]]) -> None:
    """Put empty adapters into a model as `settings` tells them; their weights are loaded after.

    Raises:
        InputError: they don't fit, or peft isn't there.
    """
    peft = _peft("peft")
    for name, given in adapters.items():
        try:
            config = peft.PeftConfig.from_peft_type(**given)
            peft.inject_adapter_in_model(config, model, name)
        except (TypeError, ValueError, KeyError) as e:
            raise InputError(f"adapter {name!r} can't be put into {type(model).__name__}: {e}") from e


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.value if isinstance(value, enum.Enum) else value


def _peft(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise InputError(f"adapters need {e.name}: pip install worldtokens[lora]") from e
