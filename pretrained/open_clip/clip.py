"""Conversion of open_clip's models to `CLIP`: both towers, projections, preprocessing and vocabulary.

Image towers: open_clip's ViT (OpenAI's CLIP, LAION's, with GELU or QuickGELU) and timm's ViT inside open_clip (SigLIP). Text
towers: open_clip's, with CLIP's vocabulary or a Hugging Face tokenizer. With causal attention and pooling at the end token,
padding cannot change the embedding, so texts are not padded to the context; this is most of the speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from worldtokens.backbone.pooling import AttentionPool
from worldtokens.backbone.transformer import Transformer
from worldtokens.errors import InputError
from worldtokens.pretrained import mapping
from worldtokens.pretrained.timm.vit import convert_vit
from worldtokens.tasks.contrastive.model import CLIP
from worldtokens.tokenizers.image.embedding import PatchEmbedConfig
from worldtokens.tokenizers.image.preprocess import ImagePreprocess
from worldtokens.tokenizers.image.tokenizer import CLIP_MEAN, CLIP_STD, ImageTokenizer
from worldtokens.tokenizers.text import clip_bpe
from worldtokens.tokenizers.text.tokenizer import TextTokenizer
from worldtokens.tokenizers.text.vocabulary import open_vocabulary, start_and_end

BLOCKS = {
    "transformer.resblocks.*.ln_1.*": "trunk.blocks.*.norm1.*",
    "transformer.resblocks.*.attn.in_proj_weight": "trunk.blocks.*.attn.qkv.weight",
    "transformer.resblocks.*.attn.in_proj_bias": "trunk.blocks.*.attn.qkv.bias",
    "transformer.resblocks.*.attn.out_proj.*": "trunk.blocks.*.attn.proj.*",
    "transformer.resblocks.*.ls_1.gamma": "trunk.blocks.*.scale1.gamma",
    "transformer.resblocks.*.ln_2.*": "trunk.blocks.*.norm2.*",
    "transformer.resblocks.*.mlp.c_fc.*": "trunk.blocks.*.mlp.fc1.*",
    "transformer.resblocks.*.mlp.c_proj.*": "trunk.blocks.*.mlp.fc2.*",
    "transformer.resblocks.*.ls_2.gamma": "trunk.blocks.*.scale2.gamma",
}
IMAGE = BLOCKS | {
    "conv1.weight": "front.proj.weight",
    "class_token": "front.class_token",
    "positions": "front.pos_embed",
    "ln_pre.*": "trunk.first_norm.*",
    "ln_post.*": "trunk.norm.*",
    "proj": "head.weight",
}
TEXT = BLOCKS | {
    "token_embedding.weight": "front.embedding.weight",
    "positional_embedding": "front.pos_embed",
    "ln_final.*": "trunk.norm.*",
    "text_projection": "head.weight",
    "text_projection.*": "head.*",
}
RESIZE = {"shortest": "crop", "squash": "squash"}
LOWER = "_clean_lower"  # clean function of CLIP's own tokenizer
NORMALIZERS = {LOWER: "clip", "_clean_whitespace": "whitespace", "_clean_canonicalize": "canonicalize"}


def convert_clip(model: nn.Module, tokenizer: Any, name: str) -> CLIP:
    """Convert a live CLIP or CustomTextCLIP of open_clip.

    Args:
        model: the live model.
        tokenizer: its tokenizer; None: CLIP's.
        name: name of the model, for errors.

    Raises:
        InputError: an architecture, setting or weight is not supported; named.
    """
    image, image_pool, projection, weights = _image_tower(model.visual, name)
    text, text_pool, text_projection, dim, text_weights = _text_tower(model, tokenizer, name)
    ours = CLIP(
        {"image": image[0], "text": text[0]},
        {"image": image[1], "text": text[1]},
        dim,
        {"image": image_pool, "text": text_pool},
        "clip" if model.logit_bias is None else "siglip",
        {"image": projection, "text": text_projection},
    )
    out = {"logit_scale": model.logit_scale.reshape(())}
    if model.logit_bias is not None:
        out["logit_bias"] = model.logit_bias.reshape(())
    for column, found in (("image", weights), ("text", text_weights)):
        prefixes = {"front.": "tokenizers", "trunk.": "trunk", "pool.": "pools", "head.": "projections"}
        out |= mapping.replace_prefixes(found, {k: f"{v}.{column}." for k, v in prefixes.items()})
    mapping.load_weights(ours, out, name)
    return ours


# ---- images ----------------------------------------------------------------------------------------------


def _image_tower(visual: nn.Module, name: str) -> tuple[tuple, str | AttentionPool, str, dict[str, Tensor]]:
    """((front-end, trunk), pool, projection, weights) of an image tower."""
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

    settings, preprocess = _preprocess_settings(visual, name)
    if type(visual) is TimmModel:
        return _timm_tower(visual, name, settings, preprocess)
    if type(visual) is not VisionTransformer:
        raise InputError(f"{name}: image tower {type(visual).__name__} is not supported; ViTs are")
    if visual.attn_pool is not None or visual.pool_type not in ("tok", "avg"):
        raise InputError(f"{name}: attentional pooling of CoCa is not supported")
    if visual.final_ln_after_pool and visual.pool_type == "avg":
        raise InputError(f"{name}: a norm after average pooling (CLIPA) is not supported")
    if visual.proj is None:
        raise InputError(f"{name}: the image tower has no projection")
    norms = {k: m for k, m in visual.named_modules() if k.rpartition(".")[2].startswith("ln_")}
    trunk = _trunk(visual, norms, name)
    front = ImageTokenizer(
        visual.conv1.out_channels,
        patch=tuple(visual.patch_size),
        class_token=True,
        embedding=PatchEmbedConfig(bias=False, position_grid=tuple(visual.grid_size)),
        preprocess=ImagePreprocess(**preprocess),
        **settings,
    )
    weights = dict(visual.state_dict())
    weights["conv1.weight"] = weights["conv1.weight"].flatten(1)
    table = weights.pop("positional_embedding")
    # class token and its position embedding become one parameter: only their sum is used
    weights["class_token"] = (weights.pop("class_embedding") + table[0])[None, None]
    weights["positions"] = table[1:].reshape(*visual.grid_size, -1)
    weights["proj"] = weights["proj"].T
    pool = "first" if visual.pool_type == "tok" else "patches"
    return (front, trunk), pool, "linear", mapping.rename(weights, IMAGE, f"{name}.visual")


def _timm_tower(visual: nn.Module, name: str, settings: dict[str, Any], preprocess: dict[str, Any]) -> tuple:
    if type(visual.trunk).__name__ == "NaFlexVit":
        raise InputError(f"{name}: a NaFlexVit inside open_clip is not supported; from_timm loads it alone")
    # the size is that of timm's model
    tower = convert_vit(visual.trunk, name, {k: v for k, v in settings.items() if k != "size"}, preprocess)
    if tower.pool_norm:
        raise InputError(f"{name}: a norm after pooling (fc_norm) in an image tower is not supported")
    layers = dict(visual.head.named_children())
    projection = layers.get("proj") or visual.trunk.head
    if set(layers) - {"drop", "proj"}:
        raise InputError(f"{name}: the projection {sorted(layers)} is not supported, a linear one is")
    weights, kind = dict(tower.weights), "none"
    if isinstance(projection, nn.Linear):
        kind = "linear" if projection.bias is None else "bias"
        weights |= {f"head.{k}": v for k, v in projection.state_dict().items()}
    return (tower.front, tower.trunk), tower.pool, kind, weights


def _preprocess_settings(visual: nn.Module, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of `ImageTokenizer`, fields of `ImagePreprocess`) of the model's preprocessing."""
    cfg = getattr(visual, "preprocess_cfg", None) or {}
    mode, size = cfg.get("resize_mode", "shortest"), cfg.get("size", visual.image_size)
    if mode not in RESIZE:
        raise InputError(f"{name}: resize_mode {mode!r}, expected 'shortest' or 'squash'")
    if cfg.get("mode", "RGB") != "RGB":
        raise InputError(f"{name}: images in mode {cfg['mode']}, expected RGB")
    interpolation = cfg.get("interpolation", "bicubic")
    settings = {
        "size": size if isinstance(size, int) else tuple(size),
        "mean": tuple(cfg.get("mean", CLIP_MEAN)),
        "std": tuple(cfg.get("std", CLIP_STD)),
    }
    return settings, {
        "interpolation": "bilinear" if interpolation == "bilinear" else "bicubic",  # also for "random"
        "resize": RESIZE[mode],
        "draft": False,
    }


