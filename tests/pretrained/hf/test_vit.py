"""from_hf: parity with ViT of transformers, with and without its head, at any image size.

Largest absolute differences in float32: `pytest -s` prints them.
"""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import worldtokens as wt
from worldtokens.testing import randomised

SIZE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"image_size": 32, "patch_size": 8}


VITS = {  # case: (class, its config, its constructor arguments)
    "ViT, head": (hf.ViTForImageClassification, {"num_labels": 7}, {}),
    "ViT, tanh GELU, eps 1e-6, no bias in q, k, v": (
        hf.ViTForImageClassification,
        {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "qkv_bias": False},
        {},
    ),
    "ViT, pooler": (hf.ViTModel, {"pooler_output_size": 24}, {}),
    "ViT, no pooler": (hf.ViTModel, {}, {"add_pooling_layer": False}),
}


@pytest.mark.parametrize("what", VITS)
def test_outputs_match_within_1e_5(what, images, to_pil, at_sizes, tmp_path):
    cls, options, inner = VITS[what]
    theirs = randomised(cls(hf.ViTConfig(**SIZE | options), **inner))
    processor = hf.ViTImageProcessorPil(size={"height": 32, "width": 32})
    theirs.save_pretrained(tmp_path / "theirs")
    processor.save_pretrained(tmp_path / "theirs")
    ours = wt.from_hf(theirs, processor=processor)
    assert not ours.training
    pixels = processor([to_pil(p) for p in images], return_tensors="pt")["pixel_values"]
    worst = largest = 0.0
    with torch.no_grad():
        for x in at_sizes(pixels):
            out = theirs(x, interpolate_pos_encoding=x.shape[2:] != (32, 32))
            if cls is hf.ViTModel:
                pooled = out.pooler_output if out.pooler_output is not None else out.last_hidden_state[:, 0]
                pairs = [(ours(x).x, out.last_hidden_state), (ours.features({"image": x}), pooled)]
            else:
                pairs = [(ours({"image": x}), out.logits)]
            for a, b in pairs:
                assert a.shape == b.shape
                worst, largest = max(worst, float((a - b).abs().max())), max(largest, float(b.abs().max()))
            if x is pixels:
                native = pairs[-1][1]
    predict = ours.embed if cls is hf.ViTModel else ours.logits
    read = predict(images, batch_size=3)
    worst = max(worst, float((read - native).abs().max()))
    print(f"\n{what:45} {worst:.1e} of {largest:.1f}")
    assert worst < 1e-5 and largest > 0.5
    again = wt.load(ours.save(tmp_path / "ours"))
    from_folder = wt.from_hf(tmp_path / "theirs")  # with the weight names of transformers before 5
    for other in (again, from_folder):
        got = (other.embed if cls is hf.ViTModel else other.logits)(images, batch_size=3)
        assert torch.equal(got, read)


def test_class_names_are_converted(images, tmp_path):
    labels = {0: "crane", 1: "cat", 2: "crane"}
    cfg = hf.ViTConfig(**SIZE, id2label=labels, label2id={"cat": 1, "crane": 2})
    randomised(hf.ViTForImageClassification(cfg)).save_pretrained(tmp_path)
    ours = wt.from_hf(tmp_path)
    assert ours.names == ["crane (0)", "cat", "crane (2)"]
    assert set(ours.predict([images[0]]).names[0]) == set(ours.names)


def test_a_batch_of_native_sizes_matches_one_by_one(images, to_pil):
    """The same weights with a front-end of native aspect: rows of unequal length, with padding."""
    theirs = randomised(hf.ViTForImageClassification(hf.ViTConfig(**SIZE, num_labels=5)))
    ours = wt.from_hf(theirs)
    fixed = ours.tokenizers["image"]
    native = wt.ImageTokenizer(
        **{**fixed.config_args(), "size": None, "preprocess": None, "max_tokens": 64}
    ).eval()
    native.load_state_dict(fixed.state_dict())
    ours.tokenizers["image"] = native
    shapes = [(32, 32), (64, 40), (16, 56), (8, 24), (48, 64)]  # width, height
    raws = [native.read(to_pil(p).resize(s)) for p, s in zip(images, shapes, strict=True)]
    batch = native.collate(raws)
    assert len(set(batch["lengths"])) > 2
    with torch.no_grad():
        got = ours({"image": batch})
        want = torch.cat([theirs((r / 127.5 - 1)[None], interpolate_pos_encoding=True).logits for r in raws])
    assert (got - want).abs().max() < 1e-5


@pytest.mark.slow
def test_published_size_within_1e_4():
    """ViT-B/16 in its published width and depth, every parameter random."""
    theirs, g = hf.ViTForImageClassification(hf.ViTConfig()).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():  # the usual scale, so that no layer saturates at this width
        for p in theirs.parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(p.shape[-1] ** -0.5 * noise) if p.ndim > 1 else p.copy_(p.clamp(min=0.2) + 0.1 * noise)
    ours = wt.from_hf(theirs)
    x = torch.randn(2, 3, 224, 224, generator=g)
    with torch.no_grad():
        want, got = theirs(x).logits, ours({"image": x})
    worst, apart = float((want - got).abs().max()), float((want[0] - want[1]).abs().max())
    print(f"\nViT-B/16 {worst:.1e} of {float(want.abs().max()):.2f}, samples {apart:.2f} apart")
    assert worst < 1e-4 and apart > 0.01
