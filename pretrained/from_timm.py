"""timm's Vision Transformers as front-end, trunk and head: the same numbers from the same weights.

Two families: `VisionTransformer` (ViT, DeiT, DINOv2, SigLIP's picture tower, CLIP's in timm's clothes) and `Eva` (EVA-02:
rotary positions, SwiGLU with a norm inside). A class token's and the registers' own positions are added into them, since
both are learned and only their sum is ever read; nothing else of the weights changes but names and order.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from worldtokens.backbone.pooling import AttentionPool
from worldtokens.backbone.transformer import Transformer
from worldtokens.errors import InputError
from worldtokens.parts import load_strictly
from worldtokens.pretrained import mapping
from worldtokens.tasks.classification import Classifier
from worldtokens.tokenizers.image import ImageTokenizer

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
RESIZE = {"center": "crop", "squash": "squash"}


@dataclasses.dataclass
class Picture:
    """A picture tower in our parts, and its weights under the names that `NAMES` gives them."""

    front: ImageTokenizer
    trunk: Transformer
    pool: str | AttentionPool
    pool_norm: bool
    weights: dict[str, Tensor]


def from_timm(
    source: str | Path | nn.Module,
    pretrained: bool = False,
    architecture: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Classifier:
    """A ViT of timm as a `Classifier` with equal outputs, its preprocessing included.

    Args:
        source: a published name (``"vit_small_patch16_224.augreg_in21k"``, ``"hf-hub:..."``), a folder that timm saved,
            a file of weights, or a live model of timm.
        pretrained: for a name: download its weights. False: random ones, without network.
        architecture: for a file: the name that it belongs to.
        options: what `timm.create_model` takes beside the name, e.g. ``{"img_size": 384}``; the classes of a file are
            counted from its head.

    Returns:
        The model in eval mode, on the CPU, float32. A model of timm without head gives one with ``classes=0``. Dropout
        isn't carried, stochastic depth is.

    Raises:
        InputError: the source can't be found, or is an architecture, a setting or a weight that isn't supported; named.
    """
    model, name = _open(source, pretrained, architecture, dict(options or {}))
    import timm

    data = timm.data.resolve_data_config(model=model)
    try:
        mode = RESIZE[data["crop_mode"]]
    except KeyError:
        raise InputError(f"{name}: crop_mode {data['crop_mode']!r}, expected 'center' or 'squash'") from None
    look = {k: data[k] for k in ("mean", "std", "interpolation")}
    tower = read_vit(model, name, {**look, "crop": data["crop_pct"], "resize": mode})
    cfg = getattr(model, "pretrained_cfg", None) or {}
    named = cfg.get("label_names") if hasattr(cfg, "get") else None
    classes = list(named) if named and len(named) == model.num_classes else model.num_classes
    ours = Classifier(tower.front, tower.trunk, classes, tower.pool, tower.pool_norm)
    places = {"front.": "tokenizers.image."}
    mapping.fill(ours, placed(tower.weights, places), name)
    return ours.eval()


def _open(
    source: str | Path | nn.Module, pretrained: bool, architecture: str | None, options: dict[str, Any]
) -> tuple[nn.Module, str]:
    """A live model of timm, and what to call it in errors."""
    import timm

    if isinstance(source, nn.Module):
        return source, type(source).__name__
    path = Path(source)
    if path.is_file():
        if architecture is None:
            raise InputError(f"{path} is a file of weights alone: name its model with architecture=")
        weights = mapping.read_weights(path)
        if "head.weight" in weights:
            options.setdefault("num_classes", len(weights["head.weight"]))
        model = _create(timm, architecture, options, False)
        load_strictly(model, weights, str(path))
        return model, str(path)
    if path.is_dir():
        return _create(timm, f"local-dir:{path}", options, True), str(path)
    return _create(timm, str(source), options, pretrained), str(source)


def _create(timm: Any, name: str, options: dict[str, Any], pretrained: bool) -> nn.Module:
    if ":" not in name and not timm.is_model(name.partition(".")[0]):
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        raise InputError(f"timm has no model {name!r}, and there is no such file or folder; near it: {near}")
    try:
        return timm.create_model(name, pretrained=pretrained, **options)
    except (RuntimeError, TypeError, ValueError, OSError, KeyError, AssertionError) as e:
        raise InputError(f"timm can't make {name!r} with {options}: {e}") from e


def placed(weights: Mapping[str, Tensor], places: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights under the names that they have in a task: each beginning exchanged as told."""
    out = {}
    for key, value in weights.items():
        begin = next((p for p in places if key.startswith(p)), "")
        out[places.get(begin, "") + key.removeprefix(begin)] = value
    return out