# ---- text --------------------------------------------------------------------------------------------------


def _text_tower(model: nn.Module, tokenizer: Any, name: str) -> tuple:
    """((front-end, trunk), pool, projection, dim of the shared space, weights) of a text tower."""
    from open_clip.tokenizer import HFTokenizer
    from open_clip.transformer import TextTransformer

    tower = getattr(model, "text", None)
    if tower is not None and type(tower) is not TextTransformer:
        raise InputError(f"{name}: text tower {type(tower).__name__} is not supported; open_clip's own is")
    weights = dict((model if tower is None else tower).state_dict())
    if tower is None:
        own = ("visual.", "logit_")
        weights = {k: v for k, v in weights.items() if not k.startswith(own)}
        tower, how, eos = model, model.text_pool_type, model.text_eos_id
    else:
        how, eos = tower.pool_type, tower.eos_id
    causal = tower.attn_mask is not None
    # padding takes part in bidirectional attention, and in pooling at the last position
    pad_to_context = how == "last" or not causal
    front = _text_tokenizer(tower, tokenizer, causal, pad_to_context, name)
    clip = not isinstance(tokenizer, HFTokenizer)  # its end token has the largest id
    supported = {
        "first": True,
        "last": True,
        "argmax": clip and not pad_to_context,
        "eos": eos == front.end_id and not pad_to_context,
    }
    if not supported.get(how):
        raise InputError(
            f"{name}: text pooling {how!r} is not supported with this vocabulary and attention mask"
        )
    norms = {k: m for k, m in tower.transformer.named_modules() if k.rpartition(".")[2].startswith("ln_")}
    trunk = _trunk(tower, norms | {"ln_final": tower.ln_final}, name)
    projection, width = tower.text_projection, trunk.dim
    if projection is None:
        kind, dim = "none", width
    elif isinstance(projection, nn.Linear):
        kind, dim = "linear" if projection.bias is None else "bias", projection.out_features
    else:
        kind, dim = "linear", projection.shape[1]
        weights["text_projection"] = weights["text_projection"].T
    pool = "first" if how == "first" else "last"
    return (front, trunk), pool, kind, dim, mapping.rename(weights, TEXT, f"{name}.text")


