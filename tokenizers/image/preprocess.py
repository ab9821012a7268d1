"""Preprocessing of images that a composer rarely sets: resize mode, filter, crop, background, fast JPEG decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from worldtokens.errors import InputError

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
RESIZE_MODES = ("crop", "squash", "pad", "full")
# offset of a centre crop that falls between two pixels
ROUNDINGS = {"half_even": round, "floor": math.floor}


@dataclass(frozen=True)
class ImagePreprocess:
    """Preprocessing settings of `ImageTokenizer`; the defaults are those of open_clip, except for `draft`.

    Args:
        resize: how an image gets the size of the front-end: ``"crop"`` (scale to cover it, centre crop), ``"squash"``
            (ignore the aspect ratio) or ``"pad"`` (scale to fit in, `background` around it; patches of background alone
            are not tokens). With native aspect: ``"full"`` scales every image, up or down, to as many whole patches as
            `max_tokens` allows.
        interpolation: Pillow filter: ``"nearest"``, ``"bilinear"``, ``"bicubic"`` or ``"lanczos"``.
        crop_pct: share (0, 1] of the resized sides that the crop keeps, with ``"crop"`` and ``"squash"``; as in timm.
        crop_rounding: offset of a crop that falls between two pixels: ``"half_even"`` (torchvision) or ``"floor"``
            (transformers).
        background: RGB, 0 to 255, under transparency and around a ``"pad"`` image.
        draft: decode JPEGs at 1/2, 1/4 or 1/8 while their sides stay at least twice the resized ones. The raw image is
            then the smaller one. Turn off for the exact pixels of open_clip's transform, or where an augmentation crops
            small regions.

    Raises:
        InputError: a setting is out of its range.
    """

    resize: str = "crop"
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_rounding: str = "half_even"
    background: tuple[int, int, int] = (255, 255, 255)
    draft: bool = True

    def __post_init__(self) -> None:
        check_choice("resize", self.resize, RESIZE_MODES)
        check_choice("interpolation", self.interpolation, tuple(FILTERS))
        check_choice("crop_rounding", self.crop_rounding, tuple(ROUNDINGS))
        if not 0 < self.crop_pct <= 1:
            raise InputError(f"crop_pct is {self.crop_pct!r}, expected above 0 to 1")
        object.__setattr__(self, "background", check_rgb(self.background))

    def check_size(self, size: tuple[int, int] | None) -> None:
        """Raise InputError where the settings do not fit a fixed `size`, or None for native aspect."""
        if self.resize == "full" and size is not None:
            raise InputError("resize='full' uses a budget of patches: set size=None and max_tokens=")
        if self.crop_pct != 1 and (size is None or self.resize == "pad"):
            raise InputError(f"crop_pct is {self.crop_pct!r}, expected 1 with size=None or resize='pad'")

    def resized_size(self, height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
        """The (height, width) in pixels that an image is resized to for a fixed `size`, before crop or padding."""
        h, w = (math.floor(s / self.crop_pct) for s in size)
        if self.resize == "squash":
            return h, w
        if self.resize == "pad":
            ratio = max(height / h, width / w)
            return min(h, max(1, round(height / ratio))), min(w, max(1, round(width / ratio)))
        if h == w:  # torchvision's Resize(int) rounds the longer side down
            return (h, int(h * width / height)) if height <= width else (int(w * height / width), w)
        ratio = min(height / h, width / w)  # open_clip rounds other aspect ratios to the nearest
        return max(h, round(height / ratio)), max(w, round(width / ratio))

    def crop_offset(self, resized: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
        """(top, left) of the centre crop of `size`."""
        rounded = ROUNDINGS[self.crop_rounding]
        return rounded((resized[0] - size[0]) / 2.0), rounded((resized[1] - size[1]) / 2.0)

    def resize_and_crop(
        self,
        raw: Tensor,
        resized: tuple[int, int],
        offset: tuple[int, int] = (0, 0),
        crop: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """Resize an image, then crop it: (3, H, W) uint8 -> (h, w, 3) uint8.

        Args:
            raw: the image.
            resized: (height, width) after resizing.
            offset: (top, left) of the crop.
            crop: (height, width) of the crop; None: no crop.
        """
        crop = crop or resized
        a = raw.permute(1, 2, 0).numpy()
        (top, left), (h, w), (rows, columns) = offset, crop, resized
        if tuple(raw.shape[1:]) == resized:
            return a[top : top + h, left : left + w]
        im = Image.fromarray(np.ascontiguousarray(a))
        if rows * columns <= 64 * h * w:
            im = im.resize((columns, rows), FILTERS[self.interpolation])
            return np.asarray(im)[top : top + h, left : left + w]
        # A very thin image covers the crop only when it is enormous: compute the crop alone. Pillow rounds between
        # its two passes in another order then, so values differ by a few levels.
        sy, sx = raw.shape[1] / rows, raw.shape[2] / columns
        box = (left * sx, top * sy, (left + w) * sx, (top + h) * sy)
        return np.asarray(im.resize((w, h), FILTERS[self.interpolation], box=box))


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return `value` where it is one of `allowed`, else raise InputError."""
    if value not in allowed:
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
    return value


def check_rgb(value: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return a background colour as a tuple of three ints from 0 to 255, else raise InputError."""
    colour = tuple(value)
    if len(colour) != 3 or any(type(v) is not int or not 0 <= v <= 255 for v in colour):
        raise InputError(f"background is {value!r}, expected three whole numbers from 0 to 255: RGB")
    return colour