def read_vit(model: nn.Module, name: str, look: Mapping[str, Any]) -> Picture:
    """A `VisionTransformer` or `Eva` of timm in our parts.

    Args:
        model: the live model.
        name: what to call it in errors.
        look: arguments of `ImageTokenizer` that tell how a picture is prepared.

    Raises:
        InputError: a variant that isn't supported.
    """
    from timm.models import eva, vision_transformer

    eva_like = type(model) is eva.Eva
    if not eva_like and type(model) is not vision_transformer.VisionTransformer:
        raise InputError(
            f"{name} is timm's {type(model).__name__}; supported are VisionTransformer and Eva (EVA-02)"
        )
    _known(model, name)
    embed, dim = model.patch_embed, model.embed_dim
    first, rope = model.blocks[0], getattr(model, "rope", None)
    norms = {
        k: m for k, m in model.named_modules() if "norm" in k.rpartition(".")[2] and list(m.parameters())
    }
    cfg = mapping.norm_of(norms, name)
    gated = type(first.mlp).__name__ in ("GluMlp", "SwiGLU")
    activation = "swiglu" if gated else mapping.activation_of(first.mlp.act, name)
    scaled = first.gamma_1 is not None if eva_like else not isinstance(first.ls1, nn.Identity)
    trunk = Transformer(
        dim,
        len(model.blocks),
        first.attn.num_heads,
        hidden=first.mlp.fc2.in_features,
        activation=activation,
        qk_norm=not isinstance(first.attn.q_norm, nn.Identity),
        layer_scale=1.0 if scaled else None,
        drop_path=getattr(model.blocks[-1].drop_path1, "drop_prob", None) or 0.0,
        first_norm=not isinstance(model.norm_pre, nn.Identity),
        final_norm=not isinstance(model.norm, nn.Identity),
        mlp_norm=not isinstance(getattr(first.mlp, "norm", nn.Identity()), nn.Identity),
        **_rope(rope, name),
        **cfg,
    )
    registers = model.num_prefix_tokens - (model.cls_token is not None)
    front = ImageTokenizer(
        dim,
        patch=tuple(embed.patch_size),
        size=tuple(embed.img_size),
        positions="none" if model.pos_embed is None else "learned",
        position_grid=tuple(embed.grid_size),
        class_token=model.cls_token is not None,
        registers=registers,
        bias=embed.proj.bias is not None,
        span=getattr(rope, "ref_feat_shape", None) and tuple(rope.ref_feat_shape),
        draft=False,
        **{k: tuple(v) if isinstance(v, list) else v for k, v in look.items()},
    )
    return Picture(
        front,
        trunk,
        _pool(model, name, cfg),
        not isinstance(model.fc_norm, nn.Identity),
        mapping.rename(_weights(model, rope), NAMES, name),
    )


