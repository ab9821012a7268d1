"""from_timm: parity of outputs with every parameter randomised, preprocessing, and strict loading.

Largest absolute differences in float32 (logits of a few units): `pytest -s` prints them.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import timm
import torch
from timm.data import create_transform, resolve_data_config
from torch import nn

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.testing import randomised

HOPPER = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
EMOJI = [r["image"] for r in samples.open("emoji", split="validation")[:5]]
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}

FAMILIES = {  # case: (timm's name, its options besides SMALL)
    "ViT, class token": ("vit_tiny_patch16_224.augreg_in21k", {}),
    "ViT, RMSNorm": ("vit_tiny_patch16_224", {"norm_layer": "rmsnorm"}),
    "ViT, QK-norm": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "ViT, no bias in q, k, v": ("vit_tiny_patch16_224", {"qkv_bias": False}),
    "ViT, patches that are not square": ("vit_tiny_patch16_224", {"patch_size": (8, 4)}),
    "ViT, no positions": ("vit_tiny_patch16_224", {"pos_embed": "none"}),
    "ViT, 4 classes, drop path": ("vit_tiny_patch16_224", {"num_classes": 4, "drop_path_rate": 0.1}),
    "DeiT": ("deit_tiny_patch16_224.fb_in1k", {}),
    "DeiT-3, LayerScale": ("deit3_small_patch16_224", {}),
    "mean of patches, no class token": ("vit_base_patch16_gap_224", {}),
    "mean of patches, with a class token": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "mean of all": ("vit_tiny_patch16_224", {"global_pool": "avg", "pool_include_prefix": True}),
    "4 registers, mean": ("vit_betwixt_patch16_reg4_gap_256", {}),
    "1 register, class token": ("vit_base_patch16_reg4_gap_256", {"reg_tokens": 1, "class_token": True}),
    "registers with position embeddings": ("vit_base_patch16_reg4_gap_256", {"no_embed_class": False}),
    "CLIP's tower, QuickGELU, first norm": ("vit_base_patch32_clip_quickgelu_224", {}),
    "SigLIP, attention pooling": ("vit_base_patch16_siglip_224", {"num_classes": 5}),
    "attention pooling, with a class token": (
        "vit_base_patch16_siglip_224",
        {"class_token": True, "num_classes": 5},
    ),
    "attention pooling including a class token": (
        "vit_base_patch16_siglip_224",
        {"class_token": True, "pool_include_prefix": True, "num_classes": 5},
    ),
    "SigLIP-2, tanh GELU, mean": ("vit_so400m_patch14_siglip_gap_224", {"num_classes": 5}),
    "DINOv2, no head": ("vit_small_patch14_dinov2", {}),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", {"num_classes": 7}),
    "DINOv2 giant, SwiGLU": ("vit_giant_patch14_dinov2", {}),
    "EVA": ("eva_giant_patch14_224", {}),
    "EVA-02 tiny, RoPE, SwiGLU": ("eva02_tiny_patch14_224", {}),
    "EVA-02 base, norm in SwiGLU, separate q, k, v": ("eva02_base_patch14_448", {}),
    "EVA-02, QK-norm, own grid": (
        "eva02_tiny_patch14_224",
        {"qk_norm": True, "ref_feat_shape": None},
    ),
    "EVA-02, rotate_half": ("eva02_tiny_patch14_224", {"rope_rotate_half": True}),
    "EVA-02, DINOv3's positions": ("eva02_tiny_patch14_224", {"rope_type": "dinov3"}),
    "DINOv3": ("vit_small_patch16_dinov3", {"num_classes": 5}),
    "DINOv3, class token, bias in q, k, v": (
        "vit_small_patch16_dinov3_qkvb",
        {"num_classes": 5, "global_pool": "token"},
    ),
    "DINOv3 plus, SwiGLU": ("vit_small_plus_patch16_dinov3", {"num_classes": 5}),
    "DeiT, distilled": ("deit_tiny_distilled_patch16_224", {"num_classes": 5}),
}


def small(name: str, **options) -> nn.Module:
    return randomised(timm.create_model(name, **{**SMALL, "dynamic_img_size": True, **options}))


def transform(model: nn.Module):
    cfg = resolve_data_config(model=model)
    cfg["input_size"] = (3, *model.patch_embed.img_size)
    return create_transform(**cfg, is_training=False)


@pytest.mark.parametrize("what", FAMILIES)
def test_logits_match_within_1e_5(what, to_pil, tmp_path):
    """On real images preprocessed by either library, in batches; at other sizes; after save and load."""
    name, options = FAMILIES[what]
    theirs = small(name, **options)
    ours = wt.from_timm(theirs)
    assert not ours.training
    images = [HOPPER, *EMOJI]
    pixels = torch.stack([transform(theirs)(to_pil(p)) for p in images])
    worst, largest = 0.0, 0.0
    with torch.no_grad():
        # the model's size, then smaller, larger and not square, one row of patches
        for x in (
            pixels,
            pixels[:3, :, :16, :],
            pixels.repeat(1, 1, 2, 3)[:2, :, :48, :88],
            pixels[:2, :, :8],
        ):
            a, b = theirs(x), ours({"image": x})
            assert a.shape == b.shape
            worst, largest = max(worst, float((a - b).abs().max())), max(largest, float(a.abs().max()))
        read = ours.logits(images, batch_size=4)
        worst = max(worst, float((theirs(pixels) - read).abs().max()))
    print(f"\n{what:45} {worst:.1e} of {largest:.1f}")
    assert worst < 1e-5 and largest > 0.5
    again = wt.load(ours.save(tmp_path / "m"))
    assert torch.equal(again.logits(images, batch_size=4), read)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_base_patch16_siglip_224", "eva02_tiny_patch14_224"]
)
def test_eps_is_converted(name):
    """Tokens are as small as eps: another eps would change the output."""
    theirs = small(name, num_classes=5)
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(1e-3 if p.ndim > 1 else 1.0)
        for key, p in theirs.named_parameters():
            if key.endswith("bias") or "gamma" in key:
                p.zero_()
    ours = wt.from_timm(theirs)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        want, got = theirs(x), ours({"image": x})
        large = want.abs().max()
        assert (want - got).abs().max() < 1e-4 * large
        for m in ours.modules():
            if isinstance(m, nn.LayerNorm):
                m.eps = 1e-5
        assert (want - ours({"image": x})).abs().max() > 0.1 * large


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_base_patch16_siglip_224", "eva02_tiny_patch14_224"]
)
def test_a_batch_of_native_sizes_matches_one_by_one(name, to_pil):
    """The same weights with a front-end of native aspect: rows of unequal length, with padding."""
    theirs = small(name, num_classes=5)
    ours = wt.from_timm(theirs)
    fixed = ours.tokenizers["image"]
    native = wt.ImageTokenizer(
        **{**fixed.config_args(), "size": None, "preprocess": None, "max_tokens": 64}
    ).eval()
    native.load_state_dict(fixed.state_dict())
    ours.tokenizers["image"] = native
    raws = [native.read(to_pil(p).resize(s)) for p, s in zip([HOPPER, *EMOJI], SIZES, strict=False)]
    batch = native.collate(raws)
    assert len(set(batch["lengths"])) > 2
    mean, std = (torch.tensor(v)[:, None, None] for v in (native.mean, native.std))
    with torch.no_grad():
        got = ours({"image": batch})
        want = torch.cat([theirs(((r / 255 - mean) / std)[None]) for r in raws])
    assert (got - want).abs().max() < 1e-5


NAFLEX = {  # case: (timm's name, options)
    "mean, 4 registers, LayerScale": ("naflexvit_base_patch16_gap", {}),
    "mean, aspect-preserving positions": ("naflexvit_base_patch16_par_gap", {}),
    "attention pooling, a register": ("naflexvit_base_patch16_map", {}),
    "SigLIP 2's, bilinear positions": ("naflexvit_base_patch16_siglip", {"num_classes": 5}),
    "class token, convolutional patch embedding": (
        "naflexvit_base_patch16_gap",
        {"class_token": True, "global_pool": "token", "embed_proj_type": "conv"},
    ),
    "channels-first patches that are not square, no positions, first norm": (
        "naflexvit_base_patch16_gap",
        {"patchify_channels_last": False, "patch_size": (8, 4), "pos_embed": "none", "pre_norm": True},
    ),
    "RoPE, SwiGLU": (
        "naflexvit_base_patch16_gap",
        {"rope_type": "axial", "attn_type": "eva", "pos_embed": "none", "swiglu_mlp": True, "reg_tokens": 1},
    ),
    "DINOv3's positions": (
        "naflexvit_base_patch16_gap",
        {"rope_type": "dinov3", "attn_type": "eva", "pos_embed": "none", "rope_rotate_half": True},
    ),
}


@pytest.mark.parametrize("what", NAFLEX)
def test_native_aspect_matches_within_1e_5(what, to_pil, tmp_path):
    """NaFlexVit: real images through timm's resize, patches and padding; plain tensors; save and load."""
    from timm.data.naflex_dataset import NaFlexCollator
    from timm.data.naflex_transforms import Patchify, ResizeToSequence
    from torchvision.transforms.functional import normalize, to_tensor

    name, options = NAFLEX[what]
    size = {k: v for k, v in SMALL.items() if k != "img_size"}
    theirs = randomised(timm.create_model(name, **{**size, "pos_embed_grid_size": (4, 6), **options}))
    ours = wt.from_timm(theirs)
    front, patch = ours.tokenizers["image"], theirs.embeds.patch_size
    assert front.max_tokens == (384 // patch[0]) * (384 // patch[1])
    ours.tokenizers["image"].max_tokens = 22
    cfg = resolve_data_config(model=theirs)
    images = [to_pil(p).resize(s) for p, s in zip([HOPPER, *EMOJI], SIZES, strict=False)]
    cut, resized = Patchify(patch), ResizeToSequence(patch, 22, interpolation=cfg["interpolation"])
    ready = [normalize(to_tensor(resized(p)), cfg["mean"], cfg["std"]) for p in images]
    worst, largest = 0.0, 0.0
    with torch.no_grad():
        if theirs.embeds.is_linear and theirs.embeds.channels_last:
            batch, _ = NaFlexCollator(max_seq_len=30)([(cut(x), 0) for x in ready])
            want = theirs(batch)
            got = ours.logits(images)
            worst, largest = float((want - got).abs().max()), float(want.abs().max())
            rows = front.collate([front.read(p) for p in images])
            assert len(set(rows["lengths"])) > 2
        for x in ready:  # one by one, as a plain tensor
            want = theirs(x[None])
            worst = max(worst, float((ours({"image": x[None]}) - want).abs().max()))
            largest = max(largest, float(want.abs().max()))
    print(f"\nNaFlexVit, {what:45} {worst:.1e} of {largest:.1f}")
    assert worst < 1e-5 and largest > 0.5
    again = wt.load(ours.save(tmp_path / "m"))
    assert torch.equal(again({"image": ready[0][None]}), ours({"image": ready[0][None]}))


SIZES = [(32, 32), (64, 40), (16, 56), (8, 24), (48, 64)]  # width, height

TAGS = [
    "vit_base_patch16_224.augreg_in21k",  # 0.5, crop 0.9, bicubic
    "deit_tiny_patch16_224.fb_in1k",  # ImageNet's mean, crop 0.9
    "vit_tiny_patch16_384.augreg_in21k_ft_in1k",  # crop 1.0
    "vit_base_patch16_clip_224.openai",  # CLIP's mean
    "vit_base_patch16_siglip_256.webli",  # resize mode of timm
    "vit_small_patch14_dinov2.lvd142m",  # 518
    "eva02_tiny_patch14_336.mim_in22k_ft_in1k",  # squash
    "vit_base_patch16_224.sam_in1k",
]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("square", [True, False])
def test_pixels_equal_timms_exactly(tag, square, to_pil):
    model = timm.create_model(tag, embed_dim=48, depth=1, num_heads=3)
    if not square:
        size = (4 * model.patch_embed.patch_size[0], 9 * model.patch_embed.patch_size[1])
        model.set_input_size(img_size=size)
    front = wt.from_timm(model).tokenizers["image"]
    images = [HOPPER, *EMOJI[:2]]
    got = front.collate([front.read(p) for p in images])["pixels"]
    steps = transform(model).transforms
    for image, mine in zip(images, got, strict=True):
        image = to_pil(image)
        for step in steps[:-2]:
            image = step(image)
        assert np.array_equal(np.asarray(image), mine.permute(1, 2, 0).numpy())
    cfg = resolve_data_config(model=model)
    assert (front.mean, front.std) == (tuple(cfg["mean"]), tuple(cfg["std"])) and not front.preprocess.draft


def test_sources_by_name_folder_and_file(tmp_path):
    theirs = small("vit_tiny_patch16_224", num_classes=6)
    args = {**SMALL, "num_classes": 6}
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    want = theirs(x)
    from safetensors.torch import save_file
    from timm.models import save_for_hf

    save_for_hf(theirs, tmp_path / "folder", model_args=args, safe_serialization=True)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in theirs.state_dict().items()}}, tmp_path / "w.pt")
    plain = dict(SMALL)
    for ours in (
        wt.from_timm(tmp_path / "folder"),
        wt.from_timm(tmp_path / "w.safetensors", architecture="vit_tiny_patch16_224", options=plain),
        wt.from_timm(str(tmp_path / "w.pt"), architecture="vit_tiny_patch16_224", options=plain),
    ):
        assert (ours({"image": x}) - want).abs().max() < 1e-5
    named = wt.from_timm("vit_tiny_patch16_224", options={**SMALL, "num_classes": 3})
    assert named({"image": x}).shape == (2, 3)


