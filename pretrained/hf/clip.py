"""Hugging Face's CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023): two towers as `CLIP`, one alone as `Encoder`.

CLIP's texts are not padded, since padding after the end token cannot change the embedding; SigLIP's are padded to the
context, as in training. The class token and its position embedding are added into one parameter. All tokens of a CLIP
image tower pass the final norm, which transformers applies to the class token alone; the embeddings are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Regex, normalizers
from torch import Tensor

from worldtokens.backbone.pooling import AttentionPool
from worldtokens.backbone.transformer import Transformer
from worldtokens.pretrained import mapping
from worldtokens.pretrained.hf.preprocess import patch_grid, preprocess_settings, split_positions
from worldtokens.pretrained.hf.source import Source, numeric_vocabulary
from worldtokens.tasks.contrastive.model import CLIP
from worldtokens.tasks.embedding.model import Encoder
from worldtokens.tokenizers.image.tokenizer import ImageTokenizer
from worldtokens.tokenizers.text import clip_bpe
from worldtokens.tokenizers.text.tokenizer import TextTokenizer
from worldtokens.tokenizers.text.vocabulary import start_and_end

BLOCKS = {
    "encoder.layers.*.layer_norm1.*": "trunk.blocks.*.norm1.*",
    "encoder.layers.*.self_attn.qkv.*": "trunk.blocks.*.attn.qkv.*",
    "encoder.layers.*.self_attn.out_proj.*": "trunk.blocks.*.attn.proj.*",
    "encoder.layers.*.layer_norm2.*": "trunk.blocks.*.norm2.*",
    "encoder.layers.*.mlp.fc1.*": "trunk.blocks.*.mlp.fc1.*",
    "encoder.layers.*.mlp.fc2.*": "trunk.blocks.*.mlp.fc2.*",
}
TEXT = BLOCKS | {
    "embeddings.token_embedding.weight": "front.embedding.weight",
    "embeddings.position_embedding.weight": "front.pos_embed",
    "final_layer_norm.*": "trunk.norm.*",
    "text_projection.weight": "head.weight",
    "head.*": "head.*",
}
VISION = BLOCKS | {
    "embeddings.patch_embedding.*": "front.proj.*",
    "class_token": "front.class_token",
    "positions": "front.pos_embed",
    "pre_layrnorm.*": "trunk.first_norm.*",
    "post_layernorm.*": "trunk.norm.*",
    "visual_projection.weight": "head.weight",
    "head.probe": "pool.query",
    "head.q.*": "pool.attn.q.*",
    "head.kv.*": "pool.attn.kv.*",
    "head.attention.out_proj.*": "pool.attn.proj.*",
    "head.layernorm.*": "pool.norm.*",
    "head.mlp.fc1.*": "pool.mlp.fc1.*",
    "head.mlp.fc2.*": "pool.mlp.fc2.*",
}
JOINED = {
    f"encoder.layers.*.self_attn.qkv.{kind}": tuple(
        f"encoder.layers.*.self_attn.{p}_proj.{kind}" for p in "qkv"
    )
    for kind in ("weight", "bias")
}
# class -> (its towers, whether they have a projection)
CLASSES = {
    "clip": {"CLIPModel": ("both", True)},
    "clip_text_model": {"CLIPTextModel": ("text", False), "CLIPTextModelWithProjection": ("text", True)},
    "clip_vision_model": {
        "CLIPVisionModel": ("image", False),
        "CLIPVisionModelWithProjection": ("image", True),
    },
    "siglip": {"SiglipModel": ("both", True)},
    "siglip_text_model": {"SiglipTextModel": ("text", True)},
    "siglip_vision_model": {"SiglipVisionModel": ("image", True)},
}
EXPECTED = {"num_channels": 3, "vision_use_head": True}
COMMON = {"num_hidden_layers": 12, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
DEFAULTS = {
    ("clip", "text"): COMMON
    | {
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "projection_dim": 512,
        "bos_token_id": 49406,
        "eos_token_id": 49407,
    },
    ("clip", "image"): COMMON
    | {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
        "projection_dim": 512,
    },
}
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
DEFAULTS["siglip", "image"] = DEFAULTS["clip", "image"] | _SIGLIP | {"patch_size": 16}
DEFAULTS["siglip", "text"] = (
    DEFAULTS["clip", "text"]
    | _SIGLIP
    | {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
        "projection_size": None,
        "pad_token_id": 1,
    }
)


def convert(config: Mapping[str, Any], weights: dict[str, Tensor], source: Source) -> CLIP | Encoder:
    """Convert CLIP or SigLIP to a `CLIP` (both towers) or an `Encoder` (one)."""
    kind = config["model_type"]
    family = kind.partition("_")[0]
    towers, projects = source.lookup_architecture(CLASSES[kind])
    weights = {k: v for k, v in weights.items() if not _is_position_buffer(k, v, source)}
    if towers != "both":
        weights = {k.removeprefix("text_model.").removeprefix("vision_model."): v for k, v in weights.items()}
        tower = _text_tower if towers == "text" else _image_tower
        front, trunk, how, found = tower(config, weights, family, projects, source)
        model = Encoder(front, trunk, **how)
        prefixes = {"front.": "tokenizer."}
        mapping.load_weights(model, mapping.replace_prefixes(found, prefixes), source.name)
        return model
    configs = []
    for column, key in (("text", "text_config"), ("image", "vision_config")):
        tower_config, old = dict(config.get(key) or {}), config.get(f"{key}_dict")
        if old:  # an old form, which overrides with its defaults
            tower_config |= DEFAULTS[family, column] | old
        # CLIP's projection_dim is a setting of the whole model
        configs.append(tower_config | {"projection_dim": config.get("projection_dim", 512)})
    out = {k: weights.pop(k).reshape(()) for k in ("logit_scale", "logit_bias") if k in weights}
    text = _take_tower(weights, "text_model.", "text_projection.")
    image = _take_tower(weights, "vision_model.", "visual_projection.")
    mapping.rename(weights, {}, source.name)  # all weights are used
    t = _text_tower(configs[0], text, family, True, source)
    i = _image_tower(configs[1], image, family, True, source)
    kinds = {"text": _projection(t[2]), "image": _projection(i[2])}
    model = CLIP(
        {"image": i[0], "text": t[0]},
        {"image": i[1], "text": t[1]},
        t[2].get("dim") or i[1].dim,
        {"image": i[2]["pool"], "text": t[2]["pool"]},
        family,
        kinds,
    )
    for column, found in (("image", i[3]), ("text", t[3])):
        prefixes = {"front.": "tokenizers", "trunk.": "trunk", "pool.": "pools", "head.": "projections"}
        out |= mapping.replace_prefixes(found, {k: f"{v}.{column}." for k, v in prefixes.items()})
    mapping.load_weights(model, out, source.name)
    return model


def _take_tower(weights: dict[str, Tensor], tower: str, projection: str) -> dict[str, Tensor]:
    """Remove the weights of one tower and its projection from a dict; the tower's prefix is dropped."""
    keys = [k for k in weights if k.startswith((tower, projection))]
    return {k.removeprefix(tower): weights.pop(k) for k in keys}


