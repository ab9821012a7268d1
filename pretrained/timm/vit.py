"""Conversion of timm's Vision Transformers: front-end, trunk, pooling, and weights under our names.

Four classes: `VisionTransformer` (ViT, DeiT, DINOv2, the image towers of SigLIP and CLIP in timm), DeiT with a distillation
token, `Eva` (EVA-02, DINOv3: RoPE, SwiGLU) and `NaFlexVit` (native aspect). Class token and registers with position
embeddings are added into one parameter each, since only their sum is used. The two heads of a distilled DeiT, whose logits
are averaged, become one head of both tokens. All other weights change only in name and order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from worldtokens.backbone.pooling import AttentionPool
from worldtokens.backbone.transformer import Transformer
from worldtokens.errors import InputError
from worldtokens.pretrained import mapping
from worldtokens.tokenizers.image.embedding import PatchEmbedConfig
from worldtokens.tokenizers.image.preprocess import ImagePreprocess
from worldtokens.tokenizers.image.tokenizer import ImageTokenizer

# timm -> ours, for all classes; `front` is the front-end, `norm` follows pooling
NAMES = {
    "patch_embed.proj.*": "front.proj.*",
    "class_token": "front.class_token",
    "registers": "front.registers",
    "positions": "front.pos_embed",
    "norm_pre.*": "trunk.first_norm.*",
    "blocks.*.norm1.*": "trunk.blocks.*.norm1.*",
    "blocks.*.attn.qkv.*": "trunk.blocks.*.attn.qkv.*",
    "blocks.*.attn.q_norm.*": "trunk.blocks.*.attn.q_norm.*",
    "blocks.*.attn.k_norm.*": "trunk.blocks.*.attn.k_norm.*",
    "blocks.*.attn.proj.*": "trunk.blocks.*.attn.proj.*",
    "blocks.*.ls1.gamma": "trunk.blocks.*.scale1.gamma",
    "blocks.*.gamma_1": "trunk.blocks.*.scale1.gamma",
    "blocks.*.norm2.*": "trunk.blocks.*.norm2.*",
    "blocks.*.mlp.fc1.*": "trunk.blocks.*.mlp.fc1.*",
    "blocks.*.mlp.norm.*": "trunk.blocks.*.mlp.norm.*",
    "blocks.*.mlp.fc2.*": "trunk.blocks.*.mlp.fc2.*",
    "blocks.*.ls2.gamma": "trunk.blocks.*.scale2.gamma",
    "blocks.*.gamma_2": "trunk.blocks.*.scale2.gamma",
    "norm.*": "trunk.norm.*",
    "attn_pool.latent": "pool.query",
    "attn_pool.q.*": "pool.attn.q.*",
    "attn_pool.kv.*": "pool.attn.kv.*",
    "attn_pool.proj.*": "pool.attn.proj.*",
    "attn_pool.norm.*": "pool.norm.*",
    "attn_pool.mlp.fc1.*": "pool.mlp.fc1.*",
    "attn_pool.mlp.fc2.*": "pool.mlp.fc2.*",
    "fc_norm.*": "norm.*",
    "head.*": "head.*",
}
JOINED = {
    "blocks.*.attn.qkv.weight": tuple(f"blocks.*.attn.{p}_proj.weight" for p in "qkv"),
    "blocks.*.mlp.fc1.weight": ("blocks.*.mlp.fc1_g.weight", "blocks.*.mlp.fc1_x.weight"),
    "blocks.*.mlp.fc1.bias": ("blocks.*.mlp.fc1_g.bias", "blocks.*.mlp.fc1_x.bias"),
}


@dataclasses.dataclass
class ImageTower:
    """A converted image tower: its parts, and its weights under the names of `NAMES`."""

    front: ImageTokenizer
    trunk: Transformer
    pool: str | AttentionPool
    pool_norm: bool
    weights: dict[str, Tensor]


def convert_vit(
    model: nn.Module, name: str, settings: Mapping[str, Any], preprocess: Mapping[str, Any]
) -> ImageTower:
    """Convert a ViT of timm.

    Args:
        model: the live model.
        name: name of the model, for errors.
        settings: `mean` and `std` of `ImageTokenizer`; for a `NaFlexVit` also `max_tokens`.
        preprocess: fields of `ImagePreprocess`.

    Raises:
        InputError: the variant is not supported.
    """
    from timm.models import deit, eva, naflexvit, vision_transformer

    classes = (
        vision_transformer.VisionTransformer,
        deit.VisionTransformerDistilled,
        eva.Eva,
        naflexvit.NaFlexVit,
    )
    if type(model) not in classes:
        known = ", ".join(c.__name__ for c in classes)
        raise InputError(f"{name} is timm's {type(model).__name__}; supported are {known}")
    native = type(model) is naflexvit.NaFlexVit
    embed = model.embeds if native else model.patch_embed
    _check_supported(model, embed, name)
    dim, first, rope = model.embed_dim, model.blocks[0], getattr(model, "rope", None)
    norms = {
        k: m for k, m in model.named_modules() if "norm" in k.rpartition(".")[2] and list(m.parameters())
    }
    cfg = mapping.norm_settings(norms, name)
    gated = type(first.mlp).__name__ in ("GluMlp", "SwiGLU")
    scaled = getattr(first, "gamma_1", None) is not None or not isinstance(getattr(first, "ls1", None), _NONE)
    rope_settings, embedding = _rope(rope, name)
    trunk = Transformer(
        dim,
        len(model.blocks),
        first.attn.num_heads,
        norm=cfg["norm"],
        activation="swiglu" if gated else mapping.activation_name(first.mlp.act, name),
        qk_norm=not isinstance(first.attn.q_norm, nn.Identity),
        drop_path=getattr(model.blocks[-1].drop_path1, "drop_prob", None) or 0.0,
        rope=0 if rope is None else 2,
        config={
            "mlp_dim": first.mlp.fc2.in_features,
            "eps": cfg["eps"],
            "layer_scale": 1.0 if scaled else None,
            "first_norm": not isinstance(model.norm_pre, nn.Identity),
            "final_norm": not isinstance(model.norm, nn.Identity),
            "mlp_norm": not isinstance(getattr(first.mlp, "norm", nn.Identity()), nn.Identity),
            **rope_settings,
        },
    )
    owner = embed if native else model
    embedding |= _native_positions(embed, name) if native else {"position_grid": tuple(embed.grid_size)}
    front = ImageTokenizer(
        dim,
        patch=tuple(embed.patch_size),
        positions="none" if owner.pos_embed is None else "learned",
        class_token=owner.cls_token is not None,
        registers=model.num_prefix_tokens - (owner.cls_token is not None),
        size=None if native else embed.img_size,
        preprocess=ImagePreprocess(**dict(preprocess) | ({"resize": "full"} if native else {})),
        embedding=PatchEmbedConfig(bias=embed.proj.bias is not None, **embedding),
        **settings,
    )
    weights = _weights(model, embed, owner, rope)
    distilled = isinstance(model, deit.VisionTransformerDistilled)
    pool = "prefix" if distilled else _pool(model, name, cfg)
    if distilled:
        weights = _merge_heads(model, weights, name)
    pool_norm = not isinstance(model.fc_norm, nn.Identity)
    return ImageTower(front, trunk, pool, pool_norm, mapping.rename(weights, NAMES, name))


_NONE = (nn.Identity, type(None))


def _check_supported(model: nn.Module, embed: nn.Module, name: str) -> None:
    """Raise an error for variants that have the same weight names but other computations."""
    from timm.layers import Attention, GluMlp, Mlp, PatchEmbed, SwiGLU
    from timm.models import eva, naflexvit, vision_transformer

    blocks = (vision_transformer.Block, eva.EvaBlock)
    _check_types([embed], (PatchEmbed, naflexvit.NaFlexEmbeds), name)
    _check_types(model.blocks, blocks, name)
    _check_types([b.attn for b in model.blocks], (Attention, eva.EvaAttention), name)
    _check_types([b.mlp for b in model.blocks], (Mlp, GluMlp, SwiGLU), name)
    for mlp in (b.mlp for b in model.blocks if type(b.mlp) is not Mlp):
        if getattr(mlp, "gate_last", False) or not isinstance(mlp.act, nn.SiLU):
            raise InputError(f"{name}: a gated MLP other than SwiGLU is not supported")
    heads = {(b.attn.head_dim, b.attn.num_heads) for b in model.blocks}
    if len(heads) != 1 or any(width * count != model.embed_dim for width, count in heads):
        raise InputError(f"{name}: heads (width, count) {sorted(heads)} are not equal or do not add up")
    channels = getattr(embed, "in_chans", None) or embed.proj.in_channels
    if channels != 3:
        raise InputError(f"{name}: images of {channels} channels, expected 3")
    if embed.dynamic_img_pad:
        raise InputError(
            f"{name}: dynamic_img_pad pads with grey, ImageTokenizer repeats the edge: turn it off"
        )


def _native_positions(embed: nn.Module, name: str) -> dict[str, Any]:
    """Position table and interpolation of a `NaFlexVit`, as fields of `PatchEmbedConfig`."""
    if embed.norm_input is not None or not isinstance(embed.norm, nn.Identity):
        raise InputError(f"{name}: a norm in the patch embedding is not supported")
    if embed.pos_embed_type == "none":
        return {}
    modes = {
        ("bicubic", False): "bicubic",
        ("bilinear", False): "bilinear",
        ("bicubic", True): "bicubic_aspect",
    }
    mode = modes.get((embed.pos_embed_interp_mode, embed.pos_embed_ar_preserving))
    unsupported = (
        embed.pos_embed_align_corners or embed.pos_embed_use_grid_sample or not embed.pos_embed_antialias
    )
    if embed.pos_embed_type != "learned" or unsupported or mode is None:
        raise InputError(
            f"{name}: {embed.pos_embed_type} positions interpolated this way are not supported; learned ones with "
            "anti-aliasing, bicubic or bilinear, are"
        )
    return {"position_grid": tuple(embed.pos_embed_grid_size), "interpolation": mode}


def _check_types(modules: Iterable[nn.Module], allowed: tuple[type, ...], name: str) -> None:
    kinds = {type(m) for m in modules}
    if len(kinds) != 1 or not kinds <= set(allowed):
        listed = " and ".join(sorted(k.__name__ for k in kinds)) or "none"
        raise InputError(f"{name}: {listed}, expected one of {[k.__name__ for k in allowed]}")


def _rope(rope: nn.Module | None, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of `Transformer`, fields of `PatchEmbedConfig`) that rotate as this does."""
    if rope is None:
        return {}, {}
    kind = type(rope).__name__
    settings = {"rope_theta": float(rope.temperature or 0)}
    standard = not rope.grid_offset and rope.grid_indexing == "ij"
    if kind == "RotaryEmbeddingCat" and standard and not rope.in_pixels and rope.grid_type in (None, "index"):
        return settings, {"span": tuple(rope.ref_feat_shape)} if rope.ref_feat_shape else {}
    if (
        kind == "RotaryEmbeddingDinoV3"
        and standard
        and rope.normalize_coords == "separate"
        and not rope.min_period
    ):
        # coordinates of every image run from -1 to 1, times 2 pi
        return settings, {"span": 4 * math.pi, "centred": True}
    raise InputError(
        f"{name}: RoPE of type {kind} with these settings is not supported; EVA-02's and DINOv3's are"
    )