def _known(model: nn.Module, name: str) -> None:
    """Refuse variants that have the usual weights and other arithmetic."""
    from timm.layers import Attention, GluMlp, Mlp, PatchEmbed, SwiGLU
    from timm.models import eva, vision_transformer

    blocks = (vision_transformer.Block, eva.EvaBlock)
    _one_kind([model.patch_embed], (PatchEmbed,), name)
    _one_kind(model.blocks, blocks, name)
    _one_kind([b.attn for b in model.blocks], (Attention, eva.EvaAttention), name)
    _one_kind([b.mlp for b in model.blocks], (Mlp, GluMlp, SwiGLU), name)
    for mlp in (b.mlp for b in model.blocks if type(b.mlp) is not Mlp):
        if getattr(mlp, "gate_last", False) or not isinstance(mlp.act, nn.SiLU):
            raise InputError(f"{name}: a gated feed-forward other than SwiGLU isn't supported")
    heads = {(b.attn.head_dim, b.attn.num_heads) for b in model.blocks}
    if len(heads) != 1 or any(width * count != model.embed_dim for width, count in heads):
        raise InputError(f"{name}: heads (width, count) {sorted(heads)} aren't equal or don't add up")
    if model.patch_embed.proj.in_channels != 3:
        raise InputError(f"{name}: pictures of {model.patch_embed.proj.in_channels} channels, expected 3")
    if model.patch_embed.dynamic_img_pad:
        raise InputError(
            f"{name}: dynamic_img_pad fills with grey, ImageTokenizer repeats the edge: turn it off"
        )


def _one_kind(modules: Iterable[nn.Module], allowed: tuple[type, ...], name: str) -> None:
    kinds = {type(m) for m in modules}
    if len(kinds) != 1 or not kinds <= set(allowed):
        told = " and ".join(sorted(k.__name__ for k in kinds)) or "none"
        raise InputError(f"{name}: {told}, expected one of {[k.__name__ for k in allowed]}")


def _rope(rope: nn.Module | None, name: str) -> dict[str, Any]:
    if rope is None:
        return {}
    kind = type(rope).__name__
    plain = kind == "RotaryEmbeddingCat" and not rope.in_pixels and rope.grid_type in (None, "index")
    if not plain or rope.grid_offset or rope.grid_indexing != "ij":
        raise InputError(f"{name}: rotary positions {kind} of this form aren't supported, EVA-02's are")
    return {"rope": 2, "rope_theta": float(rope.temperature)}


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
        raise InputError(f"{name}: pooling {how!r} isn't supported; 'token', 'avg' and 'map' are")
    activation = mapping.activation_of(pool.mlp.act, name)
    skip = 0 if all_read else before
    hidden = pool.mlp.fc1.out_features
    return AttentionPool(model.embed_dim, pool.num_heads, hidden, activation=activation, skip=skip, **cfg)


def _weights(model: nn.Module, rope: nn.Module | None) -> dict[str, Tensor]:
    """Their state dict with positions and prefix told apart, and q, k, v in one map."""
    weights = dict(model.state_dict())
    weights["patch_embed.proj.weight"] = weights["patch_embed.proj.weight"].flatten(1)
    before = [weights.pop(k) for k in ("cls_token", "reg_token") if k in weights]
    prefix = torch.cat(before, 1) if before else None
    if "pos_embed" in weights:
        table = weights.pop("pos_embed")
        if prefix is not None and not model.no_embed_class:
            n = prefix.shape[1]
            prefix, table = prefix + table[:, :n], table[:, n:]
        weights["positions"] = table.reshape(*model.patch_embed.grid_size, -1)
    if model.cls_token is not None:
        weights["class_token"] = prefix[:, :1]
    if prefix is not None and prefix.shape[1] > (model.cls_token is not None):
        weights["registers"] = prefix[:, model.cls_token is not None :]
    if "attn_pool.latent" in weights:
        weights["attn_pool.latent"] = weights["attn_pool.latent"][0]
    for key in [k for k in weights if k.endswith((".q_bias", ".q_proj.bias"))]:
        # EVA's keys have no bias
        part = ".q_bias" if key.endswith(".q_bias") else ".q_proj.bias"
        begin = key.removesuffix(part)
        q, v = weights.pop(key), weights.pop(begin + part.replace("q", "v"))
        weights[f"{begin}.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
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


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Channels that rotary positions turn in pairs (2i, 2i + 1) -> pairs (i, i + half), as our trunk turns them.

    Queries and keys change alike, so their products don't.
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
