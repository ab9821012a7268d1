"""Reading of invalid, damaged and oversized images: an InputError that names the file."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

import worldtokens as wt
from worldtokens.tokenizers.image.read import MAX_PIXELS, read_image


def photo(h=48, w=64):
    """Smooth ramps."""
    y, x = np.mgrid[:h, :w]
    return np.stack([x * 255 // (w - 1), y * 255 // (h - 1), (x + y) * 255 // (h + w - 2)], -1).astype(
        np.uint8
    )


def data(im, form, **options):
    stream = io.BytesIO()
    im.save(stream, form, **options)
    return stream.getvalue()


PNG = data(Image.fromarray(photo()), "PNG")
JPEG = data(Image.fromarray(photo()), "JPEG", quality=95)


def png_header(w, h, body=b""):
    def chunk(kind, payload):
        return (
            struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


SVG = b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
INVALID = {
    "empty.png": (b"", "empty"),
    "text.png": (b"this is text, not an image\n" * 9, "none of the kinds"),
    "drawing.svg": (SVG, "SVG"),
    "drawing.eps": (EPS, "none of the kinds"),  # Pillow would start Ghostscript
    "cut.jpg": (JPEG[: len(JPEG) // 2], "damaged or cut short"),
    "cut.png": (PNG[: len(PNG) // 2], "damaged or cut short"),
    "head.png": (PNG[:20], "."),
    "cut.gif": (data(Image.fromarray(photo()), "GIF")[:900], "."),
    "cut.webp": (data(Image.fromarray(photo()), "WEBP")[:200], "."),
    "cut.tif": (data(Image.fromarray(photo()), "TIFF")[:500], "."),
    "bomb.png": (png_header(20000, 20000), "pixels"),  # above twice Pillow's limit, where it raises
    "half-bomb.png": (png_header(10000, 10000), "pixels"),  # above the limit, where Pillow only warns
    "planet.png": (png_header(2**31 - 1, 2**31 - 1), "."),
    "nothing.png": (png_header(0, 5), "."),
    "crc.png": (PNG[:40] + b"\0\0\0\0" + PNG[44:], "."),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_file_raises_and_is_named(tmp_path, name):
    content, says = INVALID[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(wt.InputError, match=says) as e:
        read_image(path)
    assert str(path) in str(e.value)


def test_invalid_paths_and_sources_raise(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for source, says in [
        (tmp_path, "is a folder"),
        (tmp_path / "missing.png", "no such file"),
        ("https://example.org/cat.png", "download it first"),
        ("bad\0name", "cannot be opened"),
        (tmp_path / "pipe", "no regular file"),
        ("", "no such file"),
        (None, "NoneType"),
        (17, "int"),
        ([[1, 2], [3, 4]], "list"),
        (io.StringIO("text"), "open as text"),
    ]:
        with pytest.raises(wt.InputError, match=says):
            read_image(source)


def test_the_pixel_limit_applies_even_if_pillows_is_disabled(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(wt.InputError, match=f"{MAX_PIXELS:,}"):
        read_image(png_header(20000, 20000))


def test_no_global_state_of_pillow_is_changed():
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    read_image(JPEG, fit=lambda h, w: (4, 4))
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == before == (MAX_PIXELS, False)


FUZZ = [
    JPEG,
    PNG,
    data(Image.fromarray(photo()).quantize(8), "GIF"),
    data(Image.fromarray(photo()), "WEBP"),
    data(Image.fromarray(photo()), "TIFF", compression="tiff_lzw"),
    data(Image.fromarray(photo()), "BMP"),
    data(Image.fromarray(photo()), "JPEG2000"),
]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=300, deadline=5000)
@given(
    which=st.integers(0, len(FUZZ) - 1),
    flips=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=8),
    keep=st.floats(0.1, 1),
)
def test_corrupted_bytes_give_an_image_or_an_input_error(which, flips, keep):
    raw = bytearray(FUZZ[which])
    for at, value in flips:
        raw[at % len(raw)] = value
    try:
        x = read_image(bytes(raw[: int(len(raw) * keep)]), fit=lambda h, w: (8, 8))
    except wt.InputError:
        return
    assert x.dtype == torch.uint8 and x.shape[0] == 3 and x.numel() > 0
