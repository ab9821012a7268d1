"""from_hf: parity with CLIP and SigLIP of transformers: both towers, one alone, vocabularies and old configs.

Largest absolute differences in float32: `pytest -s` prints them.
"""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers as hf
from tokenizers import processors

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.testing import randomised
from worldtokens.tokenizers.text import clip_bpe

CAPTIONS = [c for r in samples.open("emoji", split="validation")[:40] for c in r["text"]]
TEXTS = [*CAPTIONS[:9], "", "It's  a CAT, né? 1,234.5", "word " * 90]
TEXT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = TEXT | {"image_size": 32, "patch_size": 8}


@pytest.fixture(scope="module")
def clip_tokenizer() -> hf.PreTrainedTokenizerFast:
    """CLIP's vocabulary as a tokenizer of transformers."""
    state = json.loads(clip_bpe.vocabulary().to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split()) for m in state["merges"]]
    return hf.CLIPTokenizer(vocab=state["vocab"], merges=merges)


@pytest.fixture(scope="module")
def siglip_tokenizer() -> hf.PreTrainedTokenizerFast:
    learnt = tokenizers.SentencePieceBPETokenizer(unk_token="<unk>")
    learnt.train_from_iterator(CAPTIONS, 300, 1, show_progress=False, special_tokens=["<unk>", "</s>"])
    learnt._tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=learnt._tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=24,
    )


def clip(tokenizer, **options) -> hf.CLIPModel:
    cfg = hf.CLIPConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer)} | options,
        vision_config=IMAGE | options,
        projection_dim=24,
    )
    return randomised(hf.CLIPModel(cfg))


def siglip(tokenizer) -> hf.SiglipModel:
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 24, "pad_token_id": 1}
    cfg = hf.SiglipConfig(text_config=TEXT | text, vision_config=IMAGE)
    return randomised(hf.SiglipModel(cfg))


@pytest.mark.parametrize("what", ["CLIP, QuickGELU", "CLIP, GELU, eps 1e-6", "CLIP, old end token", "SigLIP"])
def test_both_towers_match_within_1e_5(
    what, clip_tokenizer, siglip_tokenizer, images, to_pil, at_sizes, tmp_path
):
    if what == "SigLIP":
        tokenizer, theirs, long = siglip_tokenizer, siglip(siglip_tokenizer), 24
        processor = hf.SiglipImageProcessorPil(size={"height": 32, "width": 32})
    else:
        options = {"CLIP, GELU, eps 1e-6": {"hidden_act": "gelu", "layer_norm_eps": 1e-6}}.get(what, {})
        tokenizer, theirs, long = clip_tokenizer, clip(clip_tokenizer, **options), 77
        processor = hf.CLIPImageProcessorPil(
            size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}
        )
    if "old" in what:
        theirs.config.text_config.eos_token_id = theirs.text_model.eos_token_id = 2
    for part in (theirs, tokenizer, processor):
        part.save_pretrained(tmp_path / "theirs")
    ours = wt.from_hf(theirs, tokenizer=tokenizer, processor=processor)
    ids = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=long, return_tensors="pt")
    pixels = processor([to_pil(p) for p in images], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        want = theirs(input_ids=ids["input_ids"], pixel_values=pixels)
        worst = float((ours.embed("text", TEXTS, 5) - want.text_embeds).abs().max())
        worst = max(worst, float((ours.embed("text", ids["input_ids"]) - want.text_embeds).abs().max()))
        worst = max(worst, float((ours.embed("image", images, 3) - want.image_embeds).abs().max()))
        for x in at_sizes(pixels):
            there = theirs.vision_model(x, interpolate_pos_encoding=True).pooler_output
            there = there if what == "SigLIP" else theirs.visual_projection(there)
            worst = max(worst, float((ours.embed("image", x) - F.normalize(there, dim=-1)).abs().max()))
        logits = ours.logit_scale.exp() * ours.embed("text", TEXTS) @ ours.embed("image", images).T
        logits = logits if ours.logit_bias is None else logits + ours.logit_bias
    apart = float((want.text_embeds[0] - want.text_embeds[1]).abs().max())
    print(f"\n{what:45} {worst:.1e}, texts {apart:.2f} apart")
    assert worst < 1e-5 and apart > 1e-3 and (logits - want.logits_per_text).abs().max() < 1e-4
    got = ours.embed("text", TEXTS), ours.embed("image", images)
    for other in (wt.load(ours.save(tmp_path / "ours")), wt.from_hf(tmp_path / "theirs")):
        assert torch.equal(other.embed("text", TEXTS), got[0])
        assert torch.equal(other.embed("image", images), got[1])


@pytest.mark.parametrize(
    "cls", [hf.CLIPTextModel, hf.CLIPTextModelWithProjection, hf.SiglipTextModel], ids=lambda c: c.__name__
)
def test_a_text_tower_alone(cls, clip_tokenizer, siglip_tokenizer, tmp_path):
    tokenizer = siglip_tokenizer if cls is hf.SiglipTextModel else clip_tokenizer
    long = 24 if cls is hf.SiglipTextModel else 77
    more = {"max_position_embeddings": long, "projection_dim": 24, "vocab_size": len(tokenizer)}
    theirs = randomised(cls(cls.config_class(**TEXT | more | {"pad_token_id": 1})))
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=long, return_tensors="pt")[
        "input_ids"
    ]
    with torch.no_grad():
        want = theirs(ids)
    want = want.text_embeds if cls is hf.CLIPTextModelWithProjection else want.pooler_output
    for source in (theirs, tmp_path):
        got = wt.from_hf(source, tokenizer=tokenizer).embed(TEXTS)
        assert got.shape == want.shape and (got - want).abs().max() < 1e-5 * max(1, want.abs().max())


