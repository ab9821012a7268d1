"""Key mapping: the weights of a published model under our parameter names, with strict loading.

One table per model family maps a pattern of the source's names to ours; ``*`` stands for one component of a name, the
same in both. A weight that no pattern matches is an error, and so is a missing one. Several source weights can be
concatenated into one of ours (query, key and value projections, for example).
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


def compile_pattern(pattern: str) -> re.Pattern:
    """A name pattern as a regular expression with one group for each ``*``."""
    return re.compile(re.escape(pattern).replace(r"\*", "([^.]+)") + r"\Z")


def substitute(pattern: str, components: tuple[str, ...]) -> str:
    """A name pattern with its ``*`` replaced, in order."""
    for component in components:
        pattern = pattern.replace("*", component, 1)
    return pattern


def concatenate(weights: Mapping[str, Tensor], table: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Concatenate weights along their first axis: ``{"*.qkv.weight": ("*.q.weight", "*.k.weight", ...)}``.

    Weights that match no pattern, or of which one is missing, stay as they are.
    """
    out = dict(weights)
    for name, patterns in table.items():
        first = compile_pattern(patterns[0])
        for key in list(out):
            match = first.match(key)
            if not match:
                continue
            keys = [substitute(p, match.groups()) for p in patterns]
            if all(k in out for k in keys):
                out[substitute(name, match.groups())] = torch.cat([out.pop(k) for k in keys])
    return out


def rename(weights: Mapping[str, Tensor], table: Mapping[str, str], source: str) -> dict[str, Tensor]:
    """Map the source's names to ours.

    Args:
        weights: the source's state dict.
        table: pattern of the source's names -> ours.
        source: name of the source, for errors.

    Raises:
        InputError: a name matches no pattern.
    """
    rules = [(compile_pattern(theirs), ours) for theirs, ours in table.items()]
    out, unknown = {}, []
    for key, value in weights.items():
        for rule, ours in rules:
            if match := rule.match(key):
                out[substitute(ours, match.groups())] = value
                break
        else:
            unknown.append(key)
    if unknown:
        raise InputError(
            f"{source} has weights that worldtokens cannot map: {unknown[:5]}"
            + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            + "; this variant of the architecture is not supported"
        )
    return out


def replace_prefixes(weights: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """Replace the prefix of each name: ``{"front.": "tokenizers.image."}``; names without one stay."""
    out = {}
    for key, value in weights.items():
        prefix = next((p for p in prefixes if key.startswith(p)), "")
        out[prefixes.get(prefix, "") + key.removeprefix(prefix)] = value
    return out


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load mapped weights strictly. A query, key and value bias that the source lacks becomes zero.

    Raises:
        InputError: a weight is missing, unknown or of another shape.
    """
    weights = dict(weights)
    for name, value in model.state_dict().items():
        if name.endswith("attn.qkv.bias") and name not in weights:
            weights[name] = torch.zeros_like(value)
    load_strictly(model, weights, source)


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a ``.safetensors`` or PyTorch file; no code in the file is run.

    Raises:
        InputError: it is not one.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        raise InputError(
            f"{path} cannot be read as weights ({e}): expected .safetensors or a state dict"
        ) from e
    for wrapper in ("state_dict", "model", "module"):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise InputError(f"{path} holds no state dict: expected tensors by name")
    wrapped = all(k.startswith("module.") for k in state)  # by DistributedDataParallel
    return {k.removeprefix("module." if wrapped else ""): v for k, v in state.items()}


def norm_settings(norms: Mapping[str, nn.Module], source: str) -> dict[str, str | float]:
    """Kind and eps of a model's norms, as ``{"norm": ..., "eps": ...}``.

    Args:
        norms: all norms of the model, by name.
        source: name of the source, for errors.

    Raises:
        InputError: a norm is neither LayerNorm nor RMSNorm, or kind or eps differ between norms.
    """
    kinds = {}
    for name, m in norms.items():
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
        listed = ", ".join(f"{name} is {kind} with eps {eps}" for (kind, eps), name in kinds.items())
        raise InputError(f"{source}: norms of one kind and eps are expected, but {listed}")
    ((kind, eps),) = kinds
    return {"norm": kind, "eps": eps}


def activation_name(module: nn.Module, source: str) -> str:
    """Our name of an activation module.

    Raises:
        InputError: it is not supported.
    """
    name = type(module).__name__
    if isinstance(module, nn.GELU) or name == "GELU":
        return "gelu_tanh" if getattr(module, "approximate", "none") == "tanh" else "gelu"
    if name not in ACTIVATIONS:
        raise InputError(f"{source}: activation {name}, expected GELU, tanh GELU, or QuickGELU")
    return ACTIVATIONS[name]
