"""BERT's family as `Encoder`: BERT, MiniLM, RoBERTa, XLM-R, DistilBERT, and sentence-transformers' folders of them.

All are post-norm blocks behind a normed sum of word, place and part vectors. RoBERTa counts places from its padding id
+ 1; the rows before are never read by text and are not carried. A BERT's pooler (a map and tanh of the first token) is its
vector, unless a sentence-transformers folder tells another way: then its pooling, map and unit length are taken, as
that library does, and the pooler, which it does not read either, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worldtokens.backbone.transformer import Transformer
from worldtokens.pretrained import mapping
from worldtokens.pretrained.hf.source import Source, numbers
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
# names that TensorFlow's first checkpoints brought along
OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# class -> the prefix of its trunk, and of its own head, which an Encoder has no place for
CLASSES = {
    "bert": {"BertModel": None, "BertForMaskedLM": "cls", "BertForPreTraining": "cls"},
    "roberta": {"RobertaModel": None, "RobertaForMaskedLM": "lm_head"},
    "xlm-roberta": {"XLMRobertaModel": None, "XLMRobertaForMaskedLM": "lm_head"},
    "distilbert": {"DistilBertModel": None, "DistilBertForMaskedLM": "vocab_"},
}
PREFIX = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "distilbert": "distilbert."}
EXPECTED = {
    "position_embedding_type": ("absolute", None),  # gone since transformers 5; 4 knew relative ones too
    "is_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": ({}, None),
    "embedding_size": None,  # a factorised table, ELECTRA's
    "sinusoidal_pos_embds": (False, True),  # DistilBERT: how its table was filled, saved either way
}
# what a config.json that tells only what differs leaves out
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
POOLINGS = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
ACTIVATIONS = {"Tanh": "tanh", "Identity": None}


def convert(config: Mapping[str, Any], weights: dict[str, Tensor], source: Source) -> Encoder:
    """An `Encoder` of text with the numbers of this BERT, RoBERTa, XLM-R or DistilBERT."""
    kind = config["model_type"]
    config = DEFAULTS[kind] | config
    head = source.architecture_of(CLASSES[kind])
    source.expect(config, EXPECTED)
    weights = _plain(weights, PREFIX[kind], source)
    own = [k for k in weights if head and k.startswith(head)]
    if own:
        raise source.refuse(
            f"its head {own[:3]} has no place in an Encoder: leave it out, ignore=['{head}*']"
        )
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
    places, counted = config["max_position_embeddings"], kind in ("roberta", "xlm-roberta")
    if counted:
        before = config["pad_token_id"] + 1
        places -= before
        table = "embeddings.position_embeddings.weight"
        if table in weights:  # what is absent is told by `fill`
            weights[table] = weights[table][before:]
    steps = _steps(source)
    front = PairTokenizer(
        **_words(config, source),
        dim=dim,
        context=min(places, steps.get("context") or places),
        max_positions=places,
        token_types=0 if distil else config["type_vocab_size"],
        pair="roberta" if counted else "bert",
        num_embeddings=config["vocab_size"],
    )
    pooler = {k for k in weights if k.startswith("pooler.")}
    if steps:
        weights = {k: v for k, v in weights.items() if k not in pooler} | steps["weights"]
        how = {k: steps[k] for k in ("pool", "dim", "bias", "activation", "normalize")}
    elif pooler:
        how = {"pool": "first", "dim": dim, "activation": "tanh"}
    else:
        how = {"pool": "mean"}
    model = Encoder(front, trunk, **how)
    table = (DISTIL if distil else BERT) | {"head.*": "head.*"}
    mapping.fill(model, mapping.rename(mapping.join(weights, JOINED), table, source.name), source.name)
    return model


def _plain(weights: Mapping[str, Tensor], prefix: str, source: Source) -> dict[str, Tensor]:
    """Weights without the class's own prefix, under today's names; counting buffers are checked and left out."""
    out = {}
    for key, value in weights.items():
        key = key.removeprefix(prefix)
        for old, new in OLD.items():
            key = key.removesuffix(old) + new if key.endswith(old) else key
        if key == "embeddings.position_ids":
            if not torch.equal(value.flatten().long(), torch.arange(value.numel())):
                raise source.refuse("its position_ids do not count from 0")
            continue
        out[key] = value
    return out


def _words(config: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Vocabulary and frame, as arguments of a text front-end."""
    vocabulary = source.vocabulary
    pad = config.get("pad_token_id")
    if vocabulary is None:
        return {"vocabulary": numbers(config["vocab_size"]), "pad": None if pad is None else str(pad)}
    size = max(vocabulary.get_vocab().values()) + 1
    if size > config["vocab_size"]:
        raise source.refuse(f"{config['vocab_size']} token embeddings, but {size} tokens in the vocabulary")
    lower = getattr(vocabulary.normalizer, "lowercase", None)
    told = (source.read("tokenizer_config.json") or {}).get("do_lower_case", lower)
    if source.tokenizer is None and lower is not None and told != lower:
        raise source.refuse(
            f"tokenizer_config.json says do_lower_case={told}, tokenizer.json lowercase={lower}: give the one that is "
            "meant as tokenizer="
        )
    start, end = start_and_end(vocabulary)
    return {
        "vocabulary": vocabulary,
        "start": start,
        "end": end,
        "pad": None if pad is None else vocabulary.id_to_token(pad),
    }


