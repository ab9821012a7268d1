"""timm's Vision Transformers in our parts: front-end, trunk, pooling, and the weights under our names.

Four classes: `VisionTransformer` (ViT, DeiT, DINOv2, SigLIP's image tower, CLIP's in timm's clothes), DeiT's with a
distillation token, `Eva` (EVA-02, DINOv3: rotary positions, SwiGLU) and `NaFlexVit` (native aspect). A class token's and
the registers' own positions are added into them, since both are learned and only their sum is ever read; the two heads of a
distilled DeiT, whose answers are averaged, become one that reads both tokens. Nothing else of the weights changes but names
and order.
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
from worldtokens.tokenizers.image.tokenizer import ImageTokenizer

# theirs -> ours, the same for both families; `front` is the front-end, `norm` stands behind pooling
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
    "attn_pool.latent": "pool.latent",
    "attn_pool.q.*": "pool.read.q.*",
    "attn_pool.kv.*": "pool.read.kv.*",
    "attn_pool.proj.*": "pool.read.proj.*",
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
class Picture:
    """An image tower in our parts, and its weights under the names that `NAMES` gives them."""

    front: ImageTokenizer
    trunk: Transformer
    pool: str | AttentionPool
    pool_norm: bool
    weights: dict[str, Tensor]


def read_vit(model: nn.Module, name: str, look: Mapping[str, Any]) -> Picture:
    """A ViT of timm in our parts.

    Args:
        model: the live model.
        name: what to call it in errors.
        look: arguments of `ImageTokenizer` that tell how an image is prepared; for a `NaFlexVit` with `max_tokens`.

    Raises:
        InputError: a variant that is not supported.
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
    _known(model, embed, name)
    dim, first, rope = model.embed_dim, model.blocks[0], getattr(model, "rope", None)
    norms = {
        k: m for k, m in model.named_modules() if "norm" in k.rpartition(".")[2] and list(m.parameters())
    }
    cfg = mapping.norm_of(norms, name)
    gated = type(first.mlp).__name__ in ("GluMlp", "SwiGLU")
    scaled = getattr(first, "gamma_1", None) is not None or not isinstance(getattr(first, "ls1", None), _NONE)
    turned, placed = _rope(rope, name)
    trunk = Transformer(
        dim,
        len(model.blocks),
        first.attn.num_heads,
        hidden=first.mlp.fc2.in_features,
        activation="swiglu" if gated else mapping.activation_of(first.mlp.act, name),
        qk_norm=not isinstance(first.attn.q_norm, nn.Identity),
        layer_scale=1.0 if scaled else None,
        drop_path=getattr(model.blocks[-1].drop_path1, "drop_prob", None) or 0.0,
        first_norm=not isinstance(model.norm_pre, nn.Identity),
        final_norm=not isinstance(model.norm, nn.Identity),
        mlp_norm=not isinstance(getattr(first.mlp, "norm", nn.Identity()), nn.Identity),
        **turned,
        **cfg,
    )
    owner = embed if native else model
    front = ImageTokenizer(
        dim,
        patch=tuple(embed.patch_size),
        positions="none" if owner.pos_embed is None else "learned",
        class_token=owner.cls_token is not None,
        registers=model.num_prefix_tokens - (owner.cls_token is not None),
        bias=embed.proj.bias is not None,
        draft=False,
        **placed,
        **(_native(embed, name) if native else {"size": embed.img_size, "position_grid": embed.grid_size}),
        **{k: tuple(v) if isinstance(v, list) else v for k, v in look.items()},
    )
    weights = _weights(model, embed, owner, rope)
    distilled = isinstance(model, deit.VisionTransformerDistilled)
    pool = "prefix" if distilled else _pool(model, name, cfg)
    if distilled:
        weights = _one_head(model, weights, name)
    pool_norm = not isinstance(model.fc_norm, nn.Identity)
    return Picture(front, trunk, pool, pool_norm, mapping.rename(weights, NAMES, name))


