"""BERT, MiniLM, RoBERTa, XLM-R and DistilBERT as `Encoder`, and sentence-transformers folders of them.

All are post-norm blocks after a normalised sum of token, position and token type embeddings. RoBERTa counts positions
from its padding id + 1; the unused rows before are dropped. The embedding of a text is BERT's pooler (linear layer and tanh
of the first token). A sentence-transformers folder defines its own pooling, projection and normalisation instead; the
pooler, which that library ignores, is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from worldtokens.backbone.transformer import Transformer
from worldtokens.pretrained import mapping
from worldtokens.pretrained.hf import sentence_transformers
from worldtokens.pretrained.hf.source import Source, numeric_vocabulary
from worldtokens.tasks.embedding.model import Encoder
from worldtokens.tokenizers.text.pairs import PairTokenizer
from worldtokens.tokenizers.text.vocabulary import start_and_end

BERT = {
    "embeddings.word_embeddings.weight": "tokenizer.embedding.weight",
    "embeddings.position_embeddings.weight": "tokenizer.pos_embed",
    "embeddings.token_type_embeddings.weight": "tokenizer.type_embedding.weight",
    "embeddings.LayerNorm.*": "trunk.first_norm.*",
    "encoder.layer.*.attention.self.qkv.*": "trunk.blocks.*.attn.qkv.*",
    "encoder.layer.*.attention.output.dense.*": "trunk.blocks.*.attn.proj.*",
    "encoder.layer.*.attention.output.LayerNorm.*": "trunk.blocks.*.norm1.*",
    "encoder.layer.*.intermediate.dense.*": "trunk.blocks.*.mlp.fc1.*",
    "encoder.layer.*.output.dense.*": "trunk.blocks.*.mlp.fc2.*",
    "encoder.layer.*.output.LayerNorm.*": "trunk.blocks.*.norm2.*",
    "pooler.dense.*": "head.*",
}
DISTIL = {
    "embeddings.word_embeddings.weight": "tokenizer.embedding.weight",
    "embeddings.position_embeddings.weight": "tokenizer.pos_embed",
    "embeddings.LayerNorm.*": "trunk.first_norm.*",
    "transformer.layer.*.attention.qkv.*": "trunk.blocks.*.attn.qkv.*",
    "transformer.layer.*.attention.out_lin.*": "trunk.blocks.*.attn.proj.*",
    "transformer.layer.*.sa_layer_norm.*": "trunk.blocks.*.norm1.*",
    "transformer.layer.*.ffn.lin1.*": "trunk.blocks.*.mlp.fc1.*",
    "transformer.layer.*.ffn.lin2.*": "trunk.blocks.*.mlp.fc2.*",
    "transformer.layer.*.output_layer_norm.*": "trunk.blocks.*.norm2.*",
}
JOINED = {
    f"encoder.layer.*.attention.self.qkv.{kind}": tuple(
        f"encoder.layer.*.attention.self.{p}.{kind}" for p in ("query", "key", "value")
    )
    for kind in ("weight", "bias")
} | {
    f"transformer.layer.*.attention.qkv.{kind}": tuple(
        f"transformer.layer.*.attention.{p}_lin.{kind}" for p in "qkv"
    )
    for kind in ("weight", "bias")
}
# names from the first TensorFlow checkpoints
OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# class -> prefix of its head, which an Encoder does not have
CLASSES = {
    "bert": {"BertModel": None, "BertForMaskedLM": "cls", "BertForPreTraining": "cls"},
    "roberta": {"RobertaModel": None, "RobertaForMaskedLM": "lm_head"},
    "xlm-roberta": {"XLMRobertaModel": None, "XLMRobertaForMaskedLM": "lm_head"},
    "distilbert": {"DistilBertModel": None, "DistilBertForMaskedLM": "vocab_"},
}
PREFIX = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "distilbert": "distilbert."}
EXPECTED = {
    "position_embedding_type": ("absolute", None),  # absent since transformers 5; 4 has relative ones too
    "is_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": ({}, None),
    "embedding_size": None,  # factorised embedding of ELECTRA
    "sinusoidal_pos_embds": (
        False,
        True,
    ),  # DistilBERT: initialisation of the position embeddings, which are saved either way
}
# defaults that a config.json omits
DEFAULTS = {
    "bert": {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    },
    "distilbert": {
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "n_layers": 6,
        "n_heads": 12,
        "dim": 768,
        "hidden_dim": 3072,
        "activation": "gelu",
        "pad_token_id": 0,
    },
}
DEFAULTS["roberta"] = DEFAULTS["bert"] | {"vocab_size": 50265, "pad_token_id": 1}
DEFAULTS["xlm-roberta"] = DEFAULTS["bert"] | {"pad_token_id": 1}


def convert(config: Mapping[str, Any], weights: dict[str, Tensor], source: Source) -> Encoder:
    """Convert BERT, RoBERTa, XLM-R or DistilBERT to an `Encoder`."""
    kind = config["model_type"]
    config = DEFAULTS[kind] | config
    head = source.lookup_architecture(CLASSES[kind])
    source.expect(config, EXPECTED)
    weights = _normalize_names(weights, PREFIX[kind], source)
    extra = [k for k in weights if head and k.startswith(head)]
    if extra:
        raise source.error(f"an Encoder has no head {extra[:3]}: drop it with ignore=['{head}*']")
    distil = kind == "distilbert"
    names = ("dim", "n_layers", "n_heads", "hidden_dim", "activation") if distil else (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    )  # fmt: skip
    dim, depth, heads, hidden, activation = (config[n] for n in names)
    trunk = Transformer(
        dim,
        depth,
        heads,
        activation=source.activation(activation),
        config={
            "mlp_dim": hidden,
            "eps": 1e-12 if distil else config["layer_norm_eps"],
            "pre_norm": False,
            "first_norm": True,
        },
    )
    positions, offset = config["max_position_embeddings"], kind in ("roberta", "xlm-roberta")
    if offset:
        first = config["pad_token_id"] + 1
        positions -= first
        table = "embeddings.position_embeddings.weight"
        if table in weights:  # `load_weights` reports a missing one
            weights[table] = weights[table][first:]
    pooling = sentence_transformers.settings(source)
    front = PairTokenizer(
        **_vocabulary_settings(config, source),
        dim=dim,
        context=min(positions, pooling.get("context") or positions),
        max_positions=positions,
        token_types=0 if distil else config["type_vocab_size"],
        pair="roberta" if offset else "bert",
        num_embeddings=config["vocab_size"],
    )
    pooler = {k for k in weights if k.startswith("pooler.")}
    if pooling:
        weights = {k: v for k, v in weights.items() if k not in pooler} | pooling["weights"]
        how = {k: pooling[k] for k in ("pool", "dim", "bias", "activation", "normalize")}
    elif pooler:
        how = {"pool": "first", "dim": dim, "activation": "tanh"}
    else:
        how = {"pool": "mean"}
    model = Encoder(front, trunk, **how)
    table = (DISTIL if distil else BERT) | {"head.*": "head.*"}
    mapping.load_weights(
        model, mapping.rename(mapping.concatenate(weights, JOINED), table, source.name), source.name
    )
    return model


def _normalize_names(weights: Mapping[str, Tensor], prefix: str, source: Source) -> dict[str, Tensor]:
    """Weights without the prefix of the class, under current names; position_ids buffers are checked and dropped."""
    out = {}
    for key, value in weights.items():
        key = key.removeprefix(prefix)
        for old, new in OLD.items():
            key = key.removesuffix(old) + new if key.endswith(old) else key
        if key == "embeddings.position_ids":
            if not torch.equal(value.flatten().long(), torch.arange(value.numel())):
                raise source.error("its position_ids do not count from 0")
            continue
        out[key] = value
    return out


def _vocabulary_settings(config: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Vocabulary, start, end and padding token as arguments of a text front-end."""
    vocabulary = source.vocabulary
    pad = config.get("pad_token_id")
    if vocabulary is None:
        return {
            "vocabulary": numeric_vocabulary(config["vocab_size"]),
            "pad": None if pad is None else str(pad),
        }
    size = max(vocabulary.get_vocab().values()) + 1
    if size > config["vocab_size"]:
        raise source.error(f"{config['vocab_size']} token embeddings, but {size} tokens in the vocabulary")
    lower = getattr(vocabulary.normalizer, "lowercase", None)
    declared = (source.read("tokenizer_config.json") or {}).get("do_lower_case", lower)
    if source.tokenizer is None and lower is not None and declared != lower:
        raise source.error(
            f"tokenizer_config.json has do_lower_case={declared}, tokenizer.json lowercase={lower}: give the correct one "
            "as tokenizer="
        )
    start, end = start_and_end(vocabulary)
    return {
        "vocabulary": vocabulary,
        "start": start,
        "end": end,
        "pad": None if pad is None else vocabulary.id_to_token(pad),
    }