def _text_tokenizer(
    tower: nn.Module, tokenizer: Any, causal: bool, pad_to_context: bool, name: str
) -> TextTokenizer:
    """The text front-end with the vocabulary of the model."""
    from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

    vocab, dim = tower.token_embedding.weight.shape
    context = len(tower.positional_embedding)
    if isinstance(tokenizer, HFTokenizer):
        hf = tokenizer.tokenizer
        normalize = NORMALIZERS.get(getattr(tokenizer.clean_fn, "__name__", ""))
        if tokenizer.strip_sep_token or tokenizer.tokenizer_mode or normalize is None or not hf.is_fast:
            raise InputError(f"{name}: this type of Hugging Face tokenizer is not supported")
        vocabulary, pad = open_vocabulary(hf.backend_tokenizer), hf.pad_token
        start, end = start_and_end(vocabulary)
    elif tokenizer is None or (type(tokenizer) is SimpleTokenizer and tokenizer.clean_fn.__name__ == LOWER):
        vocabulary, start, end, pad, normalize = "clip", clip_bpe.START, clip_bpe.END, None, "clip"
    else:
        raise InputError(f"{name}: tokenizer {type(tokenizer).__name__} is not supported")
    front = TextTokenizer(
        vocabulary,
        dim,
        context,
        causal,
        start=start,
        end=end,
        pad=pad,
        normalize=normalize,
        pad_to_context=pad_to_context,
    )
    if front.vocab_size != vocab:
        raise InputError(
            f"{name} has {vocab} token embeddings and the vocabulary {front.vocab_size}: give its own as tokenizer="
        )
    return front


# ---- both --------------------------------------------------------------------------------------------------


def _trunk(tower: nn.Module, norms: Mapping[str, nn.Module], name: str) -> Transformer:
    from open_clip.transformer import ResidualAttentionBlock

    blocks = tower.transformer.resblocks
    for block in blocks:
        if type(block) is not ResidualAttentionBlock:
            raise InputError(f"{name}: block {type(block).__name__} is not supported")
    first = blocks[0]
    norms = {k: m for k, m in norms.items() if not isinstance(m, nn.Identity)}
    norm = mapping.norm_settings(norms, name)
    return Transformer(
        first.ln_1.normalized_shape[0],
        len(blocks),
        first.attn.num_heads,
        activation=mapping.activation_name(first.mlp.gelu, name),
        norm=norm["norm"],
        config={
            "mlp_dim": first.mlp.c_fc.out_features,
            "eps": norm["eps"],
            "layer_scale": None if isinstance(first.ls_1, nn.Identity) else 1.0,
            "first_norm": "ln_pre" in norms,
        },
    )