_NONE = (nn.Identity, type(None))


def _known(model: nn.Module, embed: nn.Module, name: str) -> None:
    """Refuse variants that have the usual weights and other arithmetic."""
    from timm.layers import Attention, GluMlp, Mlp, PatchEmbed, SwiGLU
    from timm.models import eva, naflexvit, vision_transformer

    blocks = (vision_transformer.Block, eva.EvaBlock)
    _one_kind([embed], (PatchEmbed, naflexvit.NaFlexEmbeds), name)
    _one_kind(model.blocks, blocks, name)
    _one_kind([b.attn for b in model.blocks], (Attention, eva.EvaAttention), name)
    _one_kind([b.mlp for b in model.blocks], (Mlp, GluMlp, SwiGLU), name)
    for mlp in (b.mlp for b in model.blocks if type(b.mlp) is not Mlp):
        if getattr(mlp, "gate_last", False) or not isinstance(mlp.act, nn.SiLU):
            raise InputError(f"{name}: a gated feed-forward other than SwiGLU is not supported")
    heads = {(b.attn.head_dim, b.attn.num_heads) for b in model.blocks}
    if len(heads) != 1 or any(width * count != model.embed_dim for width, count in heads):
        raise InputError(f"{name}: heads (width, count) {sorted(heads)} are not equal or do not add up")
    channels = getattr(embed, "in_chans", None) or embed.proj.in_channels
    if channels != 3:
        raise InputError(f"{name}: images of {channels} channels, expected 3")
    if embed.dynamic_img_pad:
        raise InputError(
            f"{name}: dynamic_img_pad fills with grey, ImageTokenizer repeats the edge: turn it off"
        )


def _native(embed: nn.Module, name: str) -> dict[str, Any]:
    """How a `NaFlexVit` lays out images of any aspect, as arguments of `ImageTokenizer`."""
    if embed.norm_input is not None or not isinstance(embed.norm, nn.Identity):
        raise InputError(f"{name}: a norm in the patch embedding is not supported")
    out: dict[str, Any] = {"size": None, "resize": "full"}
    if embed.pos_embed_type == "none":
        return out
    ways = {
        ("bicubic", False): "bicubic",
        ("bilinear", False): "bilinear",
        ("bicubic", True): "bicubic_square",
    }
    way = ways.get((embed.pos_embed_interp_mode, embed.pos_embed_ar_preserving))
    other = embed.pos_embed_align_corners or embed.pos_embed_use_grid_sample or not embed.pos_embed_antialias
    if embed.pos_embed_type != "learned" or other or way is None:
        raise InputError(
            f"{name}: {embed.pos_embed_type} positions stretched this way are not supported; learned ones with "
            "anti-aliasing, bicubic or bilinear, are"
        )
    return out | {"position_grid": tuple(embed.pos_embed_grid_size), "stretch": way}


def _one_kind(modules: Iterable[nn.Module], allowed: tuple[type, ...], name: str) -> None:
    kinds = {type(m) for m in modules}
    if len(kinds) != 1 or not kinds <= set(allowed):
        told = " and ".join(sorted(k.__name__ for k in kinds)) or "none"
        raise InputError(f"{name}: {told}, expected one of {[k.__name__ for k in allowed]}")


