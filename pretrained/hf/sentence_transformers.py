"""Folders of sentence-transformers: the steps after the trunk, as that library applies them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldtokens.pretrained import mapping
from worldtokens.pretrained.hf.source import Source

POOLINGS = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
ACTIVATIONS = {"Tanh": "tanh", "Identity": None}


def settings(source: Source) -> dict[str, Any]:
    """Pooling, projection and normalisation of a folder as arguments of `Encoder`, with the projection's weights.

    Returns:
        {} if the folder is not one of sentence-transformers; else `pool`, `dim`, `bias`, `activation`, `normalize`,
        `weights`, and `context` if there is a limit.

    Raises:
        InputError: a module or setting is not supported; named.
    """
    listed = source.read("modules.json")
    pooling = source.read("1_Pooling/config.json")
    if listed is None and pooling is None:
        return {}
    steps: dict[str, Any] = {"dim": None, "bias": True, "activation": None, "normalize": False, "weights": {}}
    if listed is None:
        return steps | {"pool": _pooling(pooling, source)}
    kinds = [m["type"].rpartition(".")[2] for m in listed]
    for path in (m["path"] for m in listed):
        if path and Path(path).name != path:  # a downloaded folder must not reach other files
            raise source.error(f"modules.json names {path!r}, expected a subfolder")
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in (
        [],
        ["Dense"],
        ["Normalize"],
        ["Dense", "Normalize"],
    ):
        raise source.error(
            f"modules.json lists {kinds}; supported are Transformer, Pooling, then Dense, Normalize"
        )
    steps["pool"] = _pooling(source.read(f"{listed[1]['path']}/config.json") or {}, source)
    steps["normalize"] = "Normalize" in kinds
    if "Dense" in kinds:
        steps |= _dense(listed[2]["path"], source)
    limits = source.read("sentence_bert_config.json") or {}
    source.expect(limits, {"do_lower_case": False})
    steps["context"] = limits.get("max_seq_length")
    source.expect(source.read("config_sentence_transformers.json") or {}, {"default_prompt_name": None})
    return steps


def _pooling(config: Mapping[str, Any], source: Source) -> str:
    modes = [k for k, v in config.items() if k.startswith("pooling_mode_") and v]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise source.error(f"pooling {modes} is not supported; one of {', '.join(POOLINGS)} is")
    return POOLINGS[modes[0]]


def _dense(path: str, source: Source) -> dict[str, Any]:
    config = source.read(f"{path}/config.json") or {}
    activation = str(config.get("activation_function")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise source.error(f"{path}: activation {activation}, expected one of {', '.join(ACTIVATIONS)}")
    file = next(
        (f for f in ("model.safetensors", "pytorch_model.bin") if (source.folder / path / f).is_file()), None
    )
    if file is None:
        raise source.error(f"{path} has no weights")
    weights = mapping.read_weights(source.folder / path / file)
    table = {"linear.*": "head.*"}
    return {
        "dim": config["out_features"],
        "bias": config["bias"],
        "activation": ACTIVATIONS[activation],
        "weights": mapping.rename(weights, table, f"{source.name}/{path}"),
    }
