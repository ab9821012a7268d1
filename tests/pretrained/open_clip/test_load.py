"""from_open_clip: parity of embeddings with every parameter randomised, preprocessing, sources, and strict loading.

Largest absolute differences in float32 of normalised embeddings: `pytest -s` prints them.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
import open_clip
import pytest
import timm
import tokenizers
import torch
import torch.nn.functional as F
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.tokenizer import HFTokenizer
from torch import nn

import worldtokens as wt
from worldtokens import testing
from worldtokens.data import samples
from worldtokens.tokenizers.text.normalize import NORMALIZERS

HOPPER = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
ROWS = samples.open("emoji", split="validation")[:12]
EMOJI = [r["image"] for r in ROWS[:4]]
CAPTIONS = [c for r in ROWS for c in r["text"]] + ["", "It's  a <b>Cat</b> &amp; dog_house!", "word " * 90]
VISION = {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2, "head_width": 16}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}

FAMILIES = {  # case: (class, options of the model, the image tower, the text tower)
    "ViT-B-32 type": (CLIP, {}, {}, {}),
    "ViT-L-14-quickgelu type": (CLIP, {"quick_gelu": True}, {}, {}),
    "separate text tower, logit bias": (CustomTextCLIP, {"init_logit_bias": -10.0}, {}, {"proj_bias": True}),
    "LayerScale, eps 1e-6, logit scale of one element": (
        CLIP,
        {"nonscalar_logit_scale": True},
        {"ls_init_value": 0.1, "norm_kwargs": {"eps": 1e-6}},
        {"ls_init_value": 0.1, "norm_kwargs": {"eps": 1e-6}},
    ),
    "mean of patches, no first norm, tanh GELU": (
        CLIP,
        {},
        {"pool_type": "avg", "no_ln_pre": True, "act_kwargs": {"approximate": "tanh"}},
        {"act_kwargs": {"approximate": "tanh"}, "context_length": 24, "mlp_ratio": 3.0},
    ),
    "norm after pooling the class token, fixed positions": (
        CLIP,
        {},
        {"final_ln_after_pool": True, "pos_embed_type": "sin_cos_2d"},
        {},
    ),
    "text without projection": (CustomTextCLIP, {}, {}, {"proj_type": "none", "width": 24}),
    "CLIP's vocabulary, bidirectional, pooled at the last position": (
        CustomTextCLIP,
        {},
        {},
        {"no_causal_mask": True, "pool_type": "last", "context_length": 40},
    ),
    "pooled at the end token id": (CustomTextCLIP, {}, {}, {"pool_type": "eos", "eos_id": 49407}),
}


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    model = testing.randomised(model, seed)
    with torch.no_grad():
        model.logit_scale.fill_(3.1)
    return model


def make(kind=CLIP, options=None, vision=None, text=None) -> nn.Module:
    return randomised(kind(24, {**VISION, **(vision or {})}, {**TEXT, **(text or {})}, **(options or {})))


def differences(to_pil, theirs, ours, tokenizer, context=None, size=32):
    """Largest differences of both towers: from files and text, and from open_clip's preprocessed inputs."""
    preprocess = open_clip.image_transform(size, is_train=False)
    images = [HOPPER, *EMOJI]
    pixels = torch.stack([preprocess(to_pil(p)) for p in images])
    ids = tokenizer(CAPTIONS) if context is None else tokenizer(CAPTIONS, context)
    with torch.no_grad():
        image, text = theirs.encode_image(pixels, normalize=True), theirs.encode_text(ids, normalize=True)
    found = [
        image - ours.embed("image", images, batch_size=3),
        image - ours.embed("image", pixels),
        text - ours.embed("text", CAPTIONS, batch_size=7),
        text - ours.embed("text", ids),
    ]
    # equal embeddings for all inputs would match trivially
    for vectors in (image, text):
        assert (vectors - vectors.mean(0)).norm(dim=-1).mean() > 0.05
    return [float(f.abs().max()) for f in found]


