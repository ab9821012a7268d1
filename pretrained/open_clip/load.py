"""open_clip's models as `CLIP`: both towers, the common space, preprocessing and vocabulary.

Image towers: open_clip's own ViT (OpenAI's CLIP, LAION's, with GELU or QuickGELU) and timm's ViT inside open_clip
(SigLIP). Text towers: open_clip's own, with CLIP's vocabulary or that of a Hugging Face tokenizer. A text is read at its
own length where padding cannot change the answer (causal reading, pooled at the end token), which is most of the speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from worldtokens.backbone.pooling import AttentionPool
from worldtokens.backbone.transformer import Transformer
from worldtokens.errors import InputError
from worldtokens.pretrained import mapping
from worldtokens.pretrained.timm.vit import read_vit
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
PICTURE = BLOCKS | {
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
LOWER = "_clean_lower"  # of CLIP's own vocabulary
CLEAN = {LOWER: "clip", "_clean_whitespace": "whitespace", "_clean_canonicalize": "canonicalize"}


def from_open_clip(
    source: str | Path | nn.Module,
    pretrained: str | None = None,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
) -> CLIP:
    """A model of open_clip as a `CLIP` with equal embeddings, its preprocessing and vocabulary included.

    Args:
        source: a published name (``"ViT-B-32-quickgelu"``, ``"hf-hub:..."``), a folder with an
            `open_clip_config.json` and weights, or a live model of open_clip.
        pretrained: for a name: which weights, a tag (``"openai"``, downloaded) or a file. None: random ones.
        tokenizer: what `open_clip.get_tokenizer` gives. None: looked up by name or folder; CLIP's for a live model.
        options: what `open_clip.create_model` takes beside these, e.g. ``{"force_image_size": 336}``.

    Returns:
        The model in eval mode, on the CPU, float32; columns ``"image"`` and ``"text"``. A model with a logit bias learns
        by SigLIP's loss, any other by CLIP's.

    Raises:
        InputError: the source cannot be found, or is an architecture, a setting or a weight that is not supported; named.
    """
    model, name = _open(source, pretrained, dict(options or {}))
    from open_clip.model import CLIP as Plain
    from open_clip.model import CustomTextCLIP

    if type(model) not in (Plain, CustomTextCLIP):
        raise InputError(
            f"{name} is open_clip's {type(model).__name__}; supported are CLIP and CustomTextCLIP"
        )
    if tokenizer is None and not isinstance(source, nn.Module):
        tokenizer = _tokenizer(name)
    image, image_pool, projection, weights = _picture(model.visual, name)
    text, text_pool, text_projection, dim, text_weights = _text(model, tokenizer, name)
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
        places = {"front.": "tokenizers", "trunk.": "trunk", "pool.": "pools", "head.": "projections"}
        out |= mapping.placed(found, {k: f"{v}.{column}." for k, v in places.items()})
    mapping.fill(ours, out, name)
    return ours.eval()


def _open(
    source: str | Path | nn.Module, pretrained: str | None, options: dict[str, Any]
) -> tuple[nn.Module, str]:
    """A live model of open_clip, and what to call it in errors."""
    if isinstance(source, nn.Module):
        return source, type(source).__name__
    import open_clip

    name, path = str(source), Path(source)
    if path.is_file():
        raise InputError(
            f"{path} is a file of weights alone: name its model, from_open_clip('ViT-B-32', {name!r})"
        )
    if path.is_dir():
        name, options = f"local-dir:{path}", {"require_pretrained": True, **options}
    weights = Path(pretrained) if pretrained is not None else None
    from_file = weights is not None and weights.is_file()
    try:
        model = open_clip.create_model(name, None if from_file else pretrained, **options)
        if from_file:
            open_clip.load_checkpoint(model, str(weights))
    except (RuntimeError, TypeError, ValueError, OSError, KeyError, AssertionError) as e:
        raise InputError(f"open_clip cannot make {name!r} with pretrained={pretrained!r}: {e}") from e
    return model, name


def _tokenizer(name: str) -> Any:
    import open_clip

    try:
        return open_clip.get_tokenizer(name)
    except Exception as e:  # whatever a download raises
        raise InputError(
            f"the vocabulary of {name!r} cannot be had ({e}): give tokenizer=, made by open_clip.get_tokenizer"
        ) from e


# ---- images ----------------------------------------------------------------------------------------------


def _picture(visual: nn.Module, name: str) -> tuple[tuple, str | AttentionPool, str, dict[str, Tensor]]:
    """((front-end, trunk), pool, projection, weights) of an image tower."""
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

    look, resize = _look(visual, name)
    if type(visual) is TimmModel:
        return _picture_timm(visual, name, look, resize)
    if type(visual) is not VisionTransformer:
        raise InputError(f"{name}: image tower {type(visual).__name__} is not supported; ViTs are")
    if visual.attn_pool is not None or visual.pool_type not in ("tok", "avg"):
        raise InputError(f"{name}: attentional pooling of CoCa is not supported")
    if visual.final_ln_after_pool and visual.pool_type == "avg":
        raise InputError(f"{name}: a norm behind average pooling (CLIPA) is not supported")
    if visual.proj is None:
        raise InputError(f"{name}: the image tower has no projection")
    norms = {k: m for k, m in visual.named_modules() if k.rpartition(".")[2].startswith("ln_")}
    trunk = _trunk(visual, norms, name)
    front = ImageTokenizer(
        visual.conv1.out_channels,
        patch=tuple(visual.patch_size),
        class_token=True,
        embedding=PatchEmbedConfig(bias=False, position_grid=tuple(visual.grid_size)),
        preprocess=ImagePreprocess(**resize),
        **look,
    )
    weights = dict(visual.state_dict())
    weights["conv1.weight"] = weights["conv1.weight"].flatten(1)
    table = weights.pop("positional_embedding")
    # the class token's own position is added into it: only their sum is ever read
    weights["class_token"] = (weights.pop("class_embedding") + table[0])[None, None]
    weights["positions"] = table[1:].reshape(*visual.grid_size, -1)
    weights["proj"] = weights["proj"].T
    pool = "first" if visual.pool_type == "tok" else "patches"
    return (front, trunk), pool, "linear", mapping.rename(weights, PICTURE, f"{name}.visual")


def _picture_timm(visual: nn.Module, name: str, look: dict[str, Any], resize: dict[str, Any]) -> tuple:
    if type(visual.trunk).__name__ == "NaFlexVit":
        raise InputError(f"{name}: a NaFlexVit inside open_clip is not supported; from_timm takes it alone")
    # timm's tower knows its own size
    tower = read_vit(visual.trunk, name, {k: v for k, v in look.items() if k != "size"}, resize)
    if tower.pool_norm:
        raise InputError(f"{name}: a norm behind pooling (fc_norm) in an image tower is not supported")
    layers = dict(visual.head.named_children())
    projection = layers.get("proj") or visual.trunk.head
    if set(layers) - {"drop", "proj"}:
        raise InputError(f"{name}: the projection {sorted(layers)} is not supported, a linear one is")
    weights, kind = dict(tower.weights), "none"
    if isinstance(projection, nn.Linear):
        kind = "linear" if projection.bias is None else "bias"
        weights |= {f"head.{k}": v for k, v in projection.state_dict().items()}
    return (tower.front, tower.trunk), tower.pool, kind, weights


def _look(visual: nn.Module, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of `ImageTokenizer`, fields of `ImagePreprocess`) of the model's preprocessing."""
    cfg = getattr(visual, "preprocess_cfg", None) or {}
    mode, size = cfg.get("resize_mode", "shortest"), cfg.get("size", visual.image_size)
    if mode not in RESIZE:
        raise InputError(f"{name}: resize_mode {mode!r}, expected 'shortest' or 'squash'")
    if cfg.get("mode", "RGB") != "RGB":
        raise InputError(f"{name}: images in mode {cfg['mode']}, expected RGB")
    interpolation = cfg.get("interpolation", "bicubic")
    look = {
        "size": size if isinstance(size, int) else tuple(size),
        "mean": tuple(cfg.get("mean", CLIP_MEAN)),
        "std": tuple(cfg.get("std", CLIP_STD)),
    }
    return look, {
        "interpolation": "bilinear" if interpolation == "bilinear" else "bicubic",  # "random" means this too
        "resize": RESIZE[mode],
        "draft": False,
    }


