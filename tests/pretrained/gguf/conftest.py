"""Fixtures of the .gguf tests: a chat template, and a writer that follows llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Callable

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from torch import nn

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|model|>' }}{% endif %}"
)


@pytest.fixture(scope="session")
def chat_template() -> str:
    """A Jinja template that raises for one role."""
    return CHAT_TEMPLATE


def write(path, theirs: nn.Module, rust: tokenizers.Tokenizer, quantization: str = "F32", **changes) -> None:
    """Write a model as llama.cpp's converter does; `theirs` takes the dequantized weights.

    Args:
        changes: header values to replace; None drops one. `tensors`: a function on the dict of tensors.
    """
    c, kind = theirs.config, theirs.config.model_type
    tensors = {}
    for name, p in theirs.state_dict().items():
        name = name.removeprefix("model.")
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        short = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
        short["lm_head.weight"] = "output.weight"
        if name.startswith("layers."):
            _, i, rest = name.split(".", 2)
            module, _, kind_of = rest.rpartition(".")
            short[name] = f"blk.{i}.{NAMES[module]}.{kind_of}"
        value = p.detach().numpy().copy()
        if quantization != "F32" and value.ndim == 2:
            quant_type = gguf.GGMLQuantizationType[quantization]
            quantized = gguf.quantize(value, quant_type)
            value = (
                gguf.dequantize(quantized, quant_type)
                if quantization != "F16"
                else quantized.astype(np.float32)
            )
            p.data.copy_(torch.from_numpy(value))
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            n = c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads
            # rows (head, half, pair) -> (head, pair, half)
            value = (
                value.reshape(n, 2, value.shape[0] // n // 2, *value.shape[1:])
                .swapaxes(1, 2)
                .reshape(value.shape)
            )
        tensors[short[name]] = value
    rope = c.rope_parameters
    if rope.get("rope_type") == "llama3":
        # llama.cpp writes the factor by which each wavelength is multiplied
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](c, "cpu")
        half = c.hidden_size // c.num_attention_heads
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, half, 2) / half)
        tensors["rope_freqs.weight"] = (plain / scaled).numpy()
    vocab = rust.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    unused = [f"[PAD{i}]" for i in range(len(tokens), c.vocab_size)]
    special = {t.content for t in rust.get_added_tokens_decoder().values()}
    merges = json.loads(rust.to_str())["model"]["merges"]
    header = {
        "general.architecture": kind,
        f"{kind}.block_count": c.num_hidden_layers,
        f"{kind}.context_length": 256,
        f"{kind}.embedding_length": c.hidden_size,
        f"{kind}.feed_forward_length": c.intermediate_size,
        f"{kind}.attention.head_count": c.num_attention_heads,
        f"{kind}.attention.head_count_kv": c.num_key_value_heads,
        f"{kind}.attention.key_length": getattr(c, "head_dim", None),
        f"{kind}.attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        f"{kind}.rope.freq_base": float(rope["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in tokens] + [5] * len(unused),
        "tokenizer.ggml.merges": [" ".join(m) for m in merges],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | {k: v for k, v in changes.items() if k != "tensors"}
    tensors = changes.get("tensors", lambda t: t)(tensors)
    writer = gguf.GGUFWriter(path, "x")
    writer.kv_data[0].clear()
    for key, value in header.items():
        if value is None:
            continue
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    for name, value in tensors.items():
        if quantization in ("Q8_0", "Q4_1") and value.ndim == 2:
            quant_type = gguf.GGMLQuantizationType[quantization]
            writer.add_tensor(name, gguf.quantize(value, quant_type), raw_dtype=quant_type)
        else:
            writer.add_tensor(
                name, value.astype(np.float16) if quantization == "F16" and value.ndim == 2 else value
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., None]:
    """Writes a live decoder of transformers as a .gguf file."""
    return write