def test_what_cannot_be_converted_is_an_error_that_names_it(tmp_path):
    def refused(source, match, **more):
        with pytest.raises(wt.InputError, match=match):
            wt.from_timm(source, **more)

    refused("resnet18", "ResNet")
    refused("vit_tiny_patch61", "close names: .*vit_tiny_patch16")
    refused(small("deit_tiny_distilled_patch16_224", num_classes=0), "without classes")
    refused(small("deit_tiny_distilled_patch16_224", no_embed_class=True), "no_embed_class")
    refused("vit_small_resnet26d_224", "ResNet|HybridEmbed")
    size = {k: v for k, v in SMALL.items() if k != "img_size"}
    for options, match in (
        ({"pos_embed": "factorized"}, "factorized positions"),
        ({"pos_embed_use_grid_sample": True}, "positions interpolated this way"),
        ({"pos_embed_align_corners": True, "pos_embed_antialias": False}, "positions interpolated this way"),
        ({"rope_type": "mixed", "pos_embed": "none"}, "AttentionRope"),
        ({"attn_gated": True, "attn_type": "eva"}, r"blocks.0.attn.gate.weight"),
    ):
        refused("naflexvit_base_patch16_gap", match, options={**size, **options})
    refused(small("vit_tiny_patch16_224", attn_layer="diff"), "DiffAttention")
    refused(small("vit_tiny_patch16_224", scale_attn_norm=True), r"blocks.0.attn.norm.weight")
    refused(small("vit_tiny_patch16_224", global_pool="max"), "pooling 'max'")
    refused(small("vit_tiny_patch16_224", in_chans=1), "1 channels")
    refused(small("vit_tiny_patch16_224", dynamic_img_pad=True), "dynamic_img_pad")
    refused(small("vit_tiny_patch16_224", act_layer="relu"), "activation ReLU")
    refused(small("vit_base_patch16_xp_224"), "ParallelScalingBlock")
    refused(small("eva02_tiny_patch14_224", rope_grid_indexing="xy"), "RoPE of type")
    extra = small("vit_tiny_patch16_224")
    extra.blocks[1].adapter = nn.Linear(2, 2)
    refused(extra, r"blocks.1.adapter.weight")
    extra = small("vit_tiny_patch16_224")
    extra.blocks[1].norm2.eps = 1e-3
    refused(extra, "norms of one kind and eps")
    weights = small("vit_tiny_patch16_224").state_dict()
    for change, match in (
        (lambda w: w.pop("blocks.1.norm1.bias"), r"missing \['blocks.1.norm1.bias'\]"),
        (lambda w: w.update({"blocks.1.extra": torch.zeros(1)}), r"unknown \['blocks.1.extra'\]"),
    ):
        wrong = dict(weights)
        change(wrong)
        torch.save(wrong, tmp_path / "w.pt")
        refused(tmp_path / "w.pt", match, architecture="vit_tiny_patch16_224", options=SMALL)
    refused(tmp_path / "w.pt", "architecture=")
    (tmp_path / "bad.pt").write_bytes(b"not weights")
    refused(tmp_path / "bad.pt", "bad.pt cannot be read", architecture="vit_tiny_patch16_224")
    refused("vit_tiny_patch16_224", "cannot make", options={"no_such_option": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch16_224.augreg_in21k",
        "deit_base_patch16_224.fb_in1k",
        "vit_base_patch16_siglip_256.webli",
        "vit_small_patch14_reg4_dinov2.lvd142m",
        "eva02_small_patch14_336.mim_in22k_ft_in1k",
        "vit_small_patch16_dinov3.lvd1689m",
        "deit_small_distilled_patch16_224.fb_in1k",
    ],
)
def test_published_sizes_within_1e_4(name, to_pil):
    theirs, g = timm.create_model(name).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():  # the usual scale, so that no layer saturates at these widths
        for p in theirs.parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(p.shape[-1] ** -0.5 * noise) if p.ndim > 1 else p.copy_(p.clamp(min=0.2) + 0.1 * noise)
    ours = wt.from_timm(theirs)
    images = [HOPPER, EMOJI[0]]
    with torch.no_grad():
        want = theirs(torch.stack([transform(theirs)(to_pil(p)) for p in images]))
    worst = float((ours.logits(images) - want).abs().max())
    apart = float((want[0] - want[1]).abs().max())
    print(f"\n{name:45} {worst:.1e} of {float(want.abs().max()):.1f}, images {apart:.1f} apart")
    assert worst < 1e-4 and apart > 0.1


