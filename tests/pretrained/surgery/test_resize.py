"""Other image and patch sizes: references are timm's resampling, FlexiViT's identity, and the model before the change."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import nn

import worldtokens as wt
from worldtokens.pretrained.surgery.resize import resize_kernel
from worldtokens.testing import randomised


@pytest.mark.parametrize(
    "old,new", [((8, 8), (16, 16)), ((16, 16), (8, 8)), ((8, 4), (6, 10)), ((14, 14), (16, 16))]
)
def test_patch_kernels_are_resized_as_in_timm(old, new):
    """Largest difference 1e-4 at values of 1 to 40: timm's pseudo-inverse is float32, ours float64."""
    weight = torch.randn(5, 3, *old, generator=torch.Generator().manual_seed(1))
    want, found = resample_patch_embed(weight, list(new)), resize_kernel(weight, new)
    assert found.shape == want.shape
    assert float((found - want).abs().max() / want.abs().max()) < 1e-5


def test_an_enlarged_image_gives_the_same_tokens():
    """FlexiViT's identity: a resized kernel on a resized patch."""
    g = torch.Generator().manual_seed(2)
    weight, patch = torch.randn(5, 3, 8, 8, generator=g), torch.randn(1, 3, 8, 8, generator=g)
    large = nn.functional.interpolate(patch, size=(16, 12), mode="bicubic", antialias=True)
    want = torch.einsum("dchw,bchw->bd", weight, patch)
    found = torch.einsum("dchw,bchw->bd", resize_kernel(weight, (16, 12)), large)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name,prefix", [("vit_tiny_patch16_224", 1), ("vit_betwixt_patch16_reg4_gap_256", 0)]
)
def test_a_resized_model_equals_timms(name, prefix, reload, tmp_path):
    """timm's model built at the new size with timm's resampling against ours after the change. A class token has a position,
    four registers have none; neither is part of the grid."""
    small = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}
    theirs = randomised(timm.create_model(name, img_size=(32, 48), **small))
    ours = wt.from_timm(theirs)
    for size, patch in (((64, 40), 8), ((48, 48), 16), ((30, 36), 6)):
        weights = dict(theirs.state_dict())
        grid = [s // patch for s in size]
        weights["pos_embed"] = resample_abs_pos_embed(weights["pos_embed"], grid, [4, 6], prefix)
        weights["patch_embed.proj.weight"] = resample_patch_embed(
            weights["patch_embed.proj.weight"], [patch] * 2
        )
        wanted = timm.create_model(name, img_size=size, **{**small, "patch_size": patch}).eval()
        wanted.load_state_dict(weights)
        changed = wt.resize_images(copy.deepcopy(ours), size=size, patch=patch)
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            torch.testing.assert_close(changed({"image": x}), wanted(x), atol=1e-4, rtol=0)
            torch.testing.assert_close(reload(changed, tmp_path)({"image": x}), changed({"image": x}))


def test_resizing_keeps_the_output_for_images_of_the_new_size(make_classifier):
    """The position table was interpolated per batch, now it is stored. (2, 8) and (4, 4) patches stay distinct."""
    for size in ((64, 48), (16, 64), (32, 32)):
        model = make_classifier()
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            before = model({"image": x})
            assert wt.resize_images(model, size=size) is model
            torch.testing.assert_close(model({"image": x}), before, atol=1e-5, rtol=0)
        front = model.tokenizers["image"]
        assert front.size == size and front.pos_embed.shape == (size[0] // 8, size[1] // 8, 24)
        assert front.class_token.shape == (1, 1, 24) and front.registers.shape == (1, 2, 24)


def test_to_native_aspect_and_back(make_classifier, reload, tmp_path):
    model = make_classifier(size=32)
    raw = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    front = model.tokenizers["image"]
    with torch.no_grad():
        before = model({"image": front.collate([raw])})
        wt.resize_images(model, size=None, max_tokens=64)
        wide = torch.randint(0, 256, (3, 40, 88), dtype=torch.uint8)
        both = model({"image": front.collate([raw, wide])})
        torch.testing.assert_close(both[:1], before, atol=1e-5, rtol=0)
        loaded = reload(model, tmp_path)
        torch.testing.assert_close(loaded({"image": front.collate([raw, wide])}), both)
        wt.resize_images(model, size=32)
        torch.testing.assert_close(model({"image": front.collate([raw])}), before, atol=1e-5, rtol=0)


def test_identity_mode_freezing_and_gradients_survive_a_change(make_classifier, make_clip):
    model = make_classifier()
    front, trunk = model.tokenizers["image"], model.trunk
    wt.freeze(model, "tokenizers.image.proj")
    wt.resize_images(model.train(), size=64, patch=16)
    assert model.tokenizers["image"] is front and model.trunk is trunk and model.training
    assert not front.proj.weight.requires_grad and front.pos_embed.requires_grad
    model({"image": torch.randn(2, 3, 64, 64)}).sum().backward()
    assert front.pos_embed.grad is not None and front.proj.weight.grad is None
    with pytest.raises(wt.InputError, match=r"Transformer has no ImageTokenizer.*none"):
        wt.resize_images(trunk, size=64)
    with pytest.raises(wt.InputError, match=r"no ImageTokenizer under 'text'"):
        wt.resize_images(make_clip(), size=64, column="text")
    with pytest.raises(wt.InputError, match="1 or more"):
        wt.resize_images(model, size=0)
    for wrong in ({"size": "large"}, {"patch": "large"}):
        with pytest.raises(wt.InputError, match="is 'large', expected a whole number or 2"):
            wt.resize_images(model, **wrong)
