"""`peft` adapters of a saved model: their settings as plain values, and injecting untrained adapters from those.

`wt.merge_lora` merges adapters into the weights; see `pretrained/surgery/lora.py`.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from worldtokens.errors import InputError


def settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The adapters' settings by name, as plain values without peft's defaults."""
    out = {}
    for name, config in model.peft_config.items():
        default = _plain(type(config)().to_dict())
        values = _plain(config.to_dict())
        changed = {k: v for k, v in values.items() if v != default.get(k) and k != "peft_version"}
        out[name] = {"peft_type": values["peft_type"], **changed}
    return out


def inject(model: nn.Module, adapters: Mapping[str, Mapping[str, Any]]) -> None:
    """Inject adapters with these settings (see `settings`) into a model; their weights are loaded afterwards.

    Raises:
        InputError: they do not fit, or peft is not installed.
    """
    peft = peft_module("peft")
    for name, values in adapters.items():
        try:
            config = peft.PeftConfig.from_peft_type(**values)
            peft.inject_adapter_in_model(config, model, name)
        except (TypeError, ValueError, KeyError) as e:
            raise InputError(f"adapter {name!r} does not fit {type(model).__name__}: {e}") from e


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
