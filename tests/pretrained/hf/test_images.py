"""from_hf: ViT, CLIP and SigLIP of transformers from our parts; images prepared alike; native sizes; strict.

Largest absolute differences in float32: `pytest -s` prints them.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers as hf
from PIL import Image
from tokenizers import processors

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.testing import randomised
from worldtokens.tokenizers.text import clip_bpe

HOPPER = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
ROWS = samples.open("emoji", split="validation")[:40]
CAPTIONS = [c for r in ROWS for c in r["text"]]
EMOJI = [r["image"] for r in ROWS[:4]]
PICTURES = [HOPPER, *EMOJI]
TEXTS = [*CAPTIONS[:9], "", "It's  a CAT, né? 1,234.5", "word " * 90]
SIZE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
PICTURE = SIZE | {"image_size": 32, "patch_size": 8}


def pil(source) -> Image.Image:
    """As our reader gives it: emoji on white."""
    raw = wt.ImageTokenizer(dim=8, draft=False).read(source)
    return Image.fromarray(np.ascontiguousarray(raw.permute(1, 2, 0).numpy()))


def sizes(pixels: torch.Tensor) -> list[torch.Tensor]:
    """The size the model was made for, then a smaller, a larger oblong and a one-row one; grids of equal count too."""
    return [
        pixels,
        pixels[:3, :, :16, :],
        pixels.repeat(1, 1, 2, 3)[:2, :, :48, :88],
        pixels[:2, :, :8],
        pixels.repeat(1, 1, 1, 2)[:2, :, :16],
    ]


# ---- ViT -----------------------------------------------------------------------------------------------------

VITS = {  # what it shows: (class, its settings, those of the class itself)
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
def test_pictures_equal_vits_within_1e_5(what, tmp_path):
    made, options, inner = VITS[what]
    theirs = randomised(made(hf.ViTConfig(**PICTURE | options), **inner))
    processor = hf.ViTImageProcessorPil(size={"height": 32, "width": 32})
    theirs.save_pretrained(tmp_path / "theirs")
    processor.save_pretrained(tmp_path / "theirs")
    ours = wt.from_hf(theirs, processor=processor)
    assert not ours.training
    pixels = processor([pil(p) for p in PICTURES], return_tensors="pt")["pixel_values"]
    worst = largest = 0.0
    with torch.no_grad():
        for x in sizes(pixels):
            out = theirs(x, interpolate_pos_encoding=x.shape[2:] != (32, 32))
            if made is hf.ViTModel:
                pooled = out.pooler_output if out.pooler_output is not None else out.last_hidden_state[:, 0]
                pairs = [(ours(x).x, out.last_hidden_state), (ours.features({"image": x}), pooled)]
            else:
                pairs = [(ours({"image": x}), out.logits)]
            for a, b in pairs:
                assert a.shape == b.shape
                worst, largest = max(worst, float((a - b).abs().max())), max(largest, float(b.abs().max()))
            if x is pixels:
                native = pairs[-1][1]
    ask = ours.embed if made is hf.ViTModel else ours.logits
    read = ask(PICTURES, batch_size=3)
    worst = max(worst, float((read - native).abs().max()))
    print(f"\n{what:45} {worst:.1e} of {largest:.1f}")
    assert worst < 1e-5 and largest > 0.5
    again = wt.load(ours.save(tmp_path / "ours"))
    from_folder = wt.from_hf(tmp_path / "theirs")  # names of before transformers 5
    for other in (again, from_folder):
        got = (other.embed if made is hf.ViTModel else other.logits)(PICTURES, batch_size=3)
        assert torch.equal(got, read)


def test_names_of_classes_come_along(tmp_path):
    labels = {0: "crane", 1: "cat", 2: "crane"}
    cfg = hf.ViTConfig(**PICTURE, id2label=labels, label2id={"cat": 1, "crane": 2})
    randomised(hf.ViTForImageClassification(cfg)).save_pretrained(tmp_path)
    ours = wt.from_hf(tmp_path)
    assert ours.names == ["crane (0)", "cat", "crane (2)"]
    assert set(ours.predict([HOPPER]).names[0]) == set(ours.names)


# ---- CLIP and SigLIP -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip_words() -> hf.PreTrainedTokenizerFast:
    """CLIP's vocabulary as transformers ships it."""
    state = json.loads(clip_bpe.vocabulary().to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split()) for m in state["merges"]]
    return hf.CLIPTokenizer(vocab=state["vocab"], merges=merges)


@pytest.fixture(scope="module")
def siglip_words() -> hf.PreTrainedTokenizerFast:
    made = tokenizers.SentencePieceBPETokenizer(unk_token="<unk>")
    made.train_from_iterator(CAPTIONS, 300, 1, show_progress=False, special_tokens=["<unk>", "</s>"])
    made._tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=24,
    )