def _is_position_buffer(key: str, value: Tensor, source: Source) -> bool:
    """Whether a weight is a position_ids buffer of an older file."""
    if not key.endswith("embeddings.position_ids"):
        return False
    if not torch.equal(value.flatten().long(), torch.arange(value.numel())):
        raise source.error(f"its {key} do not count from 0")
    return True


def _projection(how: Mapping[str, Any]) -> str:
    return "none" if how.get("dim") is None else "bias" if how["bias"] else "linear"


def _trunk(config: Mapping[str, Any], first_norm: bool, source: Source) -> Transformer:
    source.expect(config, EXPECTED)
    return Transformer(
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        activation=source.activation(config["hidden_act"]),
        config={
            "mlp_dim": config["intermediate_size"],
            "eps": config["layer_norm_eps"],
            "first_norm": first_norm,
        },
    )


# Each tower: (front-end, trunk, arguments of `Encoder`, weights)


def _text_tower(
    config: Mapping[str, Any], weights: dict[str, Tensor], family: str, projects: bool, source: Source
) -> tuple[TextTokenizer, Transformer, dict[str, Any], dict[str, Tensor]]:
    config = DEFAULTS[family, "text"] | config
    clip = family == "clip"
    front = TextTokenizer(
        dim=config["hidden_size"],
        context=config["max_position_embeddings"],
        causal=clip,
        pad_to_context=not clip,
        **_vocabulary_settings(config, family, source),
    )
    if front.vocab_size != config["vocab_size"]:
        raise source.error(
            f"{config['vocab_size']} token embeddings and {front.vocab_size} tokens in the vocabulary: give its own "
            "as tokenizer="
        )
    if clip:
        # transformers pools at the first end token, or, if an old config has 2, at the largest id
        end = config["eos_token_id"] if config["eos_token_id"] != 2 else config["vocab_size"] - 1
        if end != front.end_id:
            raise source.error(f"texts are pooled at token {end}, but their end token is {front.end_id}")
    how: dict[str, Any] = {"pool": "last"}
    if projects:
        width = config["projection_dim"] if clip else config["projection_size"] or config["hidden_size"]
        how |= {"dim": width, "bias": not clip}
    found = mapping.rename(mapping.concatenate(weights, JOINED), TEXT, f"{source.name} (text tower)")
    return front, _trunk(config, False, source), how, found


