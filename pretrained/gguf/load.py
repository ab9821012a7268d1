"""Models from .gguf files, as llama.cpp and Ollama keep them: Llama, Qwen2 and Qwen3 types.

A .gguf holds everything in one file: settings, packed weights, vocabulary and chat template. Its settings are brought into
the form of a Hugging Face config, and from there it takes the same road (`hf_decoders.py`). Each tensor is unpacked only
when its place in the model is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worldtokens.backbone.positions import stretched
from worldtokens.pretrained.gguf.file import GGUFFile
from worldtokens.pretrained.gguf.vocabulary import words
from worldtokens.pretrained.hf.decoders import LLAMA, llama, same_depth
from worldtokens.pretrained.hf.source import Source
from worldtokens.tasks.language.model import LanguageModel

NAMES = {  # what llama.cpp calls a weight: what Hugging Face does
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
SETTINGS = {  # behind "<architecture>.": the name in config.json
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
# what would change the arithmetic: refused where it says anything else
EXPECTED = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "rope.scaling.type": ("none",),
    "rope.scale_linear": (1.0,),
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
FREQUENCIES = "rope_freqs.weight"  # by how much each rotary wave is stretched


def convert_gguf(path: str | Path, tokenizer: Any = None) -> LanguageModel:
    """A .gguf file as a `LanguageModel` in float32, eval mode.

    Args:
        path: of the file.
        tokenizer: a vocabulary to use instead of the file's: what `from_hf` takes.

    Raises:
        InputError: the file is damaged or cut off, or holds an architecture, a vocabulary, a setting or a tensor that
            is not supported, or lacks one; named.
    """
    file = GGUFFile(path)
    kind = file.values.get("general.architecture")
    source = Source(str(path), str(kind))
    if kind not in ARCHITECTURES:
        raise source.refuse(f"this architecture is not supported, {', '.join(ARCHITECTURES)} are")
    config = settings(file, source)
    _agree(file, config, source)
    return llama(config, _weights(file, config), words(file, source, tokenizer), source, TABLE).eval()


def settings(file: GGUFFile, source: Source) -> dict[str, Any]:
    """The header as a config.json of Hugging Face."""
    kind = file.values["general.architecture"]

    def told(name: str) -> Any:
        return file.values.get(f"{kind}.{name}")

    for name, allowed in EXPECTED.items():
        if told(name) is not None and told(name) not in allowed:
            raise source.refuse(f"{kind}.{name}={told(name)!r} is not supported, {allowed[0]!r} is")
    config: dict[str, Any] = {"model_type": kind}
    for table in (SETTINGS, OPTIONAL):
        for name, ours in table.items():
            if told(name) is not None:
                config[ours] = told(name)
            elif table is SETTINGS:
                raise source.refuse(f"the header lacks {kind}.{name}")
    numbers = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    for name in (*numbers, "num_key_value_heads"):
        if name in config and (not isinstance(config[name], int) or config[name] < 1):
            raise source.refuse(f"{name} is {config[name]!r}, expected one whole number for all layers")
    if "token_embd.weight" not in file.places:
        raise source.refuse("missing token_embd.weight")
    # the header's vocab_size is optional, the embedding is not
    config["vocab_size"] = file.places["token_embd.weight"].shape[0]
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    turned = told("rope.dimension_count")
    if turned is not None and turned != config["head_dim"]:
        raise source.refuse(
            f"rotary positions turn {turned} of {config['head_dim']} channels: all is supported"
        )
    config["attention_bias"] = kind != "qwen2" and "blk.0.attn_output.bias" in file.places
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.places
    config["tie_word_embeddings"] = "output.weight" not in file.places
    if FREQUENCIES in file.places:
        config["rope_parameters"] = _scaling(file.tensor(FREQUENCIES), config, source)
    return config


def _agree(file: GGUFFile, config: dict[str, Any], source: Source) -> None:
    """Check that the header's sizes are its tensors', before a model of such sizes is built."""
    same_depth(file, "blk.", config["num_hidden_layers"], source)
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
        if name not in file.places:
            raise source.refuse(f"missing {name}")
        if file.places[name].shape != shape:
            raise source.refuse(f"{name} is {file.places[name].shape}, expected {shape} by the header")


def _scaling(factors: Tensor, config: dict[str, Any], source: Source) -> dict[str, Any]:
    """Llama 3.1's settings, from which llama.cpp's factors are computed: found again, and checked against them."""
    pairs = config["head_dim"] // 2
    freq = 1.0 / config.get("rope_theta", 10000.0) ** (torch.arange(pairs) / pairs)
    found = (float(factors.max()), 1.0, 4.0, 8192.0)
    right = factors.shape == freq.shape and torch.allclose(freq / stretched(freq, found), factors, rtol=1e-3)
    if not right:
        raise source.refuse(f"{FREQUENCIES} is not Llama 3.1's (low 1, high 4, original length 8,192)")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_type": "llama3", **dict(zip(names, found, strict=True))}


def _weights(file: GGUFFile, config: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name, what makes the tensor) for each weight of the file."""
    heads = {".attn_q.": config["num_attention_heads"]}
    heads[".attn_k."] = config.get("num_key_value_heads", config["num_attention_heads"])
    for name in file:
        if name == FREQUENCIES:
            continue
        turned = next((n for part, n in heads.items() if part in name), None)
        if config["model_type"] != "llama":
            turned = None

        def make(name: str = name, turned: int | None = turned) -> Tensor:
            weight = file.tensor(name)
            # llama.cpp writes a head's rows in the order of pairs (2i, 2i + 1), which it turns; ours are (i, i + half)
            return (
                weight
                if turned is None
                else weight.unflatten(0, (turned, -1, 2)).transpose(1, 2).flatten(0, 2)
            )

        yield name, make
