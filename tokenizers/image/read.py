"""Reading of images: files, bytes, PIL images and arrays -> RGB uint8 (3, H, W).

Notable:

- EXIF orientation is applied once, here;
- transparency is composited on a given background, so that a colour hidden under alpha 0 never shows;
- 16-bit grey is scaled to 8 bits;
- pixels are decoded inside `read_image`: a damaged file is an error here, with its name, not later in a training loop;
- formats that start other programs (EPS) are not read, and Pillow's limit on the number of pixels stays on;
- colour profiles (ICC) are ignored, as in open_clip, torchvision and timm: published models were trained that way.
"""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from worldtokens.errors import InputError

# raster formats that are decoded in this process, most frequent first
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP", "TIFF", "MPO", "PPM", "JPEG2000", "HEIF", "DIB", "TGA", "ICO",
           "QOI", "DDS", "PSD", "PCX", "SGI", "ICNS")  # fmt: skip
# Pillow's default, applied even where a program has disabled Pillow's own
MAX_PIXELS = 1024**3 // 4 // 3
# pixels converted at a time: they fit in the cache, and a huge image needs no second copy
STRIP = 1 << 16
ORIENTATION = 0x0112

Fit = Callable[[int, int], tuple[int, int]]


def read_image(
    source: Any, frame: int = 0, background: tuple[int, int, int] = (255, 255, 255), fit: Fit | None = None
) -> Tensor:
    """One image from a path, bytes, file object, PIL image, numpy array or tensor.

    The layout of an array is fixed, never guessed: numpy is (H, W) or (H, W, C), a tensor is (C, H, W), where C is 1 (grey), 2 (grey + alpha), 3 (RGB) or 4 (RGBA). Types: uint8, uint16 (scaled to 8 bits), bool, or a float
    type with values in [0, 1].

    Args:
        source: a path (string or PathLike) or one of the above. A PIL image is read at its current frame and is not
            changed.
        frame: index of the frame of an animation, or page of a TIFF, from 0.
        background: RGB, 0 to 255, under transparency.
        fit: (H, W) of the file -> the (H, W) that it will be resized to. If given, a JPEG is decoded at 1/2, 1/4 or 1/8
            while its sides stay at least twice as long as that.

    Returns:
        (3, H, W) uint8, in channels-last memory format.

    Raises:
        InputError: it cannot be read; names the file, what was found and what to do.
    """
    if isinstance(source, np.ndarray | Tensor | Image.Image):
        if frame != 0:
            raise InputError(
                f"frame={frame} of a {type(source).__name__}: it holds one image, pass the frame itself"
            )
        if isinstance(source, Image.Image):
            return _guarded(lambda: _pixels(source, background, _name(source)), _name(source))
        return _from_array(source, background)
    if not isinstance(frame, int) or frame < 0:
        raise InputError(f"{_name(source)}: frame is {frame!r}, expected 0 or more")
    return _guarded(lambda: _from_file(source, frame, background, fit), _name(source))


def _guarded(read: Callable[[], Tensor], name: str) -> Tensor:
    """Run a reader; any exception of Pillow's decoders becomes an `InputError` that names the file."""
    try:
        return read()
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise InputError(
            f"{name}: {e} More than {MAX_PIXELS:,} pixels are not decoded; downscale the image first"
        ) from e
    except Image.UnidentifiedImageError as e:
        raise InputError(f"{name}: not an image that Pillow can read") from e
    except (OSError, SyntaxError) as e:
        raise InputError(f"{name}: the image is damaged or cut short: {e}") from e
    except Exception as e:
        # decoders of old formats raise IndexError, struct.error, KeyError, OverflowError, ...
        raise InputError(f"{name}: the image cannot be decoded: {type(e).__name__}: {e}") from e


# ---- files ---------------------------------------------------------------------------------------------------


def _from_file(source: Any, frame: int, background: tuple[int, int, int], fit: Fit | None) -> Tensor:
    stream, name = _open(source)
    try:
        head = _head(stream)
        if not head:
            raise InputError(f"{name}: is empty (0 bytes), expected an image")
        if _is_svg(head):
            raise InputError(
                f"{name}: is SVG, a vector graphic; render it to PNG first, e.g. with rsvg-convert"
            )
        Image.init()
        try:
            im = Image.open(stream, formats=[f for f in FORMATS if f in Image.OPEN])
        except Image.UnidentifiedImageError as e:
            raise InputError(
                f"{name}: begins with {head[:12]!r}: damaged, or none of the kinds read here "
                f"({', '.join(FORMATS[:9])}, ...)"
            ) from e
        _check_size(im, name)
        if frame:
            try:
                im.seek(frame)
            except EOFError as e:
                raise InputError(f"{name}: has no frame {frame}; frames are counted from 0") from e
            _check_size(im, name)
        elif fit is not None and im.format in ("JPEG", "MPO"):
            _draft(im, fit)
        return _pixels(im, background, name)
    finally:
        if stream is not source:
            stream.close()


