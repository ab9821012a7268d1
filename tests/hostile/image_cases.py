"""Hostile images."""

from __future__ import annotations

import io
import os
import struct
import zlib

import numpy as np
from cases import case
from PIL import Image


def encode(im: Image.Image | np.ndarray, form: str = "PNG", **options) -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    (Image.fromarray(im) if isinstance(im, np.ndarray) else im).save(out, form, **options)
    return out.getvalue()


def halves(w: int = 64, h: int = 32) -> np.ndarray:
    """Red on the left, blue on the right."""
    a = np.zeros((h, w, 3), np.uint8)
    a[:, : w // 2, 0] = a[:, w // 2 :, 2] = 255
    return a


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks
    )


def head(w: int, h: int, bits: int = 8, colour: int = 0) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", w, h, bits, colour, 0, 0, 0)


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # display rotated by 90 degrees clockwise: the left becomes the top
    return encode(halves(), "JPEG", exif=exif, quality=95)


def cmyk() -> bytes:
    return encode(Image.new("CMYK", (32, 32), (0, 255, 255, 0)), "JPEG", quality=95)


def palette() -> bytes:
    im = Image.fromarray(halves()).quantize(4)
    return encode(im)


def clear_palette() -> bytes:
    im = Image.new("P", (32, 32), 0)
    im.putpalette([255, 0, 0, 0, 255, 0])
    return encode(im, transparency=0)


def animated_gif() -> bytes:
    frames = [Image.new("RGB", (32, 32), c) for c in ("red", "lime", "blue")]
    return encode(frames[0], "GIF", save_all=True, append_images=frames[1:])


def transparent() -> bytes:
    a = np.zeros((32, 32, 4), np.uint8)
    a[..., 0] = 255
    return encode(a)


def big_png() -> bytes:
    return png(head(13400, 13400, 1), (b"IDAT", zlib.compress(bytes(13400 * 1676), 9)), (b"IEND", b""))


def bomb_in_text() -> bytes:
    text = b"Comment\0\0" + zlib.compress(bytes(60_000_000), 9)
    rows = zlib.compress(bytes(8 * 9))
    return png(head(8, 8), (b"zTXt", text), (b"IDAT", rows), (b"IEND", b""))


def float_tiff(value: float) -> bytes:
    return encode(Image.fromarray(np.full((16, 16), value, np.float32)), "TIFF")


def broken_exif() -> bytes:
    data = rotated()
    at = data.index(b"Exif")
    return data[: at + 6] + b"\xff" * 12 + data[at + 18 :]


def bad_sum() -> bytes:
    data = bytearray(encode(noise(32, 32, 3)))
    data[len(data) // 2] ^= 0xFF
    return bytes(data)


def pages() -> bytes:
    first, second = (Image.new("RGB", (32, 32), c) for c in ("red", "blue"))
    return encode(first, "TIFF", save_all=True, append_images=[second])


def red(raw) -> bool:
    return raw[0].float().mean() > 240 and raw[1:].float().mean() < 15


def white(raw) -> bool:
    return int(raw.min()) >= 250


def upright(raw) -> bool:
    """Red at the top, blue at the bottom."""
    rows = raw.shape[1]
    return raw[0, : rows // 3].float().mean() > 200 and raw[2, -(rows // 3) :].float().mean() > 200


I = "image"  # noqa: E741
case(I, "orientation-6.jpg", 196, rotated, upright)
ramp = lambda: encode(np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (64, 1)))  # noqa: E731
case(I, "grey-16-bit-ramp.png", 196, ramp, lambda raw: 120 < raw.float().mean() < 136)
case(I, "colour-under-alpha-0.png", 196, transparent, white)
case(I, "palette-transparent.png", 196, clear_palette, white)
case(I, "palette.png", 196, palette)
case(I, "cmyk.jpg", 196, cmyk, red)
case(I, "animated.gif", 196, animated_gif, red)
case(I, "two-pages.tiff", 196, pages, red)
case(I, "grey-and-alpha.png", 196, lambda: encode(Image.new("LA", (9, 9), (0, 0))), white)
case(I, "whole.webp", 196, lambda: encode(halves(), "WEBP"))
case(I, "png-called.jpg", 196, lambda: encode(halves()))
case(I, "one-pixel.png", 196, lambda: encode(noise(1, 1, 3)))
case(I, "one-by-2000.png", 196, lambda: encode(noise(2000, 1, 3)))
case(I, "broken-exif.jpg", 196, broken_exif)
case(I, "cut.jpg", "damaged or cut short", lambda: (d := encode(noise(64, 64, 3), "JPEG"))[: len(d) // 2])
case(I, "cut.png", "damaged or cut short", lambda: (d := encode(noise(64, 64, 3)))[: len(d) // 2])
case(I, "cut-head.webp", "", lambda: encode(noise(64, 64, 3), "WEBP")[:40])
case(I, "bad-checksum.png", "damaged|decoded", bad_sum)
case(I, "179-megapixels.png", "179560000 pixels", big_png)
case(I, "no-pixels.png", "", lambda: png(head(0, 5), (b"IEND", b"")))
case(I, "four-gigapixels.png", "pixels", lambda: png(head(65535, 65535), (b"IDAT", b""), (b"IEND", b"")))
case(I, "text-bomb.png", "", bomb_in_text)
case(I, "empty.jpg", "0 bytes", lambda: b"")
case(I, "text.jpg", "none of the kinds", lambda: b"no image at all\n" * 9)
case(I, "drawing.png", "SVG", lambda: b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>')
case(I, "postscript.jpg", "none of the kinds", lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
case(I, "nan.tiff", "NaN", lambda: float_tiff(float("nan")))
case(I, "beyond-one.tiff", "divide by 255", lambda: float_tiff(200.0))
case(I, "folder.png", "folder", lambda path: path.mkdir(exist_ok=True))
case(I, "missing.png", "no such file", lambda path: None)
case(I, "pipe.png", "no regular file", lambda path: os.mkfifo(path))
case(I, "zeros.png", "no regular file", lambda path: path.symlink_to("/dev/zero"))
case(I, "link-to-itself.png", "", lambda path: path.symlink_to(path.name))
N = "image native"
case(N, "230.png", 225, lambda: encode(noise(230, 230, 3)))  # 14.4 patches per side: 15, nothing dropped
case(N, "wide.png", 2 * 3, lambda: encode(noise(17, 48, 3)))
case(N, "one-pixel.png", 1, lambda: encode(noise(1, 1, 3)))
case(N, "thin.png", 256, lambda: encode(noise(1, 10_000, 3)))  # 625 patches wide, scaled to 256