@pytest.mark.parametrize(
    "cls",
    [hf.CLIPVisionModel, hf.CLIPVisionModelWithProjection, hf.SiglipVisionModel],
    ids=lambda c: c.__name__,
)
def test_an_image_tower_alone(cls, tmp_path):
    theirs = randomised(cls(cls.config_class(**IMAGE | {"projection_dim": 24})))
    theirs.save_pretrained(tmp_path)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = theirs(x)
    want = want.image_embeds if cls is hf.CLIPVisionModelWithProjection else want.pooler_output
    for source in (theirs, tmp_path):
        got = wt.from_hf(source).embed(x)
        assert got.shape == want.shape and (got - want).abs().max() < 1e-5 * max(1, want.abs().max())


def test_clips_own_vocabulary_is_the_default(clip_tokenizer):
    theirs = clip(clip_tokenizer)
    ours = wt.from_hf(theirs)
    texts = [*CAPTIONS, "Caf\u00e9 cafe\u0301 it\u2019s \u3000 1,234 \U0001f600 &amp; İstanbul"]
    ids = clip_tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        want = F.normalize(theirs.text_projection(theirs.text_model(ids).pooler_output), dim=-1)
    assert (ours.embed("text", texts) - want).abs().max() < 1e-5


def test_a_processor_holds_tokenizer_and_image_processor(clip_tokenizer, images, tmp_path):
    """CLIPProcessor, given, saved with the model (processor_config.json), or in the folder of a live model."""
    settings = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
    both = hf.CLIPProcessor(hf.CLIPImageProcessorPil(**settings), clip_tokenizer)
    theirs = clip(clip_tokenizer)
    for part in (both, theirs):
        part.save_pretrained(tmp_path)
    live = hf.CLIPModel.from_pretrained(tmp_path)
    want = wt.from_hf(theirs, tokenizer=clip_tokenizer, processor=both.image_processor)
    for ours in (wt.from_hf(theirs, processor=both), wt.from_hf(tmp_path), wt.from_hf(live)):
        assert ours.tokenizers["image"].preprocess.crop_pct == 0.8
        assert torch.equal(ours.embed("text", TEXTS), want.embed("text", TEXTS))
        assert torch.equal(ours.embed("image", images), want.embed("image", images))


def test_configs_and_buffers_of_the_first_clip_checkpoints(clip_tokenizer, images, at_sizes, tmp_path):
    """Settings in *_config_dict, position_ids buffers among the weights, at_sizes as plain numbers, no class named."""
    theirs = clip(clip_tokenizer)
    theirs.save_pretrained(tmp_path)
    clip_tokenizer.save_pretrained(tmp_path)
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
    ours, want = wt.from_hf(tmp_path), wt.from_hf(theirs, tokenizer=clip_tokenizer, processor=old)
    assert torch.equal(ours.embed("text", TEXTS), want.embed("text", TEXTS))
    assert torch.equal(ours.embed("image", images), want.embed("image", images))
    weights["text_model.adapter"] = torch.zeros(2)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(wt.InputError, match=r"text tower.*\['adapter'\]"):
        wt.from_hf(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [hf.CLIPModel, hf.SiglipModel], ids=lambda c: c.__name__)
def test_published_sizes_within_1e_4(cls, clip_tokenizer):
    """CLIP ViT-B/32 and SigLIP B/16 in their published width and depth, every parameter random."""
    theirs, g = cls(cls.config_class()).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():  # the usual scale, so that no layer saturates at these widths
        for p in theirs.parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(p.shape[-1] ** -0.5 * noise) if p.ndim > 1 else p.copy_(p.clamp(min=0.2) + 0.1 * noise)
    ours = wt.from_hf(theirs)
    x = torch.randn(2, 3, 224, 224, generator=g)
    ids = (
        clip_tokenizer(CAPTIONS[:2], padding="max_length", max_length=64, return_tensors="pt")["input_ids"]
        % 32000
    )
    ids = (
        clip_tokenizer(CAPTIONS[:2], padding=True, return_tensors="pt")["input_ids"]
        if cls is hf.CLIPModel
        else ids
    )
    with torch.no_grad():
        out = theirs(input_ids=ids, pixel_values=x)
    pairs = [(out.image_embeds, ours.embed("image", x)), (out.text_embeds, ours.embed("text", ids))]
    for want, got in pairs:
        worst, apart = float((want - got).abs().max()), float((want[0] - want[1]).abs().max())
        print(f"\n{cls.__name__:30} {worst:.1e} of {float(want.abs().max()):.2f}, samples {apart:.2f} apart")
        assert worst < 1e-4 and apart > 0.01