@pytest.mark.filterwarnings("ignore:a text of")
@pytest.mark.parametrize("what", FAMILIES)
def test_embeddings_match_within_1e_5(what, tmp_path, to_pil):
    theirs = make(*FAMILIES[what])
    ours = wt.from_open_clip(theirs)
    assert not ours.training
    found = differences(to_pil, theirs, ours, open_clip.get_tokenizer("ViT-B-32"), theirs.context_length)
    print(f"\n{what:45} images {max(found[:2]):.1e} text {max(found[2:]):.1e}")
    assert max(found) < 1e-5
    assert ours.loss_kind == ("clip" if theirs.logit_bias is None else "siglip")
    assert ours.logit_scale.item() == pytest.approx(3.1)
    again = wt.load(ours.save(tmp_path / "m"))
    assert torch.equal(again.embed("image", [HOPPER]), ours.embed("image", [HOPPER]))
    assert torch.equal(again.embed("text", CAPTIONS[:9]), ours.embed("text", CAPTIONS[:9]))


def test_other_image_sizes_match():
    """open_clip interpolates positions once, when weights are loaded; we do for any image."""
    small = make()
    ours = wt.from_open_clip(small)
    for size in (48, 16, (24, 48)):
        other = CLIP(24, {**VISION, "image_size": size}, TEXT).eval()
        weights = small.state_dict()
        open_clip.model.resize_pos_embed(weights, other)
        other.load_state_dict(weights)
        h, w = (size, size) if isinstance(size, int) else size
        x = torch.randn(2, 3, h, w, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            want = other.encode_image(x, normalize=True)
        assert (ours.embed("image", x) - want).abs().max() < 1e-5


# ---- SigLIP ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def siglip_folder(tmp_path_factory):
    """A vocabulary like SigLIP's: Unigram tokens trained on captions, an end token, padding tokens that are attended to."""
    from transformers import PreTrainedTokenizerFast

    rust = tokenizers.Tokenizer(tokenizers.models.Unigram())
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    rust.train_from_iterator([c.lower() for c in CAPTIONS], trainer)
    rust.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", rust.token_to_id("</s>"))]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def siglip(folder: Path, **tower) -> tuple[nn.Module, HFTokenizer]:
    tokenizer = HFTokenizer(str(folder), context_length=20, clean="canonicalize")
    text = {
        "context_length": 20,
        "vocab_size": len(tokenizer.tokenizer),
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
        "width": 48,
    }
    vision = {
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_proj": "none",
        "timm_pool": "token",
        "image_size": 32,
    }
    model = CustomTextCLIP(48, vision, {**TEXT, **text}, init_logit_bias=-10.0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 0}
    model.visual.trunk = timm.create_model("vit_base_patch16_siglip_224", **small, **tower)
    return randomised(model), tokenizer


@pytest.mark.filterwarnings("ignore:a text of")
def test_siglip_embeddings_and_ids_match_within_1e_5(siglip_folder, tmp_path, to_pil):
    theirs, tokenizer = siglip(siglip_folder)
    ours = wt.from_open_clip(theirs, tokenizer=tokenizer)
    front = ours.tokenizers["text"]
    got = front.collate([front.read(c) for c in CAPTIONS])["ids"]
    assert torch.equal(got, tokenizer(CAPTIONS))
    wt.testing.check_tokenizer(front, CAPTIONS[:4])
    found = differences(to_pil, theirs, ours, tokenizer)
    print(
        f"\n{'SigLIP, attention pooling, own vocabulary':45} images {max(found[:2]):.1e} text {max(found[2:]):.1e}"
    )
    assert max(found) < 1e-5 and ours.loss_kind == "siglip"
    again = wt.load(ours.save(tmp_path / "m"))
    assert torch.equal(again.embed("text", CAPTIONS), ours.embed("text", CAPTIONS))
    assert torch.equal(again.embed("image", [HOPPER]), ours.embed("image", [HOPPER]))
    with pytest.raises(wt.InputError, match=r"token embeddings and the vocabulary 49408.*tokenizer="):
        wt.from_open_clip(theirs)


@pytest.mark.parametrize("clean", ["canonicalize", "lower", "whitespace"])
def test_text_normalisation_equals_open_clips(clean):
    ours = NORMALIZERS["clip" if clean == "lower" else clean]
    theirs = open_clip.tokenizer.get_clean_fn(clean)
    odd = ["", "  A\tB\n", "don't_stop!", "&amp;lt;b&amp;gt; ÉCOLE", "“quotes” — 50%", "ＡＢＣ", "\u200b x"]
    for text in CAPTIONS + odd:
        assert ours(text) == theirs(text)


@pytest.mark.parametrize("bias", [False, True])
def test_a_timm_tower_with_a_linear_projection(bias):
    vision = {
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_pool": "token",
        "timm_proj_bias": bias,
        "image_size": 224,
    }
    theirs = randomised(CustomTextCLIP(24, vision, TEXT))
    ours = wt.from_open_clip(theirs)
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        want = theirs.encode_image(x, normalize=True)
    assert (ours.embed("image", x) - want).abs().max() < 1e-5


# ---- preprocessing and sources -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"resize_mode": "squash", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},  # SigLIP's
        {"interpolation": "bilinear"},
        {"interpolation": "random"},
        {"size": (48, 32)},
        {"size": (32, 48), "resize_mode": "squash"},
    ],
)
def test_pixels_equal_open_clips_exactly(given, to_pil):
    from open_clip.transform import PreprocessCfg, image_transform_v2

    model = make(vision={"image_size": given.get("size", 32)})
    open_clip.model.set_model_preprocess_cfg(model, {**PreprocessCfg(size=32).__dict__, **given})
    front = wt.from_open_clip(model).tokenizers["image"]
    cfg = PreprocessCfg(**model.visual.preprocess_cfg)
    steps = image_transform_v2(cfg, is_train=False).transforms
    got = front.collate([front.read(p) for p in (HOPPER, *EMOJI)])["pixels"]
    for image, mine in zip((HOPPER, *EMOJI), got, strict=True):
        image = to_pil(image)
        for step in steps[:-2]:
            image = step(image)
        assert np.array_equal(np.asarray(image), mine.permute(1, 2, 0).numpy())
    assert (front.mean, front.std) == (tuple(cfg.mean), tuple(cfg.std)) and not front.preprocess.draft


