"""Conversion of timm's Vision Transformers with parity of outputs; see `timm/vit.py`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from worldtokens.errors import InputError
from worldtokens.parts import load_strictly
from worldtokens.pretrained import mapping
from worldtokens.pretrained.timm.vit import convert_vit
from worldtokens.tasks.classification.model import Classifier

RESIZE = {"center": "crop", "squash": "squash"}


def from_timm(
    source: str | Path | nn.Module,
    pretrained: bool = False,
    architecture: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Classifier:
    """Load a ViT of timm as a `Classifier` with equal outputs, preprocessing included.

    Args:
        source: a published name (``"vit_small_patch16_224.augreg_in21k"``, ``"hf-hub:..."``), a folder saved by
            timm, a file of weights, or a live model of timm.
        pretrained: for a name: download the weights. False: random weights, without network.
        architecture: for a file: name of its architecture.
        options: further arguments of `timm.create_model`, e.g. ``{"img_size": 384}``; the number of classes of a file
            is that of its head.

    Returns:
        The model in eval mode, on the CPU, float32. A `NaFlexVit` uses native aspect. Without a head, ``classes=0``. Dropout
        is not converted, stochastic depth is.

    Raises:
        InputError: the source is not found, or an architecture, setting or weight is not supported; named.
    """
    model, name = _open(source, pretrained, architecture, dict(options or {}))
    import timm

    data = timm.data.resolve_data_config(model=model)
    settings: dict[str, Any] = {k: tuple(data[k]) for k in ("mean", "std")}
    preprocess = {"interpolation": data["interpolation"], "draft": False}
    if type(model).__name__ == "NaFlexVit":
        # the number of patches of the square training size
        embeds: Any = model.embeds
        patch, sides = embeds.patch_size, data["input_size"][1:]
        settings["max_tokens"] = math.prod(s // p for s, p in zip(sides, patch, strict=True))
    elif data["crop_mode"] in RESIZE:
        preprocess |= {"crop_pct": data["crop_pct"], "resize": RESIZE[data["crop_mode"]]}
    else:
        raise InputError(f"{name}: crop_mode {data['crop_mode']!r}, expected 'center' or 'squash'")
    tower = convert_vit(model, name, settings, preprocess)
    cfg = getattr(model, "pretrained_cfg", None) or {}
    labels = cfg.get("label_names") if hasattr(cfg, "get") else None
    classes: Any = list(labels) if labels and len(labels) == model.num_classes else model.num_classes
    ours = Classifier(tower.front, tower.trunk, classes, tower.pool, tower.pool_norm)
    prefixes = {"front.": "tokenizers.image."}
    mapping.load_weights(ours, mapping.replace_prefixes(tower.weights, prefixes), name)
    return ours.eval()


def _open(
    source: str | Path | nn.Module, pretrained: bool, architecture: str | None, options: dict[str, Any]
) -> tuple[nn.Module, str]:
    """A live model of timm, and its name for errors."""
    import timm

    if isinstance(source, nn.Module):
        return source, type(source).__name__
    path = Path(source)
    if path.is_file():
        if architecture is None:
            raise InputError(f"{path} is a file of weights: name its model with architecture=")
        weights = mapping.read_weights(path)
        if "head.weight" in weights:
            options.setdefault("num_classes", len(weights["head.weight"]))
        model = _create(timm, architecture, options, False)
        load_strictly(model, weights, str(path))
        return model, str(path)
    if path.is_dir():
        return _create(timm, f"local-dir:{path}", options, True), str(path)
    return _create(timm, str(source), options, pretrained), str(source)


def _create(timm: Any, name: str, options: dict[str, Any], pretrained: bool) -> nn.Module:
    if ":" not in name and not timm.is_model(name.partition(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), 3)
        raise InputError(
            f"timm has no model {name!r}, and there is no such file or folder; close names: {close}"
        )
    try:
        return timm.create_model(name, pretrained=pretrained, **options)
    except (RuntimeError, TypeError, ValueError, OSError, KeyError, AssertionError) as e:
        raise InputError(f"timm cannot make {name!r} with {options}: {e}") from e