def test_gradients_match():
    """So fine-tuning gives the same model."""
    theirs = small("vit_base_patch16_siglip_224", num_classes=5)
    ours = wt.from_timm(theirs)
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    y = torch.tensor([0, 1, 4])
    nn.functional.cross_entropy(theirs(x), y).backward()
    nn.functional.cross_entropy(ours({"image": x}), y).backward()
    pairs = [
        (theirs.patch_embed.proj.weight.grad.flatten(1), ours.tokenizers["image"].proj.weight.grad),
        (theirs.blocks[0].attn.qkv.weight.grad, ours.trunk.blocks[0].attn.qkv.weight.grad),
        (theirs.attn_pool.latent.grad[0], ours.pool.query.grad),
        (theirs.pos_embed.grad[0], ours.tokenizers["image"].pos_embed.grad.flatten(0, 1)),
    ]
    for a, b in pairs:
        assert (a - b).abs().max() < 1e-6 * max(1.0, float(a.abs().max()))
        assert float(a.abs().max()) > 0


def test_bytes_and_paths_predict_alike():
    ours = wt.from_timm(small("vit_tiny_patch16_224", num_classes=6))
    data = HOPPER.read_bytes()
    assert torch.equal(ours.predict([HOPPER]).probabilities, ours.predict([io.BytesIO(data)]).probabilities)
