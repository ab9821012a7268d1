"""Conversion of open_clip's models with parity of embeddings; see `open_clip/clip.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from worldtokens.errors import InputError
from worldtokens.pretrained.open_clip.clip import convert_clip
from worldtokens.tasks.contrastive.model import CLIP


def from_open_clip(
    source: str | Path | nn.Module,
    pretrained: str | None = None,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
) -> CLIP:
    """Load a model of open_clip as a `CLIP` with equal embeddings, preprocessing and vocabulary included.

    Args:
        source: a published name (``"ViT-B-32-quickgelu"``, ``"hf-hub:..."``), a folder with an
            `open_clip_config.json` and weights, or a live model of open_clip.
        pretrained: for a name: a tag of its weights (``"openai"``, downloaded) or a file. None: random weights.
        tokenizer: a tokenizer of `open_clip.get_tokenizer`. None: that of the name or folder; CLIP's for a live model.
        options: further arguments of `open_clip.create_model`, e.g. ``{"force_image_size": 336}``.

    Returns:
        The model in eval mode, on the CPU, float32; columns ``"image"`` and ``"text"``. A model with a logit bias gets
        SigLIP's loss, any other CLIP's.

    Raises:
        InputError: the source is not found, or an architecture, setting or weight is not supported; named.
    """
    model, name = _open(source, pretrained, dict(options or {}))
    from open_clip.model import CLIP as Plain
    from open_clip.model import CustomTextCLIP

    if type(model) not in (Plain, CustomTextCLIP):
        raise InputError(
            f"{name} is open_clip's {type(model).__name__}; supported are CLIP and CustomTextCLIP"
        )
    if tokenizer is None and not isinstance(source, nn.Module):
        tokenizer = _tokenizer(name)
    return convert_clip(model, tokenizer, name).eval()


def _open(
    source: str | Path | nn.Module, pretrained: str | None, options: dict[str, Any]
) -> tuple[nn.Module, str]:
    """A live model of open_clip, and its name for errors."""
    if isinstance(source, nn.Module):
        return source, type(source).__name__
    import open_clip

    name, path = str(source), Path(source)
    if path.is_file():
        raise InputError(f"{path} is a file of weights: name its model, from_open_clip('ViT-B-32', {name!r})")
    if path.is_dir():
        name, options = f"local-dir:{path}", {"require_pretrained": True, **options}
    weights = Path(pretrained) if pretrained is not None else None
    from_file = weights is not None and weights.is_file()
    try:
        model = open_clip.create_model(name, None if from_file else pretrained, **options)
        if from_file:
            open_clip.load_checkpoint(model, str(weights))
    except (RuntimeError, TypeError, ValueError, OSError, KeyError, AssertionError) as e:
        raise InputError(f"open_clip cannot make {name!r} with pretrained={pretrained!r}: {e}") from e
    return model, name


def _tokenizer(name: str) -> Any:
    import open_clip

    try:
        return open_clip.get_tokenizer(name)
    except Exception as e:  # a download may raise anything
        raise InputError(
            f"the vocabulary of {name!r} cannot be loaded ({e}): give tokenizer=, made by open_clip.get_tokenizer"
        ) from e
