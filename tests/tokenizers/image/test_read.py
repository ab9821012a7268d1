"""Reading of images: sources, orientation, modes, transparency, animations."""

import io
import os

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps

import worldtokens as wt
from worldtokens.tokenizers.image.read import read_image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def photo(h=48, w=64):
    """An image without symmetry: smooth ramps, and a dark mark in the upper left corner."""
    y, x = np.mgrid[:h, :w]
    a = np.stack([x * 255 // max(1, w - 1), y * 255 // max(1, h - 1), (x + y) * 255 // max(1, h + w - 2)], -1)
    a[: h // 4, : w // 4] //= 3
    return a.astype(np.uint8)


def data(im, form, **options):
    stream = io.BytesIO()
    im.save(stream, form, **options)
    return stream.getvalue()


def hwc(x):
    assert x.dtype == torch.uint8 and x.ndim == 3 and x.shape[0] == 3
    return x.permute(1, 2, 0).numpy()


PNG = data(Image.fromarray(photo()), "PNG")
JPEG = data(Image.fromarray(photo()), "JPEG", quality=95)


# ---- sources -------------------------------------------------------------------------------------------------


def test_every_kind_of_source_gives_the_same_pixels(tmp_path):
    path = tmp_path / "an image.png"
    path.write_bytes(PNG)
    a = photo()
    with open(path, "rb") as f:
        f.read(7)  # a stream is read from its start, whatever its position
        sources = [path, str(path), PNG, bytearray(PNG), memoryview(PNG), f, io.BytesIO(PNG), Image.open(path),
                   a, torch.from_numpy(a).permute(2, 0, 1), a / 255.0, torch.from_numpy(a).permute(2, 0, 1).float() / 255,
                   a.astype(np.uint16) * 257]  # fmt: skip
        for source in sources:
            assert np.array_equal(hwc(read_image(source)), a), type(source)
        assert not f.closed


def test_a_stream_that_cannot_seek_is_read():
    r, w = os.pipe()
    os.write(w, PNG)
    os.close(w)
    with os.fdopen(r, "rb") as f:
        assert np.array_equal(hwc(read_image(f)), photo())


def test_the_raw_image_does_not_share_memory_with_an_array():
    a = photo()
    raw = read_image(a)
    a[:] = 0
    assert np.array_equal(hwc(raw), photo())


@pytest.mark.parametrize("h, w", [(1, 3), (3, 1), (3, 3), (1, 1), (4, 3)])
def test_a_side_of_1_or_3_is_never_taken_for_channels(h, w):
    a = np.random.default_rng(0).integers(0, 256, (h, w, 3), dtype=np.uint8)
    assert np.array_equal(hwc(read_image(a)), a)
    assert np.array_equal(hwc(read_image(torch.from_numpy(a).permute(2, 0, 1))), a)


def test_arrays_of_other_channels():
    grey = photo()[..., 0]
    three = np.repeat(grey[..., None], 3, 2)
    assert np.array_equal(hwc(read_image(grey)), three)
    assert np.array_equal(hwc(read_image(grey[..., None])), three)
    assert np.array_equal(hwc(read_image(torch.from_numpy(grey)[None])), three)
    assert np.array_equal(hwc(read_image(grey > 127)), np.where(three > 127, 255, 0))
    alpha = np.zeros((*grey.shape, 1), np.uint8)
    clear = read_image(np.concatenate([three, alpha], -1), background=GREEN)
    assert (hwc(clear) == GREEN).all()
    clear = read_image(np.concatenate([grey[..., None], alpha], -1), background=GREEN)
    assert (hwc(clear) == GREEN).all()


@pytest.mark.parametrize(
    "array, says",
    [
        (np.zeros((3, 224, 224), np.uint8), "channels last"),
        (torch.zeros(224, 224, 3, dtype=torch.uint8), "a tensor first"),
        (torch.zeros(224, 224, dtype=torch.uint8), "expected"),
        (np.zeros((2, 4, 4, 3), np.uint8), "expected"),
        (np.zeros((4, 4, 3), np.int64), "expected uint8"),
        (np.zeros((4, 4, 3), complex), "expected uint8"),
        (np.full((4, 4, 3), 200.0), r"expected \[0, 1\]"),
        (torch.full((3, 4, 4), -0.5), r"expected \[0, 1\]"),
        (np.full((4, 4, 3), np.nan), "NaN"),
        (torch.tensor([0.0, float("inf"), 1.0]).view(3, 1, 1), "NaN or infinity"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (torch.zeros(3, 4, 0), "no pixels"),
    ],
)
def test_an_array_of_another_layout_or_range_raises(array, says):
    with pytest.raises(wt.InputError, match=says):
        read_image(array)


# ---- orientation, modes, depth -------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_the_camera_orientation_is_applied_once(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
    raw = data(Image.fromarray(photo(40, 64)), form, exif=exif, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(raw))))
    assert expected.shape == ((64, 40, 3) if orientation >= 5 else (40, 64, 3))
    assert np.array_equal(hwc(read_image(raw)), expected)
    im = Image.open(io.BytesIO(raw))
    assert np.array_equal(hwc(read_image(im)), expected)
    # an image that was rotated before is not rotated again
    assert np.array_equal(hwc(read_image(ImageOps.exif_transpose(im))), expected)


def test_orientation_6_puts_the_left_edge_on_top():
    a = np.zeros((2, 3, 3), np.uint8)
    a[:, 0] = RED  # the stored left edge; orientation 6 is a clockwise rotation by 90 degrees
    exif = Image.Exif()
    exif[0x0112] = 6
    out = hwc(read_image(data(Image.fromarray(a), "PNG", exif=exif)))
    assert out.shape == (3, 2, 3) and (out[0] == RED).all() and not out[1:].any()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_or_invalid_orientation_is_ignored():
    for exif in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        im = Image.open(io.BytesIO(data(Image.fromarray(photo()), "JPEG", quality=95, exif=exif)))
        assert read_image(im).shape == (3, 48, 64)
    exif = Image.Exif()
    exif[0x0112] = 99
    assert np.array_equal(hwc(read_image(data(Image.fromarray(photo()), "PNG", exif=exif))), photo())


def test_sixteen_bit_grey_is_scaled():
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16)[None].repeat(2, 0)
    expected = np.arange(256)[None].repeat(2, 0)
    wide = Image.fromarray(ramp)
    assert wide.mode == "I;16"
    big_endian = Image.frombytes("I;16B", (256, 2), ramp.astype(">u2").tobytes())
    whole = Image.fromarray(ramp.astype(np.int32))
    assert whole.mode == "I"
    for source in (data(wide, "PNG"), data(wide, "TIFF"), data(wide, "PPM"), wide, big_endian, whole, ramp):
        out = hwc(read_image(source))
        assert np.array_equal(out[..., 0], expected) and np.array_equal(out[..., 2], expected)


def test_float_images_must_be_in_the_unit_range():
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None]
    assert np.array_equal(hwc(read_image(data(Image.fromarray(ramp), "TIFF")))[0, :, 1], np.arange(256))
    with pytest.raises(wt.InputError, match=r"expected \[0, 1\]"):
        read_image(data(Image.fromarray(ramp * 255), "TIFF"))
    with pytest.raises(wt.InputError, match="expected 16 bits"):
        read_image(Image.fromarray(np.array([[70000]], np.int32)))


