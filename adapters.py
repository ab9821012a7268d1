"""Adapters of `peft` in a saved model: their settings as plain values, and empty adapters made from those again.

`wt.merge_lora` adds them into the weights; see `pretrained/surgery/lora.py`.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from worldtokens.errors import InputError


def settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The adapters' settings as plain values, by their names; what peft takes anyway is not told."""
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
        InputError: they do not fit, or peft is not there.
    """
    peft = peft_module("peft")
    for name, given in adapters.items():
        try:
            config = peft.PeftConfig.from_peft_type(**given)
            peft.inject_adapter_in_model(config, model, name)
        except (TypeError, ValueError, KeyError) as e:
            raise InputError(f"adapter {name!r} cannot be put into {type(model).__name__}: {e}") from e


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.value if isinstance(value, enum.Enum) else value


def peft_module(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise InputError(f"adapters need {e.name}: pip install worldtokens[lora]") from e