def clip(words, **options) -> hf.CLIPModel:
    cfg = hf.CLIPConfig(
        text_config=SIZE | {"vocab_size": len(words)} | options,
        vision_config=PICTURE | options,
        projection_dim=24,
    )
    return randomised(hf.CLIPModel(cfg))


def siglip(words) -> hf.SiglipModel:
    text = {"vocab_size": len(words), "max_position_embeddings": 24, "pad_token_id": 1}
    cfg = hf.SiglipConfig(text_config=SIZE | text, vision_config=PICTURE)
    return randomised(hf.SiglipModel(cfg))


@pytest.mark.parametrize("what", ["CLIP, QuickGELU", "CLIP, GELU, eps 1e-6", "CLIP, old end token", "SigLIP"])
def test_both_towers_equal_within_1e_5(what, clip_words, siglip_words, tmp_path):
    if what == "SigLIP":
        words, theirs, long = siglip_words, siglip(siglip_words), 24
        processor = hf.SiglipImageProcessorPil(size={"height": 32, "width": 32})
    else:
        options = {"CLIP, GELU, eps 1e-6": {"hidden_act": "gelu", "layer_norm_eps": 1e-6}}.get(what, {})
        words, theirs, long = clip_words, clip(clip_words, **options), 77
        processor = hf.CLIPImageProcessorPil(
            size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}
        )
    if "old" in what:
        theirs.config.text_config.eos_token_id = theirs.text_model.eos_token_id = 2
    for part in (theirs, words, processor):
        part.save_pretrained(tmp_path / "theirs")
    ours = wt.from_hf(theirs, tokenizer=words, processor=processor)
    ids = words(TEXTS, padding="max_length", truncation=True, max_length=long, return_tensors="pt")
    pixels = processor([pil(p) for p in PICTURES], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        want = theirs(input_ids=ids["input_ids"], pixel_values=pixels)
        worst = float((ours.embed("text", TEXTS, 5) - want.text_embeds).abs().max())
        worst = max(worst, float((ours.embed("text", ids["input_ids"]) - want.text_embeds).abs().max()))
        worst = max(worst, float((ours.embed("image", PICTURES, 3) - want.image_embeds).abs().max()))
        for x in sizes(pixels):
            there = theirs.vision_model(x, interpolate_pos_encoding=True).pooler_output
            there = there if what == "SigLIP" else theirs.visual_projection(there)
            worst = max(worst, float((ours.embed("image", x) - F.normalize(there, dim=-1)).abs().max()))
        logits = ours.logit_scale.exp() * ours.embed("text", TEXTS) @ ours.embed("image", PICTURES).T
        logits = logits if ours.logit_bias is None else logits + ours.logit_bias
    apart = float((want.text_embeds[0] - want.text_embeds[1]).abs().max())
    print(f"\n{what:45} {worst:.1e}, texts {apart:.2f} apart")
    assert worst < 1e-5 and apart > 1e-3 and (logits - want.logits_per_text).abs().max() < 1e-4
    got = ours.embed("text", TEXTS), ours.embed("image", PICTURES)
    for other in (wt.load(ours.save(tmp_path / "ours")), wt.from_hf(tmp_path / "theirs")):
        assert torch.equal(other.embed("text", TEXTS), got[0])
        assert torch.equal(other.embed("image", PICTURES), got[1])


@pytest.mark.parametrize(
    "made", [hf.CLIPTextModel, hf.CLIPTextModelWithProjection, hf.SiglipTextModel], ids=lambda m: m.__name__
)
def test_a_text_tower_alone(made, clip_words, siglip_words, tmp_path):
    words = siglip_words if made is hf.SiglipTextModel else clip_words
    long = 24 if made is hf.SiglipTextModel else 77
    more = {"max_position_embeddings": long, "projection_dim": 24, "vocab_size": len(words)}
    theirs = randomised(made(made.config_class(**SIZE | more | {"pad_token_id": 1})))
    theirs.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    ids = words(TEXTS, padding="max_length", truncation=True, max_length=long, return_tensors="pt")[
        "input_ids"
    ]
    with torch.no_grad():
        want = theirs(ids)
    want = want.text_embeds if made is hf.CLIPTextModelWithProjection else want.pooler_output
    for source in (theirs, tmp_path):
        got = wt.from_hf(source, tokenizer=words).embed(TEXTS)
        assert got.shape == want.shape and (got - want).abs().max() < 1e-5 * max(1, want.abs().max())


@pytest.mark.parametrize(
    "made",
    [hf.CLIPVisionModel, hf.CLIPVisionModelWithProjection, hf.SiglipVisionModel],
    ids=lambda m: m.__name__,
)
def test_a_picture_tower_alone(made, tmp_path):
    theirs = randomised(made(made.config_class(**PICTURE | {"projection_dim": 24})))
    theirs.save_pretrained(tmp_path)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = theirs(x)
    want = want.image_embeds if made is hf.CLIPVisionModelWithProjection else want.pooler_output
    for source in (theirs, tmp_path):
        got = wt.from_hf(source).embed(x)
        assert got.shape == want.shape and (got - want).abs().max() < 1e-5 * max(1, want.abs().max())


def test_clips_own_words_where_none_are_given(clip_words):
    theirs = clip(clip_words)
    ours = wt.from_hf(theirs)
    texts = [*CAPTIONS, "Caf\u00e9 cafe\u0301 it\u2019s \u3000 1,234 \U0001f600 &amp; İstanbul"]
    ids = clip_words(texts, padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        want = F.normalize(theirs.text_projection(theirs.text_model(ids).pooler_output), dim=-1)
    assert (ours.embed("text", texts) - want).abs().max() < 1e-5


def test_a_processor_of_both_is_taken_whole(clip_words, tmp_path):
    """CLIPProcessor, given or saved with the model (processor_config.json); a live model remembers its folder."""
    sizes = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
    both = hf.CLIPProcessor(hf.CLIPImageProcessorPil(**sizes), clip_words)
    theirs = clip(clip_words)
    for part in (both, theirs):
        part.save_pretrained(tmp_path)
    live = hf.CLIPModel.from_pretrained(tmp_path)
    want = wt.from_hf(theirs, tokenizer=clip_words, processor=both.image_processor)
    for ours in (wt.from_hf(theirs, processor=both), wt.from_hf(tmp_path), wt.from_hf(live)):
        assert ours.tokenizers["image"].crop == 0.8
        assert torch.equal(ours.embed("text", TEXTS), want.embed("text", TEXTS))
        assert torch.equal(ours.embed("image", PICTURES), want.embed("image", PICTURES))


def test_configs_and_buffers_of_the_first_clips(clip_words, tmp_path):
    """Settings in *_config_dict, counting buffers among the weights, sizes as plain numbers, no class told."""
    theirs = clip(clip_words)
    theirs.save_pretrained(tmp_path)
    clip_words.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("text_config", "vision_config"):
        config[f"{key}_dict"] = config.pop(key)
        config[key] = {"hidden_size": 7}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": None}))
    old = {
        "crop_size": 32,
        "size": 32,
        "resample": 3,
        "do_center_crop": True,
        "feature_extractor_type": "CLIP",
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    weights = theirs.state_dict()
    weights["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    weights["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    ours, want = wt.from_hf(tmp_path), wt.from_hf(theirs, tokenizer=clip_words, processor=old)
    assert torch.equal(ours.embed("text", TEXTS), want.embed("text", TEXTS))
    assert torch.equal(ours.embed("image", PICTURES), want.embed("image", PICTURES))
    weights["text_model.adapter"] = torch.zeros(2)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(wt.InputError, match=r"text tower.*\['adapter'\]"):
        wt.from_hf(tmp_path)


# ---- preprocessing -------------------------------------------------------------------------------------------

FORMS = {
    "CLIP": ("clip", {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}),
    "CLIP, smaller cut, odd remainders": (
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
def test_pictures_are_prepared_as_transformers_does(what, tmp_path):
    """Exactly as its Pillow processors; all but one value in a thousand within a level of 255 as its torchvision ones.

    (Those have no Lanczos and take another filter for it.)
    """
    family, settings = FORMS[what]
    made = {
        "vit": (hf.ViTImageProcessorPil, hf.ViTImageProcessor, hf.ViTModel(hf.ViTConfig(**PICTURE))),
        "clip": (
            hf.CLIPImageProcessorPil,
            hf.CLIPImageProcessor,
            hf.CLIPVisionModel(hf.CLIPVisionConfig(**PICTURE)),
        ),
        "siglip": (
            hf.SiglipImageProcessorPil,
            hf.SiglipImageProcessor,
            hf.SiglipVisionModel(hf.SiglipVisionConfig(**PICTURE)),
        ),
    }[family]
    exact, fast = made[0](**settings), made[1](**settings)
    made[2].save_pretrained(tmp_path)
    exact.save_pretrained(tmp_path)
    pictures = [pil(HOPPER), pil(HOPPER).resize((301, 517)), pil(EMOJI[0]), pil(EMOJI[1]).resize((37, 75))]
    for ours in (wt.from_hf(made[2], processor=exact), wt.from_hf(tmp_path)):
        front = ours.tokenizer
        batch = front.collate([front.read(p) for p in pictures])["pixels"].double()
        mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (front.mean, front.std))
        mine = (batch / 255 - mean) / std
        want = exact(pictures, return_tensors="pt")["pixel_values"].double()
        assert want.shape == mine.shape and (want - mine).abs().max() < 1e-6
        near = fast(pictures, return_tensors="pt")["pixel_values"].double()
        off = ((near - mine) * std * 255).abs()
        print(f"\n{what:40} torchvision's differs by up to {float(off.max()):.1f} levels of 255")
        assert "Lanczos" in what or (off > 1.01).double().mean() < 1e-3


def test_a_given_processor_is_followed_before_the_folders(tmp_path):
    theirs = randomised(hf.ViTForImageClassification(hf.ViTConfig(**PICTURE)))
    theirs.save_pretrained(tmp_path)
    hf.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    assert wt.from_hf(tmp_path).tokenizers["image"].size == (32, 32)
    given = wt.from_hf(tmp_path, processor={"size": {"height": 64, "width": 32}})
    assert given.tokenizers["image"].size == (64, 32)


STEPS = {
    "do_resize=False": {"do_resize": False},
    "rescale_factor": {"rescale_factor": 1 / 127.5},
    "resample=4": {"resample": 4},
    "not cut": {"size": {"shortest_edge": 32}},
    "do_pad": {"do_pad": True},
    "longest_edge": {"size": {"longest_edge": 32}},
    "a cut of": {
        "size": {"height": 32, "width": 32},
        "do_center_crop": True,
        "crop_size": {"height": 40, "width": 40},
    },
    "shorter edge isn't": {
        "size": {"shortest_edge": 40},
        "do_center_crop": True,
        "crop_size": {"height": 16, "width": 32},
    },
}


@pytest.mark.parametrize("what", STEPS)
def test_a_step_that_cannot_be_carried_is_named(what):
    theirs = hf.ViTModel(hf.ViTConfig(**PICTURE))
    with pytest.raises(wt.InputError, match=what):
        wt.from_hf(theirs, processor=STEPS[what])


def test_a_batch_of_native_sizes_equals_theirs_one_by_one():
    """The same weights behind a front-end of native aspect: rows of unequal length, padding between them."""
    theirs = randomised(hf.ViTForImageClassification(hf.ViTConfig(**PICTURE, num_labels=5)))
    ours = wt.from_hf(theirs)
    fixed = ours.tokenizers["image"]
    native = wt.ImageTokenizer(
        **{**fixed.config_args(), "size": None, "resize": "crop", "max_tokens": 64}
    ).eval()
    native.load_state_dict(fixed.state_dict())
    ours.tokenizers["image"] = native
    shapes = [(32, 32), (64, 40), (16, 56), (8, 24), (48, 64)]  # width, height
    raws = [native.read(pil(p).resize(s)) for p, s in zip(PICTURES, shapes, strict=True)]
    batch = native.collate(raws)
    assert len(set(batch["lengths"])) > 2
    with torch.no_grad():
        got = ours({"image": batch})
        want = torch.cat([theirs((r / 127.5 - 1)[None], interpolate_pos_encoding=True).logits for r in raws])
    assert (got - want).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "made", [hf.ViTForImageClassification, hf.CLIPModel, hf.SiglipModel], ids=lambda m: m.__name__
)
def test_published_sizes_within_1e_4(made, clip_words):
    """ViT-B/16, CLIP ViT-B/32 and SigLIP B/16 as wide and deep as published, every parameter random."""
    theirs, g = made(made.config_class()).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():  # as wide as usual, so that no layer saturates at these widths
        for p in theirs.parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(p.shape[-1] ** -0.5 * noise) if p.ndim > 1 else p.copy_(p.clamp(min=0.2) + 0.1 * noise)
    ours = wt.from_hf(theirs)
    x = torch.randn(2, 3, 224, 224, generator=g)
    ids = (
        clip_words(CAPTIONS[:2], padding="max_length", max_length=64, return_tensors="pt")["input_ids"]
        % 32000
    )
    ids = (
        clip_words(CAPTIONS[:2], padding=True, return_tensors="pt")["input_ids"]
        if made is hf.CLIPModel
        else ids
    )
    with torch.no_grad():
        if made is hf.ViTForImageClassification:
            pairs = [(theirs(x).logits, ours({"image": x}))]
        else:
            out = theirs(input_ids=ids, pixel_values=x)
            pairs = [(out.image_embeds, ours.embed("image", x)), (out.text_embeds, ours.embed("text", ids))]
    for want, got in pairs:
        worst, apart = float((want - got).abs().max()), float((want[0] - want[1]).abs().max())
        print(f"\n{made.__name__:30} {worst:.1e} of {float(want.abs().max()):.2f}, samples {apart:.2f} apart")
        assert worst < 1e-4 and apart > 0.01