def _vocabulary_settings(config: Mapping[str, Any], family: str, source: Source) -> dict[str, Any]:
    """Vocabulary, start, end and padding token as arguments of `TextTokenizer`."""
    vocabulary, size = source.vocabulary, config["vocab_size"]
    if vocabulary is not None:
        start, end = start_and_end(vocabulary)
        pad = vocabulary.id_to_token(config["pad_token_id"]) if family == "siglip" else None
        return {"vocabulary": vocabulary, "start": start, "end": end, "pad": pad}
    if family == "clip" and size == 49408:
        vocabulary = clip_bpe.vocabulary()
        # the normalisation of transformers: without open_clip's ftfy
        steps = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        vocabulary.normalizer = normalizers.Sequence(steps)
        return {"vocabulary": vocabulary, "start": clip_bpe.START, "end": clip_bpe.END}
    out: dict[str, Any] = {"vocabulary": numeric_vocabulary(size)}
    if family == "siglip":
        return out | {"pad": str(config["pad_token_id"])}
    end = config["eos_token_id"] if config["eos_token_id"] != 2 else size - 1
    start = config["bos_token_id"]
    return out | {"start": str(start) if start is not None and start < size else None, "end": str(end)}


def _image_tower(
    config: Mapping[str, Any], weights: dict[str, Tensor], family: str, projects: bool, source: Source
) -> tuple[ImageTokenizer, Transformer, dict[str, Any], dict[str, Tensor]]:
    config = DEFAULTS[family, "image"] | config
    clip, dim = family == "clip", config["hidden_size"]
    patch, rows = patch_grid(config)
    front = ImageTokenizer(
        dim,
        patch,
        class_token=clip,
        **preprocess_settings(source, family, config["image_size"], position_grid=rows, bias=not clip),
    )
    trunk = _trunk(config, clip, source)
    weights = dict(weights)
    table = weights.pop("embeddings.position_embedding.weight", None)
    if table is not None:  # `load_weights` reports a missing one
        class_position, weights["positions"] = split_positions(table, rows, source)
        if "embeddings.class_embedding" in weights:
            weights["class_token"] = (weights.pop("embeddings.class_embedding") + class_position)[None, None]
    if "embeddings.patch_embedding.weight" in weights:
        weights["embeddings.patch_embedding.weight"] = weights["embeddings.patch_embedding.weight"].flatten(1)
    how: dict[str, Any] = {"pool": "first"}
    if clip and projects:
        how |= {"dim": config["projection_dim"], "bias": False}
    if not clip:
        how["pool"] = AttentionPool(
            dim,
            config["num_attention_heads"],
            config["intermediate_size"],
            eps=config["layer_norm_eps"],
            activation=source.activation(config["hidden_act"]),
        )
        for part in ("weight", "bias"):
            joined = weights.pop(f"head.attention.in_proj_{part}", None)
            if joined is not None:
                weights[f"head.q.{part}"], weights[f"head.kv.{part}"] = joined.split((dim, 2 * dim))
        if "head.probe" in weights:
            weights["head.probe"] = weights["head.probe"][0]
    return (
        front,
        trunk,
        how,
        mapping.rename(mapping.concatenate(weights, JOINED), VISION, f"{source.name} (image tower)"),
    )
