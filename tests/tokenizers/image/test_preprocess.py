"""Preprocessing of images against open_clip and Pillow; draft decoding of JPEGs."""

import io

import numpy as np
import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch.nn import functional as F

import worldtokens as wt
from worldtokens.training.recipe import Recipe


def jpeg(im, **options):
    stream = io.BytesIO()
    im.save(stream, "JPEG", quality=90, **options)
    return stream.getvalue()


def large(photograph):
    """The photograph at 12 megapixels, with fine grain so that there is detail to lose."""
    a = np.asarray(photograph.resize((3072, 3600), Image.Resampling.LANCZOS)).astype(np.int16)
    a = a + np.random.default_rng(0).normal(0, 6, (*a.shape[:2], 1)).astype(np.int16)
    return Image.fromarray(a.clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("size", [224, 96, (64, 128), (128, 64)])
@pytest.mark.parametrize("resize, mode", [("crop", "shortest"), ("squash", "squash"), ("pad", "longest")])
def test_pixels_equal_those_of_open_clip(size, resize, mode, images):
    t = wt.ImageTokenizer(
        8, size=size, preprocess={"resize": resize, "draft": False, "background": (7, 7, 7)}
    )
    reference = image_transform_v2(PreprocessCfg(size=size, resize_mode=mode, fill_color=7), is_train=False)
    scale, shift = torch.tensor(t.std)[:, None, None], torch.tensor(t.mean)[:, None, None]
    for im in images:
        found = t.collate([t.read(im)])["pixels"][0]
        expected = ((reference(im) * scale + shift) * 255).round()
        difference = (found.float() - expected).abs()
        if resize == "crop" and max(im.size) / min(im.size) > 64:
            # covering the crop would take 64 times its size: the crop is computed alone, a few levels away
            assert difference.mean() < 1 and difference.max() <= 16, im.size
        else:
            assert difference.max() == 0, im.size


def test_normalised_pixels_equal_those_of_open_clip(photograph):
    t = wt.ImageTokenizer(
        3 * 16 * 16, preprocess={"draft": False}, positions="none", embedding={"bias": False}
    )
    torch.nn.init.eye_(t.proj.weight)  # tokens are now the normalised pixels themselves
    im = photograph
    expected = F.unfold(open_clip.image_transform(224, is_train=False)(im)[None], 16, stride=16).transpose(
        1, 2
    )
    assert (t.tokens([im]).x - expected).abs().max() < 1e-5


def test_inception_normalisation_and_other_filters(photograph):
    im = photograph
    for name, number in (("bilinear", 2), ("lanczos", 1), ("nearest", 0)):
        t = wt.ImageTokenizer(48, patch=4, size=(32, 32), preprocess={"resize": "squash", "interpolation": name}, mean=(0.5,) * 3,
                              std=(0.5,) * 3, positions="none", embedding={"bias": False})  # fmt: skip
        torch.nn.init.eye_(t.proj.weight)
        x = torch.from_numpy(np.array(im.resize((32, 32), number))).permute(2, 0, 1)[None] / 127.5 - 1
        assert (t.tokens([im]).x - F.unfold(x, 4, stride=4).transpose(1, 2)).abs().max() < 1e-5


def test_draft_decoding_changes_little_and_can_be_disabled(photograph):
    source = jpeg(large(photograph))
    fast, exact = wt.ImageTokenizer(8), wt.ImageTokenizer(8, preprocess={"draft": False})
    small, whole = fast.read(source), exact.read(source)
    assert whole.shape == (3, 3600, 3072)
    assert small.shape == (3, 900, 768), "a quarter: both sides at least twice 224"
    difference = (fast.collate([small])["pixels"].float() - exact.collate([whole])["pixels"].float()).abs()
    assert difference.mean() < 1 and difference.max() <= 12  # of 255 levels


def test_draft_decoding_follows_the_orientation_and_keeps_enough_pixels(photograph):
    exif = Image.Exif()
    exif[0x0112] = 6
    source = jpeg(photograph.resize((1600, 800)), exif=exif)  # upright it is 1600 high and 800 wide
    t = wt.ImageTokenizer(8, size=(200, 50))
    assert t.resized_size(1600, 800) == (200, 100)
    assert t.read(source).shape == (3, 400, 200)
    for size in (64, 100, 224, (30, 300)):
        t = wt.ImageTokenizer(8, size=size)
        raw = t.read(source)
        h, w = t.resized_size(1600, 800)
        assert raw.shape[1] >= min(1600, 2 * h) and raw.shape[2] >= min(800, 2 * w)
    native = wt.ImageTokenizer(8, size=None, max_tokens=64)
    assert native.read(source).shape == (3, 400, 200)
    assert wt.ImageTokenizer(8, size=None, max_tokens=5000).read(source).shape == (3, 1600, 800)


def test_settings_are_objects_or_dicts_and_are_saved_whole():
    given = wt.ImagePreprocess(resize="pad", background=[1, 2, 3])
    a, b = (
        wt.ImageTokenizer(8, preprocess=given),
        wt.ImageTokenizer(8, preprocess={"resize": "pad", "background": [1, 2, 3]}),
    )
    assert a.preprocess == b.preprocess == given
    saved = a.config()["args"]["preprocess"]
    assert (
        saved["resize"] == "pad" and saved["background"] == [1, 2, 3] and saved["interpolation"] == "bicubic"
    )
    assert b.config() == a.config()
    embedding = wt.PatchEmbedConfig(position_grid=4, span=7)
    assert (embedding.position_grid, embedding.span) == ((4, 4), (7, 7))
    assert wt.build(wt.ImageTokenizer(8, embedding=embedding).config()).embedding == embedding


def test_settings_are_overridden_in_a_recipe():
    recipe = Recipe.read(
        "clip_furniture", ["--model.tokenizers.image.tokenizer.preprocess.interpolation", "bilinear"]
    )
    front = recipe.values["model"]["args"]["tokenizers"]["image"]["args"]["tokenizer"]["args"]
    assert front["preprocess"]["draft"] is False and front["preprocess"]["resize"] == "pad"
    assert front["preprocess"]["interpolation"] == "bilinear"