# ---- text --------------------------------------------------------------------------------------------------


def _text(model: nn.Module, tokenizer: Any, name: str) -> tuple:
    """((front-end, trunk), pool, projection, width of the common space, weights) of a text tower."""
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
    # padding is read where reading is not causal, and pooled at where the last place is
    fill = how == "last" or not causal
    front = _words(tower, tokenizer, causal, fill, name)
    clip = not isinstance(tokenizer, HFTokenizer)  # its end token has the largest id
    right = {
        "first": True,
        "last": True,
        "argmax": clip and not fill,
        "eos": eos == front.end_id and not fill,
    }
    if not right.get(how):
        raise InputError(f"{name}: text pooled by {how!r} is not supported with this vocabulary and reading")
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


def _words(tower: nn.Module, tokenizer: Any, causal: bool, fill: bool, name: str) -> TextTokenizer:
    """The text front-end with the model's own vocabulary."""
    from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

    vocab, dim = tower.token_embedding.weight.shape
    context = len(tower.positional_embedding)
    if isinstance(tokenizer, HFTokenizer):
        hf = tokenizer.tokenizer
        normalize = CLEAN.get(getattr(tokenizer.clean_fn, "__name__", ""))
        if tokenizer.strip_sep_token or tokenizer.tokenizer_mode or normalize is None or not hf.is_fast:
            raise InputError(f"{name}: this form of Hugging Face tokenizer is not supported")
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
        pad_to_context=fill,
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
    norm = mapping.norm_of(norms, name)
    return Transformer(
        first.ln_1.normalized_shape[0],
        len(blocks),
        first.attn.num_heads,
        activation=mapping.activation_of(first.mlp.gelu, name),
        norm=norm["norm"],
        config={
            "mlp_dim": first.mlp.c_fc.out_features,
            "eps": norm["eps"],
            "layer_scale": None if isinstance(first.ls_1, nn.Identity) else 1.0,
            "first_norm": "ln_pre" in norms,
        },
    )