# mean difference in levels: 256 colours for the palettes, rounding for the rest
CLOSE = {"P": 16, "PA": 16, "YCbCr": 1.5, "LAB": 1, "HSV": 0.5}


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "LAB", "HSV", "RGBX", "RGBA", "RGBa", "LA", "La", "PA"]
)
def test_every_mode_becomes_rgb(mode):
    steps = {"LAB": ["RGB"], "La": ["L", "LA"], "PA": ["P"], "RGBa": ["RGBA"]}.get(mode, [])
    im = Image.fromarray(photo())
    for step in [*steps, mode]:
        if mode == "LAB" and step == "LAB":
            space = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
            im = ImageCms.profileToProfile(im, *space, outputMode="LAB")
        else:
            im = im.convert(step)
    assert im.mode == mode
    out = hwc(read_image(im)).astype(int)
    assert im.mode == mode, "the given image is not changed"
    assert out.shape == (48, 64, 3)
    reference = photo().astype(int)
    if mode == "1":
        assert np.array_equal(out[..., 0], np.asarray(im) * 255)
        return
    if mode in ("L", "LA", "La"):
        reference = np.repeat(np.asarray(Image.fromarray(photo()).convert("L"))[..., None], 3, 2).astype(int)
    assert np.abs(out - reference).mean() <= CLOSE.get(mode, 0)


