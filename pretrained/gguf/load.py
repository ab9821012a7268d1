"""Conversion of .gguf files, the format of llama.cpp and Ollama: Llama, Qwen2 and Qwen3.

A .gguf file holds settings, quantized weights, vocabulary and chat template. The settings become a Hugging Face config, and
`hf/decoders.py` builds the model. Each tensor is dequantized when it is copied into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worldtokens.backbone.positions import scale_frequencies
from worldtokens.pretrained.gguf.file import GGUFFile
from worldtokens.pretrained.gguf.vocabulary import read_vocabulary
from worldtokens.pretrained.hf.decoders import LLAMA, check_depth, llama
from worldtokens.pretrained.hf.source import Source
from worldtokens.tasks.language.model import LanguageModel

NAMES = {  # name in llama.cpp: name in transformers
    "token_embd.weight": "embed_tokens.weight",
    "blk.*.attn_norm.*": "layers.*.input_layernorm.*",
    "blk.*.attn_q.*": "layers.*.self_attn.q_proj.*",
    "blk.*.attn_k.*": "layers.*.self_attn.k_proj.*",
    "blk.*.attn_v.*": "layers.*.self_attn.v_proj.*",
    "blk.*.attn_q_norm.*": "layers.*.self_attn.q_norm.*",
    "blk.*.attn_k_norm.*": "layers.*.self_attn.k_norm.*",
    "blk.*.attn_output.*": "layers.*.self_attn.o_proj.*",
    "blk.*.ffn_norm.*": "layers.*.post_attention_layernorm.*",
    "blk.*.ffn_gate.*": "layers.*.mlp.gate_proj.*",
    "blk.*.ffn_up.*": "layers.*.mlp.up_proj.*",
    "blk.*.ffn_down.*": "layers.*.mlp.down_proj.*",
    "output_norm.*": "norm.*",
    "output.weight": "lm_head.weight",
}
TABLE = {name: LLAMA[theirs] for name, theirs in NAMES.items()}
SETTINGS = {  # name after "<architecture>.": name in config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
# settings that change the computation: any other value is an error
EXPECTED = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "rope.scaling.type": ("none",),
    "rope.scale_linear": (1.0,),
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
FREQUENCIES = "rope_freqs.weight"  # factor on each wavelength of RoPE


def from_gguf(path: str | Path, tokenizer: Any = None) -> LanguageModel:
    """A .gguf file as a `LanguageModel` in float32, eval mode.

    Args:
        path: path of the file.
        tokenizer: vocabulary instead of the file's, as in `from_hf`.

    Raises:
        InputError: the file is damaged or truncated; or an architecture, vocabulary, setting or tensor is missing or not
            supported; named.
    """
    file = GGUFFile(path)
    kind = file.metadata.get("general.architecture")
    source = Source(str(path), str(kind))
    if kind not in ARCHITECTURES:
        raise source.error(f"this architecture is not supported, {', '.join(ARCHITECTURES)} are")
    config = config_from_metadata(file, source)
    _check_shapes(file, config, source)
    return llama(
        config, _weights(file, config), read_vocabulary(file, source, tokenizer), source, TABLE
    ).eval()


def config_from_metadata(file: GGUFFile, source: Source) -> dict[str, Any]:
    """The header's metadata as a Hugging Face config."""
    kind = file.metadata["general.architecture"]

    def metadata(name: str) -> Any:
        return file.metadata.get(f"{kind}.{name}")

    for name, allowed in EXPECTED.items():
        if metadata(name) is not None and metadata(name) not in allowed:
            raise source.error(f"{kind}.{name}={metadata(name)!r} is not supported, {allowed[0]!r} is")
    config: dict[str, Any] = {"model_type": kind}
    for table in (SETTINGS, OPTIONAL):
        for name, ours in table.items():
            if metadata(name) is not None:
                config[ours] = metadata(name)
            elif table is SETTINGS:
                raise source.error(f"the header lacks {kind}.{name}")
    numbers = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    for name in (*numbers, "num_key_value_heads"):
        if name in config and (not isinstance(config[name], int) or config[name] < 1):
            raise source.error(f"{name} is {config[name]!r}, expected one whole number for all layers")
    if "token_embd.weight" not in file.tensors:
        raise source.error("missing token_embd.weight")
    # the header's vocab_size is optional, the embedding is not
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rotated = metadata("rope.dimension_count")
    if rotated is not None and rotated != config["head_dim"]:
        raise source.error(
            f"RoPE that rotates {rotated} of {config['head_dim']} channels is not supported: all channels are"
        )
    config["attention_bias"] = kind != "qwen2" and "blk.0.attn_output.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if FREQUENCIES in file.tensors:
        config["rope_parameters"] = _scaling(file.tensor(FREQUENCIES), config, source)
    return config


def _check_shapes(file: GGUFFile, config: dict[str, Any], source: Source) -> None:
    """Check that the header's sizes and the tensors' shapes agree, before the model is built."""
    check_depth(file, "blk.", config["num_hidden_layers"], source)
    dim, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv = config.get("num_key_value_heads", heads)
    shapes = {
        "token_embd.weight": (config["vocab_size"], dim),
        "blk.0.ffn_gate.weight": (inner, dim),
        "blk.0.attn_q.weight": (heads * config["head_dim"], dim),
        "blk.0.attn_k.weight": (kv * config["head_dim"], dim),
    }
    for name, shape in shapes.items():
        if name not in file.tensors:
            raise source.error(f"missing {name}")
        if file.tensors[name].shape != shape:
            raise source.error(f"{name} is {file.tensors[name].shape}, expected {shape} by the header")


def _scaling(factors: Tensor, config: dict[str, Any], source: Source) -> dict[str, Any]:
    """RoPE settings of Llama 3.1, recovered from the factors that llama.cpp computes, and checked against them."""
    pairs = config["head_dim"] // 2
    freq = 1.0 / config.get("rope_theta", 10000.0) ** (torch.arange(pairs) / pairs)
    scaling = (float(factors.max()), 1.0, 4.0, 8192.0)
    matches = factors.shape == freq.shape and torch.allclose(
        freq / scale_frequencies(freq, scaling), factors, rtol=1e-3
    )
    if not matches:
        raise source.error(f"{FREQUENCIES} is not Llama 3.1's (low 1, high 4, original length 8,192)")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_type": "llama3", **dict(zip(names, scaling, strict=True))}


def _weights(file: GGUFFile, config: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Pairs of a name and a function that makes the tensor, for each weight of the file."""
    heads = {".attn_q.": config["num_attention_heads"]}
    heads[".attn_k."] = config.get("num_key_value_heads", config["num_attention_heads"])
    for name in file:
        if name == FREQUENCIES:
            continue
        interleaved = next((n for part, n in heads.items() if part in name), None)
        if config["model_type"] != "llama":
            interleaved = None

        def make(name: str = name, heads: int | None = interleaved) -> Tensor:
            weight = file.tensor(name)
            # llama.cpp rotates the pairs (2i, 2i + 1) of a head's rows, our trunk the pairs (i, i + half)
            return (
                weight if heads is None else weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            )

        yield name, make