def _steps(source: Source) -> dict[str, Any]:
    """What a sentence-transformers folder does behind the trunk, as arguments of `Encoder`; {} where it is not one."""
    listed = source.read("modules.json")
    pooling = source.read("1_Pooling/config.json")
    if listed is None and pooling is None:
        return {}
    steps: dict[str, Any] = {"dim": None, "bias": True, "activation": None, "normalize": False, "weights": {}}
    if listed is None:
        return steps | {"pool": _pooling(pooling, source)}
    kinds = [m["type"].rpartition(".")[2] for m in listed]
    for path in (m["path"] for m in listed):
        if path and Path(path).name != path:  # a folder from elsewhere must not reach other files
            raise source.refuse(f"modules.json names {path!r}, expected a folder inside")
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in (
        [],
        ["Dense"],
        ["Normalize"],
        ["Dense", "Normalize"],
    ):
        raise source.refuse(
            f"modules.json lists {kinds}; Transformer, Pooling, then Dense, Normalize are supported"
        )
    steps["pool"] = _pooling(source.read(f"{listed[1]['path']}/config.json") or {}, source)
    steps["normalize"] = "Normalize" in kinds
    if "Dense" in kinds:
        steps |= _dense(listed[2]["path"], source)
    limits = source.read("sentence_bert_config.json") or {}
    source.expect(limits, {"do_lower_case": False})
    steps["context"] = limits.get("max_seq_length")
    source.expect(source.read("config_sentence_transformers.json") or {}, {"default_prompt_name": None})
    return steps


def _pooling(config: Mapping[str, Any], source: Source) -> str:
    asked = [k for k, v in config.items() if k.startswith("pooling_mode_") and v]
    if len(asked) != 1 or asked[0] not in POOLINGS:
        raise source.refuse(f"pooling by {asked} is not supported; one of {', '.join(POOLINGS)} is")
    return POOLINGS[asked[0]]


def _dense(path: str, source: Source) -> dict[str, Any]:
    config = source.read(f"{path}/config.json") or {}
    activation = str(config.get("activation_function")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise source.refuse(f"{path}: activation {activation}, expected one of {', '.join(ACTIVATIONS)}")
    file = next(
        (f for f in ("model.safetensors", "pytorch_model.bin") if (source.folder / path / f).is_file()), None
    )
    if file is None:
        raise source.refuse(f"{path} has no weights")
    weights = mapping.read_weights(source.folder / path / file)
    table = {"linear.*": "head.*"}
    return {
        "dim": config["out_features"],
        "bias": config["bias"],
        "activation": ACTIVATIONS[activation],
        "weights": mapping.rename(weights, table, f"{source.name}/{path}"),
    }
