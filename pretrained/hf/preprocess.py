"""How transformers' models prepare an image, as arguments of `ImageTokenizer`.

What is computed is what the processors compute from Pillow's resize; transformers' default ones resize with torchvision,
whose 8-bit values may differ by a level. Transparency is laid on white here and dropped there; a side that is not a
multiple of the patch is filled up here and cut there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from worldtokens.pretrained.hf.source import Source
from worldtokens.tokenizers.image.tokenizer import CLIP_MEAN, CLIP_STD

HALF = (0.5, 0.5, 0.5)
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# what the family's own processor does where nothing is told
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


def look(source: Source, family: str, side: int | tuple[int, int]) -> dict[str, Any]:
    """Arguments of `ImageTokenizer` that tell how images are prepared.

    Args:
        source: where the model comes from; its preprocessing is read, or else the family's usual is taken.
        family: of `PROCESSORS`.
        side: of the model's images, where nothing else is told.

    Raises:
        InputError: a step that is not supported; named.
    """
    usual = PROCESSORS[family]
    told = {k: v for k, v in (source.preprocessing or {}).items() if v is not None}
    source.expect(told, EXPECTED)
    if not math.isclose(told.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6):
        raise source.refuse(f"rescale_factor={told['rescale_factor']}, expected 1/255")
    steps = usual | told
    sizes = _size(steps["size"] if "size" in told else side, usual["size"], source)
    out = _crop(sizes, steps, side, source)
    if int(steps["resample"]) not in FILTERS:
        raise source.refuse(f"resample={steps['resample']} is not supported; {sorted(FILTERS)} are")
    normal = steps.get("do_normalize", True)
    return out | {
        "interpolation": FILTERS[int(steps["resample"])],
        "mean": tuple(steps["image_mean"]) if normal else (0.0, 0.0, 0.0),
        "std": tuple(steps["image_std"]) if normal else (1.0, 1.0, 1.0),
        "draft": False,
        "stretch": "plain",
        "halves": "down",
    }


def _size(size: Any, usual: str, source: Source) -> int | tuple[int, int]:
    """A side that the shorter edge gets (int), or (height, width) to stretch to."""
    if isinstance(size, int):
        return size if usual == "shortest_edge" else (size, size)
    if isinstance(size, list | tuple):
        return tuple(size)
    size = {k: v for k, v in _fields(size).items() if v is not None}
    if set(size) == {"shortest_edge"}:
        return size["shortest_edge"]
    if set(size) == {"height", "width"}:
        return size["height"], size["width"]
    raise source.refuse(f"images of size {size} are not supported; height and width, or shortest_edge are")


def _fields(size: Any) -> dict[str, Any]:
    return dict(size) if isinstance(size, Mapping) else dict(vars(size))


def _crop(
    size: int | tuple[int, int], steps: Mapping[str, Any], side: int | tuple[int, int], source: Source
) -> dict[str, Any]:
    """`size`, `resize` and `crop` of `ImageTokenizer`."""
    if not steps.get("do_center_crop"):
        if isinstance(size, int):
            raise source.refuse("images resized by their shorter edge and not cut are not supported")
        return {"size": size, "resize": "squash"}
    cut = steps.get("crop_size", size if isinstance(size, tuple) else side)
    cut = (cut, cut) if isinstance(cut, int) else cut
    if not isinstance(cut, tuple):
        fields = _fields(cut)
        cut = fields["height"], fields["width"]
    if isinstance(size, int):
        size, mode = (size, size), "crop"
        if cut[0] != cut[1]:
            raise source.refuse(f"a cut of {cut} from images resized by their shorter edge is not supported")
    else:
        mode = "squash"
    if cut[0] > size[0] or cut[0] * size[1] != cut[1] * size[0]:
        raise source.refuse(f"a cut of {cut} from {size} is not supported: expected a share of both sides")
    share = cut[0] / size[0]
    while math.floor(cut[0] / share) < size[0]:  # rounding must not lose a pixel
        share = math.nextafter(share, 0.0)
    return {"size": cut, "resize": mode, "crop": share}


def grid(config: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(patch, rows and columns of the table of positions) of an image tower."""
    picture, patch = (
        (v, v) if isinstance(v, int) else tuple(v) for v in (config["image_size"], config["patch_size"])
    )
    return patch, (picture[0] // patch[0], picture[1] // patch[1])


def split_positions(
    table: torch.Tensor, rows: tuple[int, int], source: Source
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A flat table of positions -> (the class token's, where there is one; the grid's)."""
    before = len(table) - rows[0] * rows[1]
    if before not in (0, 1):
        raise source.refuse(f"{len(table)} positions for a grid of {rows}")
    return (table[0] if before else None), table[before:].reshape(*rows, -1)