def test_sources_by_name_file_and_folder(tmp_path):
    from safetensors.torch import save_file

    config = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": TEXT, "quick_gelu": True}
    (tmp_path / "tiny-for-a-test.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path)
    theirs = make(CLIP, {"quick_gelu": True})
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(theirs.state_dict(), folder / "open_clip_model.safetensors")
    settings = {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear"}
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": settings})
    )
    by_file = wt.from_open_clip("tiny-for-a-test", str(tmp_path / "w.safetensors"))
    by_folder = wt.from_open_clip(folder)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    want = theirs.encode_image(x, normalize=True)
    for ours in (by_file, by_folder):
        assert (ours.embed("image", x) - want).abs().max() < 1e-5
    front = by_folder.tokenizers["image"]
    assert (front.mean, front.std, front.preprocess.interpolation) == ((0.5,) * 3, (0.25,) * 3, "bilinear")
    fresh = wt.from_open_clip("tiny-for-a-test")
    assert fresh.embed("text", ["a cat"]).shape == (1, 24)
    assert fresh.zero_shot([HOPPER], ["woman", "cat"]).shape == (1, 2)
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(wt.InputError, match="folder"):
        wt.from_open_clip(folder)


def test_what_cannot_be_converted_is_an_error_that_names_it(tmp_path):
    def refused(source, match, *more, **options):
        with pytest.raises(wt.InputError, match=match):
            wt.from_open_clip(source, *more, **options)

    refused("ViT-B-99", "ViT-B-99")
    refused("ViT-S-32", "cannot make", "no-such-weights")
    refused(nn.Linear(2, 2), "open_clip's Linear")
    refused(make(vision={"layers": (1, 1, 1, 1), "width": 16, "image_size": 64}), "ModifiedResNet")
    refused(make(vision={"attentional_pool": True, "attn_pooler_heads": 2}), "attentional pooling")
    refused(make(vision={"pool_type": "avg", "final_ln_after_pool": True}), "CLIPA")
    refused(make(vision={"qk_norm": True}), "CustomResidualAttentionBlock")
    refused(make(CustomTextCLIP, text={"embed_cls": True}), "text.*cls_emb")
    refused(make(CustomTextCLIP, text={"no_causal_mask": True}), "text pooling 'argmax'")
    refused(make(text={"vocab_size": 100}), "100 token embeddings")
    extra = make()
    extra.visual.transformer.resblocks[1].adapter = nn.Linear(2, 2)
    refused(extra, r"transformer.resblocks.1.adapter.weight")
    extra = make()
    extra.transformer.resblocks[0].ln_2.eps = 1e-3
    refused(extra, "ln_2 is layer with eps 0.001")
    (tmp_path / "w.pt").write_bytes(b"x")
    refused(tmp_path / "w.pt", "name its model")
    model = make()
    model.visual.preprocess_cfg = {"resize_mode": "longest", "size": 32}
    refused(model, "resize_mode 'longest'")


def test_the_loss_equals_open_clips(to_pil):
    theirs = make()
    ours = wt.from_open_clip(theirs)
    rows = [{"image": r["image"], "text": r["text"][0]} for r in ROWS[:6]]
    got = ours.loss(ours.collate([ours.read(r) for r in rows]))["loss"]
    preprocess = open_clip.image_transform(32, is_train=False)
    pixels = torch.stack([preprocess(to_pil(r["image"])) for r in rows])
    image = theirs.encode_image(pixels, normalize=True)
    text = theirs.encode_text(open_clip.get_tokenizer("ViT-B-32")([r["text"] for r in rows]), normalize=True)
    logits = theirs.logit_scale.exp() * image @ text.T
    want = (F.cross_entropy(logits, torch.arange(6)) + F.cross_entropy(logits.T, torch.arange(6))) / 2
    assert abs(float((got - want).detach())) < 1e-4


def test_pool_and_projection_settings_of_clip():
    front = {"image": wt.ImageTokenizer(dim=32, size=32), "text": wt.TextTokenizer.clip(dim=32)}

    def clip(**options):
        return wt.CLIP(front, wt.Transformer(32, 1, 2), **{"dim": 32, **options})

    pool = wt.AttentionPool(32, 2)
    both = clip(projection={"image": "none", "text": "bias"}, pool={"image": pool, "text": "last"})
    assert both.projections["text"].bias is not None and not list(both.projections["image"].parameters())
    image = both.trunk(both.tokenizers["image"].tokens([HOPPER]))
    assert (both.embed("image", [HOPPER]) - F.normalize(pool(image), dim=-1)).abs().max() < 1e-6
    for match, options in (
        ("needs dim=32", {"projection": "none", "dim": 16}),
        ("projection of 'image' is 'mlp'", {"projection": "mlp"}),
        ("pool of 'image' is 'max'", {"pool": "max"}),
        ("projection names", {"projection": {"image": "none"}}),
    ):
        with pytest.raises(ValueError, match=match):
            clip(**options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a text of")
@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-32-quickgelu", "ViT-L-14"])
def test_published_sizes_within_1e_4(name, to_pil):
    theirs, g = open_clip.create_model(name).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():  # the scale of their initialisation, so that no layer saturates at these widths
        for p in theirs.parameters():
            if p.ndim > 1:
                p.copy_(p.std() * torch.randn(p.shape, generator=g))
            else:
                p.add_(0.1 * torch.randn(p.shape, generator=g))
    found = differences(to_pil, theirs, wt.from_open_clip(theirs), open_clip.get_tokenizer(name), size=224)
    print(f"\n{name:45} images {max(found[:2]):.1e} text {max(found[2:]):.1e}")
    assert max(found) < 1e-4