def _name(source: Any) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return f"<{len(source)} bytes>"
    if isinstance(source, Image.Image):
        return getattr(source, "filename", "") or f"<PIL image, {source.mode} {source.width}x{source.height}>"
    return str(getattr(source, "name", f"<{type(source).__name__}>"))


def _open(source: Any) -> tuple[BinaryIO, str]:
    name = _name(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source), name
    if isinstance(source, str | os.PathLike):
        try:
            mode = os.stat(source).st_mode
        except FileNotFoundError as e:
            remote = isinstance(source, str) and source.startswith(("http://", "https://", "s3://"))
            raise InputError(
                f"{name}: no such file" + ("; download it first and pass its path" * remote)
            ) from e
        except (OSError, ValueError) as e:  # ValueError: a NUL byte in the name
            raise InputError(f"{name!r}: cannot be opened: {getattr(e, 'strerror', None) or e}") from e
        # a pipe or a device could block, or never end
        if not stat.S_ISREG(mode):
            raise InputError(
                f"{name}: is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}, expected an image"
            )
        return Path(source).open("rb"), name
    if hasattr(source, "read"):
        try:
            data = None if source.seekable() else source.read()
            probe = source.read(0) if data is None else data
        except (AttributeError, OSError, ValueError) as e:
            raise InputError(f"{name}: cannot be read as a file: {e}") from e
        if not isinstance(probe, bytes):
            raise InputError(f"{name}: is open as text, expected binary: open(path, 'rb')")
        return (source if data is None else io.BytesIO(data)), name
    raise InputError(
        f"an image cannot be read from a {type(source).__name__}: pass a path, bytes, a binary file, a PIL image, a "
        "numpy array (H, W, C) or a tensor (C, H, W)"
    )


def _head(stream: BinaryIO) -> bytes:
    stream.seek(0)
    head = stream.read(1024)
    stream.seek(0)
    return head


def _is_svg(head: bytes) -> bool:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return text.startswith(b"<svg") or (
        text.startswith((b"<?xml", b"<!--", b"<!doctype")) and b"<svg" in text
    )


def _check_size(im: Image.Image, name: str) -> None:
    if im.width < 1 or im.height < 1:
        raise InputError(f"{name}: is {im.width}x{im.height} pixels, expected at least 1x1")
    if im.width * im.height > MAX_PIXELS:
        raise InputError(
            f"{name}: is {im.width}x{im.height}, {im.width * im.height:,} pixels, more than the {MAX_PIXELS:,} that are "
            "decoded (a small file can hold a huge image); downscale it first"
        )


def _draft(im: Image.Image, fit: Fit) -> None:
    """Let the JPEG decoder skip detail that the resize discards."""
    swapped = _orientation(im) >= 5
    size = (im.width, im.height) if swapped else (im.height, im.width)
    h, w = fit(*size)
    h, w = (w, h) if swapped else (h, w)
    # Pillow picks the largest reduction that keeps both sides at least this long
    im.draft(None, (2 * w, 2 * h))


def _orientation(im: Image.Image) -> int:
    try:
        value = im.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged metadata around good pixels: no rotation
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


# ---- pixels --------------------------------------------------------------------------------------------------


def _pixels(im: Image.Image, background: tuple[int, int, int], name: str) -> Tensor:
    """A PIL image in any mode -> RGB, upright, (3, H, W). Does not change `im`."""
    _check_size(im, name)
    im.load()
    # after loading: a PNG may store it behind the pixels, and loading rotates a TIFF
    orientation = _orientation(im)
    rgb = np.empty((im.height, im.width, 3), dtype=np.uint8)
    step = max(1, STRIP // im.width)
    for top in range(0, im.height, step):
        end = min(top + step, im.height)
        strip = im if end - top == im.height else im.crop((0, top, im.width, end))
        deep = strip.mode.startswith("I") or strip.mode == "F"
        rgb[top:end] = _from_deep(strip, background, name) if deep else np.asarray(_rgb(strip, background))
    return _tensor(_upright(rgb, orientation))


def _tensor(rgb: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rgb)).permute(2, 0, 1)


