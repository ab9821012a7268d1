"""Image preprocessing of transformers' models as arguments of `ImageTokenizer`.

Pixels equal those of the Pillow processors; transformers' default processors resize with torchvision, whose 8-bit values
may differ by a level. Two differences: transparent pixels become white here and are uncovered there; a side that is not a
multiple of the patch is padded here and cropped there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from worldtokens.pretrained.hf.source import Source
from worldtokens.tokenizers.image.embedding import PatchEmbedConfig
from worldtokens.tokenizers.image.preprocess import ImagePreprocess
from worldtokens.tokenizers.image.tokenizer import CLIP_MEAN, CLIP_STD

HALF = (0.5, 0.5, 0.5)
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# defaults of each family's processor
PROCESSORS = {
    "vit": {"size": "square", "resample": 2, "image_mean": HALF, "image_std": HALF},
    "clip": {
        "size": "shortest_edge",
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "do_center_crop": True,
    },
    "siglip": {"size": "square", "resample": 3, "image_mean": HALF, "image_std": HALF},
}
EXPECTED = {
    "do_resize": (True, None),
    "do_rescale": (True, None),
    "do_pad": (False, None),
    "do_flip_channel_order": (False, None),
    "do_normalize": (True, False, None),
}


def preprocess_settings(
    source: Source, family: str, side: int | tuple[int, int], **embedding: Any
) -> dict[str, Any]:
    """Arguments `size`, `mean`, `std`, `preprocess` and `embedding` of `ImageTokenizer`.

    Args:
        source: source of the model; without preprocessing settings the family's defaults apply.
        family: key of `PROCESSORS`.
        side: image size of the model, the default.
        embedding: fields of `PatchEmbedConfig`.

    Raises:
        InputError: a step is not supported; named.
    """
    defaults = PROCESSORS[family]
    given = {k: v for k, v in (source.preprocessing or {}).items() if v is not None}
    source.expect(given, EXPECTED)
    if not math.isclose(given.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6):
        raise source.error(f"rescale_factor={given['rescale_factor']}, expected 1/255")
    steps = defaults | given
    sizes = _size(steps["size"] if "size" in given else side, defaults["size"], source)
    size, out = _crop(sizes, steps, side, source)
    if int(steps["resample"]) not in FILTERS:
        raise source.error(f"resample={steps['resample']} is not supported; {sorted(FILTERS)} are")
    normalize = steps.get("do_normalize", True)
    resize = out | {
        "interpolation": FILTERS[int(steps["resample"])],
        "crop_rounding": "floor",
        "draft": False,
    }
    return {
        "size": size,
        "mean": tuple(steps["image_mean"]) if normalize else (0.0, 0.0, 0.0),
        "std": tuple(steps["image_std"]) if normalize else (1.0, 1.0, 1.0),
        "preprocess": ImagePreprocess(**resize),
        "embedding": PatchEmbedConfig(interpolation="bicubic_no_antialias", **embedding),
    }


def _size(size: Any, default: str, source: Source) -> int | tuple[int, int]:
    """Target size of the shorter edge (int), or (height, width) of a resize that ignores the aspect."""
    if isinstance(size, int):
        return size if default == "shortest_edge" else (size, size)
    if isinstance(size, list | tuple):
        return tuple(size)
    size = {k: v for k, v in _fields(size).items() if v is not None}
    if set(size) == {"shortest_edge"}:
        return size["shortest_edge"]
    if set(size) == {"height", "width"}:
        return size["height"], size["width"]
    raise source.error(f"images of size {size} are not supported; height and width, or shortest_edge are")


def _fields(size: Any) -> dict[str, Any]:
    return dict(size) if isinstance(size, Mapping) else dict(vars(size))


def _crop(
    size: int | tuple[int, int], steps: Mapping[str, Any], side: int | tuple[int, int], source: Source
) -> tuple[Any, dict[str, Any]]:
    """(size of `ImageTokenizer`, fields of `ImagePreprocess`)."""
    if not steps.get("do_center_crop"):
        if isinstance(size, int):
            raise source.error("images resized by their shorter edge and not cropped are not supported")
        return size, {"resize": "squash"}
    crop = steps.get("crop_size", size if isinstance(size, tuple) else side)
    crop = (crop, crop) if isinstance(crop, int) else crop
    if not isinstance(crop, tuple):
        fields = _fields(crop)
        crop = fields["height"], fields["width"]
    if isinstance(size, int):
        size, mode = (size, size), "crop"
        if crop[0] != crop[1]:
            raise source.error(f"a crop of {crop} from images resized by their shorter edge is not supported")
    else:
        mode = "squash"
    if crop[0] > size[0] or crop[0] * size[1] != crop[1] * size[0]:
        raise source.error(
            f"a crop of {crop} from {size} is not supported: expected the same share of both sides"
        )
    share = crop[0] / size[0]
    while math.floor(crop[0] / share) < size[0]:  # rounding must not lose a pixel
        share = math.nextafter(share, 0.0)
    return crop, {"resize": mode, "crop_pct": share}


def patch_grid(config: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(patch size, rows and columns of the position embeddings) of an image tower."""
    image, patch = (
        (v, v) if isinstance(v, int) else tuple(v) for v in (config["image_size"], config["patch_size"])
    )
    return patch, (image[0] // patch[0], image[1] // patch[1])


def split_positions(
    table: torch.Tensor, rows: tuple[int, int], source: Source
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Flat position embeddings -> (those of the class token or None, those of the grid)."""
    prefix = len(table) - rows[0] * rows[1]
    if prefix not in (0, 1):
        raise source.error(f"{len(table)} positions for a grid of {rows}")
    return (table[0] if prefix else None), table[prefix:].reshape(*rows, -1)
