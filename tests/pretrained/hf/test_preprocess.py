"""from_hf: image preprocessing equals that of transformers, and a step that cannot be converted is an error."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import worldtokens as wt
from worldtokens.testing import randomised

SIZE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"image_size": 32, "patch_size": 8}


FORMS = {
    "CLIP": ("clip", {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}),
    "CLIP, smaller crop, odd remainders": (
        "clip",
        {"size": {"shortest_edge": 61}, "crop_size": {"height": 32, "width": 32}},
    ),
    "CLIP, sizes as numbers": ("clip", {"size": 64, "crop_size": 48}),
    "ViT": ("vit", {"size": {"height": 224, "width": 224}}),
    "ViT, oblong, ImageNet's mean, Lanczos": (
        "vit",
        {
            "size": {"height": 40, "width": 72},
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "resample": 1,
        },
    ),
    "ViT, not normalised": ("vit", {"do_normalize": False, "size": 48}),
    "SigLIP": ("siglip", {"size": {"height": 64, "width": 64}}),
}


@pytest.mark.parametrize("what", FORMS)
def test_pixels_equal_those_of_transformers(what, images, to_pil, tmp_path):
    """Those of its Pillow processors exactly; those of its torchvision ones within a level of 255 in 99.9 % of values.

    (The torchvision ones have no Lanczos and use another filter.)
    """
    family, settings = FORMS[what]
    classes = {
        "vit": (hf.ViTImageProcessorPil, hf.ViTImageProcessor, hf.ViTModel(hf.ViTConfig(**SIZE))),
        "clip": (
            hf.CLIPImageProcessorPil,
            hf.CLIPImageProcessor,
            hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZE)),
        ),
        "siglip": (
            hf.SiglipImageProcessorPil,
            hf.SiglipImageProcessor,
            hf.SiglipVisionModel(hf.SiglipVisionConfig(**SIZE)),
        ),
    }[family]
    exact, fast = classes[0](**settings), classes[1](**settings)
    classes[2].save_pretrained(tmp_path)
    exact.save_pretrained(tmp_path)
    photo, *emoji = (to_pil(i) for i in images)
    pils = [photo, photo.resize((301, 517)), emoji[0], emoji[1].resize((37, 75))]
    for ours in (wt.from_hf(classes[2], processor=exact), wt.from_hf(tmp_path)):
        front = ours.tokenizer
        batch = front.collate([front.read(p) for p in pils])["pixels"].double()
        mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (front.mean, front.std))
        mine = (batch / 255 - mean) / std
        want = exact(pils, return_tensors="pt")["pixel_values"].double()
        assert want.shape == mine.shape and (want - mine).abs().max() < 1e-6
        near = fast(pils, return_tensors="pt")["pixel_values"].double()
        off = ((near - mine) * std * 255).abs()
        print(f"\n{what:40} torchvision's differs by up to {float(off.max()):.1f} levels of 255")
        assert "Lanczos" in what or (off > 1.01).double().mean() < 1e-3


def test_a_given_processor_overrides_the_folders(tmp_path):
    theirs = randomised(hf.ViTForImageClassification(hf.ViTConfig(**SIZE)))
    theirs.save_pretrained(tmp_path)
    hf.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    assert wt.from_hf(tmp_path).tokenizers["image"].size == (32, 32)
    given = wt.from_hf(tmp_path, processor={"size": {"height": 64, "width": 32}})
    assert given.tokenizers["image"].size == (64, 32)


STEPS = {
    "do_resize=False": {"do_resize": False},
    "rescale_factor": {"rescale_factor": 1 / 127.5},
    "resample=4": {"resample": 4},
    "not cropped": {"size": {"shortest_edge": 32}},
    "do_pad": {"do_pad": True},
    "longest_edge": {"size": {"longest_edge": 32}},
    "a crop of": {
        "size": {"height": 32, "width": 32},
        "do_center_crop": True,
        "crop_size": {"height": 40, "width": 40},
    },
    "shorter edge is not": {
        "size": {"shortest_edge": 40},
        "do_center_crop": True,
        "crop_size": {"height": 16, "width": 32},
    },
}


@pytest.mark.parametrize("what", STEPS)
def test_a_step_that_cannot_be_converted_is_named(what):
    theirs = hf.ViTModel(hf.ViTConfig(**SIZE))
    with pytest.raises(wt.InputError, match=what):
        wt.from_hf(theirs, processor=STEPS[what])