def _pool(model: nn.Module, name: str, cfg: Mapping[str, Any]) -> str | AttentionPool:
    how, prefix = model.global_pool, model.num_prefix_tokens
    include_prefix = getattr(model, "pool_include_prefix", False)
    if how == "token":
        return "first"
    if how == "avg":
        return "patches" if prefix and not include_prefix else "mean"
    pool = model.attn_pool
    if (
        how != "map"
        or type(pool).__name__ != "AttentionPoolLatent"
        or pool.pool != "token"
        or pool.latent_len != 1
    ):
        raise InputError(f"{name}: pooling {how!r} is not supported; 'token', 'avg' and 'map' are")
    activation = mapping.activation_name(pool.mlp.act, name)
    skip = 0 if include_prefix else prefix
    hidden = pool.mlp.fc1.out_features
    return AttentionPool(model.embed_dim, pool.num_heads, hidden, activation=activation, skip=skip, **cfg)


def _weights(
    model: nn.Module, embed: nn.Module, owner: nn.Module, rope: nn.Module | None
) -> dict[str, Tensor]:
    """timm's state dict with positions and prefix tokens separated, and q, k, v in one projection."""
    weights = {k.removeprefix("embeds."): v for k, v in model.state_dict().items()}
    if embed is owner:  # NaFlexVit
        weights |= {f"patch_embed.{k}": weights.pop(k) for k in ("proj.weight", "proj.bias") if k in weights}
    proj = weights["patch_embed.proj.weight"]
    if proj.ndim == 2 and embed.channels_last:  # channels last there, channels first here
        proj = proj.unflatten(1, (*embed.patch_size, 3)).permute(0, 3, 1, 2)
    weights["patch_embed.proj.weight"] = proj.flatten(1)
    tokens = [weights.pop(k) for k in ("cls_token", "dist_token", "reg_token") if k in weights]
    prefix = torch.cat(tokens, 1) if tokens else None
    if "pos_embed" in weights:
        table = weights.pop("pos_embed")
        if embed is owner:
            weights["positions"] = table[0]
        else:
            if prefix is not None and not model.no_embed_class:
                n = prefix.shape[1]
                prefix, table = prefix + table[:, :n], table[:, n:]
            weights["positions"] = table.reshape(*embed.grid_size, -1)
    if owner.cls_token is not None:
        weights["class_token"] = prefix[:, :1]
    if prefix is not None and prefix.shape[1] > (owner.cls_token is not None):
        weights["registers"] = prefix[:, owner.cls_token is not None :]
    if "attn_pool.latent" in weights:
        weights["attn_pool.latent"] = weights["attn_pool.latent"][0]
    for key in [k for k in weights if k.endswith((".q_bias", ".q_proj.bias"))]:
        # EVA learns no bias for keys; some models have a buffer for it
        part = ".q_bias" if key.endswith(".q_bias") else ".q_proj.bias"
        prefix_name = key.removesuffix(part)
        q, v = weights.pop(key), weights.pop(prefix_name + part.replace("q", "v"))
        k = getattr(model.get_submodule(prefix_name), "k_bias", None)
        weights[f"{prefix_name}.qkv.bias"] = torch.cat([q, torch.zeros_like(q) if k is None else k, v])
    weights = mapping.concatenate(weights, JOINED)
    if rope is not None and not rope.rotate_half:
        for key, value in weights.items():
            if ".attn.qkv." in key:
                q, k, v = value.chunk(3)
                heads = model.blocks[0].attn.num_heads
                weights[key] = torch.cat([_deinterleave(q, heads), _deinterleave(k, heads), v])
            elif ".attn.q_norm." in key or ".attn.k_norm." in key:
                weights[key] = _deinterleave(value, 1)
    return weights


def _merge_heads(model: nn.Module, weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The mean of a distilled DeiT's two heads as one linear layer of both tokens."""
    unsupported = model.reg_token is not None or not isinstance(model.fc_norm, nn.Identity)
    if not model.num_classes or model.no_embed_class or unsupported:
        raise InputError(
            f"{name}: a distilled model without classes, or with no_embed_class, registers or fc_norm, is not supported"
        )
    weights = dict(weights)
    for part, join in (("weight", lambda a, b: torch.cat([a, b], 1)), ("bias", lambda a, b: a + b)):
        weights[f"head.{part}"] = join(weights.pop(f"head.{part}"), weights.pop(f"head_dist.{part}")) / 2
    return weights


def _deinterleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder channels from RoPE over the pairs (2i, 2i + 1) to the pairs (i, i + half) of our trunk.

    Queries and keys are reordered alike, so their products stay.
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
