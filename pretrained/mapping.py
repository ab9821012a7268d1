"""How a published model's weights become ours: one table of names a family, and nothing that slips through.

A table maps a pattern of their names to ours; ``*`` stands for one part of a name, the same in both. What no
pattern names is an error, and so is what is missing in the end. A value may hold several patterns of theirs, which are
joined (query, key and value maps, for example).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import load_strictly

ACTIVATIONS = {"QuickGELU": "quick_gelu", "GELUTanh": "gelu_tanh"}


def _matcher(pattern: str) -> re.Pattern:
    return re.compile(re.escape(pattern).replace(r"\*", "([^.]+)") + r"\Z")


def join(weights: Mapping[str, Tensor], table: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Put several tensors after one another under one name: ``{"*.qkv.weight": ("*.q.weight", "*.k.weight", ...)}``.

    A name that holds none of the first pattern is left as it is.
    """
    out = dict(weights)
    for name, parts in table.items():
        first = _matcher(parts[0])
        for key in list(out):
            found = first.match(key)
            if not found:
                continue
            keys = [_fill(p, found.groups()) for p in parts]
            if all(k in out for k in keys):
                out[_fill(name, found.groups())] = torch.cat([out.pop(k) for k in keys])
    return out


def _fill(pattern: str, parts: tuple[str, ...]) -> str:
    for part in parts:
        pattern = pattern.replace("*", part, 1)
    return pattern


def rename(weights: Mapping[str, Tensor], table: Mapping[str, str], source: str) -> dict[str, Tensor]:
    """Their names -> ours.

    Args:
        weights: their state dict.
        table: pattern of theirs -> ours.
        source: what the weights come from, for the error.

    Raises:
        InputError: a name that no pattern knows.
    """
    rules = [(_matcher(theirs), ours) for theirs, ours in table.items()]
    out, unknown = {}, []
    for key, value in weights.items():
        for rule, ours in rules:
            if found := rule.match(key):
                out[_fill(ours, found.groups())] = value
                break
        else:
            unknown.append(key)
    if unknown:
        raise InputError(
            f"{source} has weights that worldtokens has no place for: {unknown[:5]}"
            + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            + "; this variant of the architecture is not supported"
        )
    return out


def placed(weights: Mapping[str, Tensor], places: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights under the names that they have in a task: each beginning exchanged as told."""
    out = {}
    for key, value in weights.items():
        begin = next((p for p in places if key.startswith(p)), "")
        out[places.get(begin, "") + key.removeprefix(begin)] = value
    return out


def fill(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load what `rename` gave. A bias of query, key and value that the original lacks is zero.

    Raises:
        InputError: something is missing, unknown or of another shape.
    """
    weights = dict(weights)
    for name, value in model.state_dict().items():
        if name.endswith("attn.qkv.bias") and name not in weights:
            weights[name] = torch.zeros_like(value)
    load_strictly(model, weights, source)


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a ``.safetensors`` or PyTorch file, read without running any code in it.

    Raises:
        InputError: it is not one.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        raise InputError(
            f"{path} cannot be read as weights ({e}): expected .safetensors or a state dict"
        ) from e
    for wrapper in ("state_dict", "model", "module"):
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise InputError(f"{path} holds no state dict: expected tensors by name")
    wrapped = all(k.startswith("module.") for k in found)  # by DistributedDataParallel
    return {k.removeprefix("module." if wrapped else ""): v for k, v in found.items()}


def norm_of(modules: Mapping[str, nn.Module], source: str) -> dict[str, str | float]:
    """The kind and eps of a model's norms, which must be one.

    Args:
        modules: the model's norms by name.
    """
    kinds = {}
    for name, m in modules.items():
        kind = (
            "layer"
            if isinstance(m, nn.LayerNorm)
            else "rms"
            if "rmsnorm" in type(m).__name__.lower()
            else None
        )
        if kind is None:
            raise InputError(f"{source}: {name} is a {type(m).__name__}, expected LayerNorm or RMSNorm")
        kinds.setdefault((kind, float(m.eps)), name)
    if len(kinds) != 1:
        told = ", ".join(f"{name} is {kind} with eps {eps}" for (kind, eps), name in kinds.items())
        raise InputError(f"{source}: norms of one kind and eps are expected, but {told}")
    ((kind, eps),) = kinds
    return {"norm": kind, "eps": eps}


def activation_of(module: nn.Module, source: str) -> str:
    """Our name of an activation."""
    name = type(module).__name__
    if isinstance(module, nn.GELU) or name == "GELU":
        return "gelu_tanh" if getattr(module, "approximate", "none") == "tanh" else "gelu"
    if name not in ACTIVATIONS:
        raise InputError(f"{source}: activation {name}, expected GELU, its tanh form, or QuickGELU")
    return ACTIVATIONS[name]