def _rgb(im: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """An image of 8-bit channels -> mode RGB, composited on the background."""
    if not im.has_transparency_data:
        return im.convert("RGB")
    if im.mode == "La":  # premultiplied grey does not convert to RGBA directly
        im = im.convert("LA")
    canvas = Image.new("RGBA", im.size, (*background, 255))
    return Image.alpha_composite(canvas, im.convert("RGBA")).convert("RGB")


def _from_deep(im: Image.Image, background: tuple[int, int, int], name: str) -> np.ndarray:
    """Grey with more than 8 bits -> (H, W, 3) uint8. Integers are 16-bit, floats are in [0, 1]."""
    values = np.asarray(im)
    if values.dtype.kind == "f":
        grey = _unit_to_bytes(values, name)
    else:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 65535:
            raise InputError(f"{name}: has grey values from {low} to {high}, expected 16 bits: 0 to 65535")
        grey = _short_to_bytes(values)
    rgb = np.repeat(grey[:, :, None], 3, axis=2)
    transparent = im.info.get("transparency")
    if isinstance(transparent, int):
        rgb[values == transparent] = background
    return rgb


def _short_to_bytes(values: np.ndarray) -> np.ndarray:
    """0 to 65535 -> 0 to 255, rounded: 257 levels become one."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _unit_to_bytes(values: np.ndarray, name: str) -> np.ndarray:
    """[0, 1] -> 0 to 255, rounded."""
    low, high = float(values.min()), float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):  # min and max of an array with NaN are NaN
        raise InputError(f"{name}: contains NaN or infinity, expected values in [0, 1]")
    if low < -1e-6 or high > 1 + 1e-6:
        raise InputError(
            f"{name}: has float values from {low:.4g} to {high:.4g}, expected [0, 1]; divide by 255 or pass uint8. "
            "Already normalised images go to forward directly, as (B, 3, H, W)"
        )
    return np.clip(np.rint(values.astype(np.float32) * 255), 0, 255).astype(np.uint8)


def _upright(rgb: np.ndarray, orientation: int) -> np.ndarray:
    """Undo EXIF orientation 1 to 8 on (H, W, 3)."""
    if orientation >= 5:
        rgb = rgb.transpose(1, 0, 2)
    flip_rows, flip_columns = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return rgb[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1]


# ---- arrays --------------------------------------------------------------------------------------------------


def _from_array(source: np.ndarray | Tensor, background: tuple[int, int, int]) -> Tensor:
    if isinstance(source, Tensor):
        name, layout = f"<tensor {tuple(source.shape)} {source.dtype}>", "(C, H, W)"
        source = source.detach().cpu()
        a = (source.float() if source.dtype == torch.bfloat16 else source).numpy()
        a = a.transpose(1, 2, 0) if a.ndim == 3 else a
        right_ndim = a.ndim == 3
    else:
        name, layout = f"<numpy array {source.shape} {source.dtype}>", "(H, W) or (H, W, C)"
        a = source[:, :, None] if source.ndim == 2 else source
        right_ndim = a.ndim == 3
    if not right_ndim or not 1 <= a.shape[-1] <= 4:
        raise InputError(
            f"{name}: expected {layout} with C = 1 (grey), 2 (grey + alpha), 3 (RGB) or 4 (RGBA); a numpy array has "
            "channels last, a tensor first: transpose it"
        )
    if not a.size:
        raise InputError(f"{name}: has no pixels")
    if a.dtype == np.bool_:
        a = a.astype(np.uint8) * 255
    elif a.dtype == np.uint16:
        a = _short_to_bytes(a)
    elif a.dtype.kind == "f":
        a = _unit_to_bytes(a, name)
    elif a.dtype != np.uint8:
        raise InputError(
            f"{name}: expected uint8, uint16, bool, or float in [0, 1]; convert it, e.g. .astype('uint8')"
        )
    if a.shape[-1] == 1:
        return _tensor(np.repeat(a, 3, axis=2))
    if a.shape[-1] in (2, 4):
        im = Image.fromarray(np.ascontiguousarray(a))  # (H, W, 2) is LA, (H, W, 4) is RGBA
        return _tensor(np.array(_rgb(im, background)))
    return _tensor(a.copy())
