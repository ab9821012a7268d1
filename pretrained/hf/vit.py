"""Hugging Face's ViT (Dosovitskiy 2020): with its head a `Classifier`, without it an `Encoder` of the pooler's output.

The class token and its position embedding are added into one parameter, since only their sum is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from worldtokens.backbone.transformer import Transformer
from worldtokens.pretrained import mapping
from worldtokens.pretrained.hf.preprocess import patch_grid, preprocess_settings, split_positions
from worldtokens.pretrained.hf.source import Source
from worldtokens.tasks.classification.model import Classifier
from worldtokens.tasks.embedding.model import Encoder
from worldtokens.tokenizers.image.tokenizer import ImageTokenizer

BLOCK = "trunk.blocks.*"
NAMES = {
    "embeddings.patch_embeddings.projection.*": "front.proj.*",
    "class_token": "front.class_token",
    "positions": "front.pos_embed",
    "layers.*.layernorm_before.*": f"{BLOCK}.norm1.*",
    "layers.*.attention.qkv.*": f"{BLOCK}.attn.qkv.*",
    "layers.*.attention.o_proj.*": f"{BLOCK}.attn.proj.*",
    "layers.*.layernorm_after.*": f"{BLOCK}.norm2.*",
    "layers.*.mlp.fc1.*": f"{BLOCK}.mlp.fc1.*",
    "layers.*.mlp.fc2.*": f"{BLOCK}.mlp.fc2.*",
    # names in files, and in transformers before 5
    "encoder.layer.*.layernorm_before.*": f"{BLOCK}.norm1.*",
    "encoder.layer.*.attention.qkv.*": f"{BLOCK}.attn.qkv.*",
    "encoder.layer.*.attention.output.dense.*": f"{BLOCK}.attn.proj.*",
    "encoder.layer.*.layernorm_after.*": f"{BLOCK}.norm2.*",
    "encoder.layer.*.intermediate.dense.*": f"{BLOCK}.mlp.fc1.*",
    "encoder.layer.*.output.dense.*": f"{BLOCK}.mlp.fc2.*",
    "layernorm.*": "trunk.norm.*",
    "pooler.dense.*": "head.*",
    "classifier.*": "head.*",
}
JOINED = {
    f"{prefix}.qkv.{kind}": tuple(f"{inner.format(p)}.{kind}" for p in parts)
    for kind in ("weight", "bias")
    for prefix, inner, parts in (
        ("layers.*.attention", "layers.*.attention.{}_proj", "qkv"),
        ("encoder.layer.*.attention", "encoder.layer.*.attention.attention.{}", ("query", "key", "value")),
    )
}
CLASSES = {"ViTModel": False, "ViTForImageClassification": True}
EXPECTED = {"num_channels": 3, "pooler_act": "tanh"}
DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
}


def convert(config: Mapping[str, Any], weights: dict[str, Tensor], source: Source) -> Classifier | Encoder:
    """Convert ViT to a `Classifier` or an `Encoder` of images."""
    config = DEFAULTS | config
    has_head = source.lookup_architecture(CLASSES)
    source.expect(config, EXPECTED)
    weights = {k.removeprefix("vit."): v for k, v in weights.items()}
    dim = config["hidden_size"]
    patch, rows = patch_grid(config)
    trunk = Transformer(
        dim,
        config["num_hidden_layers"],
        config["num_attention_heads"],
        activation=source.activation(config["hidden_act"]),
        config={"mlp_dim": config["intermediate_size"], "eps": config["layer_norm_eps"]},
    )
    front = ImageTokenizer(
        dim,
        patch,
        class_token=True,
        **preprocess_settings(source, "vit", config["image_size"], position_grid=rows),
    )
    table, first = (
        weights.pop("embeddings.position_embeddings", None),
        weights.pop("embeddings.cls_token", None),
    )
    if table is not None and first is not None:  # `load_weights` reports a missing one
        class_position, weights["positions"] = split_positions(table[0], rows, source)
        weights["class_token"] = first + class_position
    projection = "embeddings.patch_embeddings.projection.weight"
    if projection in weights:
        weights[projection] = weights[projection].flatten(1)
    weights = mapping.rename(mapping.concatenate(weights, JOINED), NAMES, source.name)
    if has_head:
        model = Classifier(front, trunk, _classes(config, weights), "first")
        prefixes = {"front.": "tokenizers.image."}
    else:
        pooled = "head.weight" in weights
        width = config.get("pooler_output_size") or dim
        how = {"dim": width, "activation": "tanh"} if pooled else {}
        model, prefixes = Encoder(front, trunk, "first", **how), {"front.": "tokenizer."}
    mapping.load_weights(model, mapping.replace_prefixes(weights, prefixes), source.name)
    return model


def _classes(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> list[str] | int:
    """Class names, made unique, or the number of classes."""
    count = len(weights["head.weight"]) if "head.weight" in weights else 2
    labels = {int(k): str(v) for k, v in (config.get("id2label") or {}).items()}
    names = [labels.get(i, f"LABEL_{i}") for i in range(count)]
    if all(n == f"LABEL_{i}" for i, n in enumerate(names)):
        return count
    # ImageNet has two classes "crane" and two "maillot"
    return [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names)]