def _rope(rope: nn.Module | None, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of `Transformer`, arguments of `ImageTokenizer`) that turn as this does."""
    if rope is None:
        return {}, {}
    kind = type(rope).__name__
    turned = {"rope": 2, "rope_theta": float(rope.temperature or 0)}
    straight = not rope.grid_offset and rope.grid_indexing == "ij"
    if kind == "RotaryEmbeddingCat" and straight and not rope.in_pixels and rope.grid_type in (None, "index"):
        return turned, {"span": tuple(rope.ref_feat_shape)} if rope.ref_feat_shape else {}
    if (
        kind == "RotaryEmbeddingDinoV3"
        and straight
        and rope.normalize_coords == "separate"
        and not rope.min_period
    ):
        # every image reaches from -1 to 1 in whole turns
        return turned, {"span": 4 * math.pi, "centred": True}
    raise InputError(
        f"{name}: rotary positions {kind} of this form are not supported, EVA-02's and DINOv3's are"
    )


def _pool(model: nn.Module, name: str, cfg: Mapping[str, Any]) -> str | AttentionPool:
    how, before = model.global_pool, model.num_prefix_tokens
    all_read = getattr(model, "pool_include_prefix", False)
    if how == "token":
        return "first"
    if how == "avg":
        return "patches" if before and not all_read else "mean"
    pool = model.attn_pool
    if (
        how != "map"
        or type(pool).__name__ != "AttentionPoolLatent"
        or pool.pool != "token"
        or pool.latent_len != 1
    ):
        raise InputError(f"{name}: pooling {how!r} is not supported; 'token', 'avg' and 'map' are")
    activation = mapping.activation_of(pool.mlp.act, name)
    skip = 0 if all_read else before
    hidden = pool.mlp.fc1.out_features
    return AttentionPool(model.embed_dim, pool.num_heads, hidden, activation=activation, skip=skip, **cfg)


def _weights(
    model: nn.Module, embed: nn.Module, owner: nn.Module, rope: nn.Module | None
) -> dict[str, Tensor]:
    """Their state dict with positions and prefix told apart, and q, k, v in one map."""
    weights = {k.removeprefix("embeds."): v for k, v in model.state_dict().items()}
    if embed is owner:  # NaFlexVit
        weights |= {f"patch_embed.{k}": weights.pop(k) for k in ("proj.weight", "proj.bias") if k in weights}
    proj = weights["patch_embed.proj.weight"]
    if proj.ndim == 2 and embed.channels_last:  # a patch's colours lie together there, its pixels here
        proj = proj.unflatten(1, (*embed.patch_size, 3)).permute(0, 3, 1, 2)
    weights["patch_embed.proj.weight"] = proj.flatten(1)
    before = [weights.pop(k) for k in ("cls_token", "dist_token", "reg_token") if k in weights]
    prefix = torch.cat(before, 1) if before else None
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
        # EVA's keys have no bias that is learned; where it has a buffer for one, that is read too
        part = ".q_bias" if key.endswith(".q_bias") else ".q_proj.bias"
        begin = key.removesuffix(part)
        q, v = weights.pop(key), weights.pop(begin + part.replace("q", "v"))
        k = getattr(model.get_submodule(begin), "k_bias", None)
        weights[f"{begin}.qkv.bias"] = torch.cat([q, torch.zeros_like(q) if k is None else k, v])
    weights = mapping.join(weights, JOINED)
    if rope is not None and not rope.rotate_half:
        for key, value in weights.items():
            if ".attn.qkv." in key:
                q, k, v = value.chunk(3)
                heads = model.blocks[0].attn.num_heads
                weights[key] = torch.cat([_halves(q, heads), _halves(k, heads), v])
            elif ".attn.q_norm." in key or ".attn.k_norm." in key:
                weights[key] = _halves(value, 1)
    return weights


def _one_head(model: nn.Module, weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The mean of a distilled DeiT's two answers as one linear map of both tokens."""
    odd = model.reg_token is not None or not isinstance(model.fc_norm, nn.Identity)
    if not model.num_classes or model.no_embed_class or odd:
        raise InputError(
            f"{name}: a distilled model without classes, or with no_embed_class, registers or fc_norm, is not supported"
        )
    weights = dict(weights)
    for part, join in (("weight", lambda a, b: torch.cat([a, b], 1)), ("bias", lambda a, b: a + b)):
        weights[f"head.{part}"] = join(weights.pop(f"head.{part}"), weights.pop(f"head_dist.{part}")) / 2
    return weights


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Channels that rotary positions turn in pairs (2i, 2i + 1) -> pairs (i, i + half), as our trunk turns them.

    Queries and keys change alike, so their products do not.
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