def test_cmyk_and_ycck_jpegs_keep_their_colours():
    flat = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # magenta + yellow = red
    adobe = data(flat, "JPEG", quality=95)
    out = hwc(read_image(adobe)).astype(int)
    assert np.abs(out - RED).max() <= 8
    tiff = data(flat, "TIFF")
    assert np.abs(hwc(read_image(tiff)).astype(int) - RED).max() <= 1
    # the same bytes marked as YCCK (Adobe transform 2): Pillow is the reference
    at = adobe.index(b"Adobe")
    ycck = adobe[: at + 11] + b"\x02" + adobe[at + 12 :]
    assert np.array_equal(hwc(read_image(ycck)), np.asarray(Image.open(io.BytesIO(ycck)).convert("RGB")))


def test_transparency_shows_the_background_and_never_the_hidden_colour():
    hidden = Image.new("RGBA", (8, 8), (*RED, 0))
    hidden.putpixel((0, 0), (*BLUE, 255))
    hidden.putpixel((1, 0), (*BLUE, 128))
    for form in ("PNG", "WEBP", "TIFF"):
        options = {"lossless": True, "exact": True} if form == "WEBP" else {}
        out = hwc(read_image(data(hidden, form, **options), background=WHITE))
        assert tuple(out[0, 0]) == BLUE and (out[1:] == WHITE).all()
        assert np.abs(out[0, 1].astype(int) - (127, 127, 255)).max() <= 1
    assert (hwc(read_image(data(hidden, "PNG"), background=GREEN))[1:] == GREEN).all()


def test_transparency_by_palette_or_by_colour():
    indices = np.zeros((4, 4), np.uint8)
    indices[0] = 1
    im = Image.fromarray(indices).convert("P")
    im.putdata(indices.ravel())
    im.putpalette([*RED, *BLUE])
    for form in ("PNG", "GIF"):
        out = hwc(read_image(data(im, form, transparency=0), background=WHITE))
        assert (out[0] == BLUE).all() and (out[1:] == WHITE).all(), form
    half = hwc(read_image(data(im, "PNG", transparency=bytes([0, 255])), background=WHITE))
    assert (half[0] == BLUE).all() and (half[1:] == WHITE).all()
    keyed = Image.new("RGB", (4, 4), RED)
    keyed.putpixel((0, 0), BLUE)
    out = hwc(read_image(data(keyed, "PNG", transparency=RED), background=WHITE))
    assert tuple(out[0, 0]) == BLUE and (out[1:] == WHITE).all()
    deep = Image.fromarray(np.array([[0, 65535]], np.uint16))
    out = hwc(read_image(data(deep, "PNG", transparency=0), background=GREEN))
    assert tuple(out[0, 0]) == GREEN and tuple(out[0, 1]) == WHITE


def test_conversion_by_strips_gives_the_same_result(monkeypatch):
    import worldtokens.tokenizers.image.read as read

    cases = [
        Image.fromarray(photo()).convert("RGBA"),
        Image.fromarray(photo()[..., 0].astype(np.uint16) * 257),
    ]
    cases[0].putalpha(Image.fromarray(photo()[..., 1]))
    palette = Image.fromarray(photo()).quantize(16)
    palette.info["transparency"] = 3
    cases.append(palette)
    whole = [read_image(im) for im in cases]
    monkeypatch.setattr(read, "STRIP", 64 * 5)
    for im, expected in zip(cases, whole, strict=True):
        assert torch.equal(read_image(im), expected)


def test_colour_profiles_are_ignored_as_by_open_clip():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    im = Image.fromarray(photo())
    assert torch.equal(read_image(data(im, "PNG", icc_profile=profile)), read_image(PNG))


# ---- animations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_or_the_requested_frame(form):
    frames = [Image.new("RGB", (16, 12), c) for c in (RED, GREEN, BLUE)]
    options = {"lossless": True} if form == "WEBP" else {}
    raw = data(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert (hwc(read_image(raw)) == RED).all()
    assert (hwc(read_image(raw, frame=2)) == BLUE).all()
    with pytest.raises(wt.InputError, match="no frame 3"):
        read_image(raw, frame=3)
    with pytest.raises(wt.InputError, match="frame is -1"):
        read_image(raw, frame=-1)
    with pytest.raises(wt.InputError, match="no frame 1"):
        read_image(JPEG, frame=1)
    with pytest.raises(wt.InputError, match="holds one image"):
        read_image(frames[0], frame=1)


def test_a_gif_frame_that_changes_only_a_corner_is_composed():
    first, second = Image.new("RGB", (16, 16), RED), Image.new("RGB", (16, 16), RED)
    second.paste(BLUE, (0, 0, 4, 4))
    out = hwc(read_image(data(first, "GIF", save_all=True, append_images=[second]), frame=1))
    assert (out[:4, :4] == BLUE).all() and (out[4:] == RED).all()
