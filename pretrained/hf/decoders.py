"""Hugging Face's decoders as `LanguageModel`: GPT-2, Llama, Mistral, Qwen2 and Qwen3.

Llama, Mistral, Qwen2 and Qwen3 differ in four settings of the block: biases, head width, QK-norm and attention window.
Weights, also those of a .gguf file (`gguf/load.py`), are streamed into the model tensor by tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken
from torch import Tensor

from worldtokens.backbone.transformer import Transformer
from worldtokens.pretrained.hf.source import Source, numeric_vocabulary
from worldtokens.pretrained.streaming import stream_weights
from worldtokens.tasks.language.chat import ChatModel
from worldtokens.tasks.language.model import LanguageModel
from worldtokens.tokenizers.text.tokenizer import TextTokenizer
from worldtokens.tokenizers.text.vocabulary import start_and_end

FRONT = "tokenizers.text."
GPT2 = {
    "wte.weight": FRONT + "embedding.weight",
    "wpe.weight": FRONT + "pos_embed",
    "h.*.ln_1.*": "trunk.blocks.*.norm1.*",
    "h.*.attn.c_attn.*": "trunk.blocks.*.attn.qkv.*",
    "h.*.attn.c_proj.*": "trunk.blocks.*.attn.proj.*",
    "h.*.ln_2.*": "trunk.blocks.*.norm2.*",
    "h.*.mlp.c_fc.*": "trunk.blocks.*.mlp.fc1.*",
    "h.*.mlp.c_proj.*": "trunk.blocks.*.mlp.fc2.*",
    "ln_f.*": "trunk.norm.*",
    "lm_head.weight": "head.weight",
}
GPT2_MASKS = ("h.*.attn.bias", "h.*.attn.masked_bias")  # causal masks in older files
LLAMA = {
    "embed_tokens.weight": FRONT + "embedding.weight",
    "layers.*.input_layernorm.*": "trunk.blocks.*.norm1.*",
    "layers.*.self_attn.q_proj.*": "trunk.blocks.*.attn.qkv.*[q]",
    "layers.*.self_attn.k_proj.*": "trunk.blocks.*.attn.qkv.*[k]",
    "layers.*.self_attn.v_proj.*": "trunk.blocks.*.attn.qkv.*[v]",
    "layers.*.self_attn.q_norm.*": "trunk.blocks.*.attn.q_norm.*",
    "layers.*.self_attn.k_norm.*": "trunk.blocks.*.attn.k_norm.*",
    "layers.*.self_attn.o_proj.*": "trunk.blocks.*.attn.proj.*",
    "layers.*.post_attention_layernorm.*": "trunk.blocks.*.norm2.*",
    "layers.*.mlp.gate_proj.*": "trunk.blocks.*.mlp.fc1.*[gate]",
    "layers.*.mlp.up_proj.*": "trunk.blocks.*.mlp.fc1.*[up]",
    "layers.*.mlp.down_proj.*": "trunk.blocks.*.mlp.fc2.*",
    "norm.*": "trunk.norm.*",
    "lm_head.weight": "head.weight",
}
LLAMA_ANGLES = ("layers.*.self_attn.rotary_emb.inv_freq",)  # computed from the config; stored in older files
# defaults that a config.json omits
COMMON = {"rms_norm_eps": 1e-6, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
DEFAULTS = {
    "llama": COMMON | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": COMMON
    | {"vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 131072}
    | {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": COMMON
    | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
    | {"num_key_value_heads": 32},
}
DEFAULTS["qwen3"] = DEFAULTS["qwen2"] | {"head_dim": 128}
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Callable[[], Tensor]]]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A vocabulary with its control tokens and chat template.

    Args:
        backend: the vocabulary, or None: texts are then ids as decimal numbers.
        start, end: tokens around a text, or None.
        ends: further ids that end generation.
        template: chat template (Jinja), or None.
    """

    backend: tokenizers.Tokenizer | None = None
    start: str | None = None
    end: str | None = None
    ends: tuple[int, ...] = ()
    template: str | None = None


def convert_gpt2(config: Mapping[str, Any], weights: dict[str, Tensor], source: Source) -> LanguageModel:
    """Convert GPT-2 with its head."""
    c = dict(config)
    source.expect(
        c,
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    )
    dim, context = c.get("n_embd", 768), c.get("n_positions", 1024)
    tied = c.get("tie_word_embeddings", True)
    weights = _normalize_names(weights, "transformer.", tied, "wte.weight", source)
    check_depth(weights, "h.", c.get("n_layer", 12), source)
    trunk = _trunk(
        source,
        dim,
        c.get("n_layer", 12),
        c.get("n_head", 12),
        activation=source.activation(c.get("activation_function", "gelu_new")),
        config={"mlp_dim": c.get("n_inner") or 4 * dim, "eps": c.get("layer_norm_epsilon", 1e-5)},
    )
    vocabulary = read_vocabulary(c, source)
    model = _build(vocabulary, c.get("vocab_size", 50257), dim, context, "learned", trunk, tied, source)
    transposed = (
        "h.*.attn.c_attn.weight",
        "h.*.attn.c_proj.weight",
        "h.*.mlp.c_fc.weight",
        "h.*.mlp.c_proj.weight",
    )
    # GPT-2 stores its projections transposed: (inputs, outputs)
    stream_weights(
        model, weights, GPT2, source.name, transforms=dict.fromkeys(transposed, Tensor.t), skip=GPT2_MASKS
    )
    return model


def convert_llama(config: Mapping[str, Any], weights: dict[str, Tensor], source: Source) -> LanguageModel:
    """Convert Llama, Mistral, Qwen2 or Qwen3 with its head."""
    tied = config.get("tie_word_embeddings", False)
    weights = _normalize_names(weights, "model.", tied, "embed_tokens.weight", source)
    depth = (DEFAULTS[config["model_type"]] | dict(config))["num_hidden_layers"]
    check_depth(weights, "layers.", depth, source)
    return llama(config, weights, read_vocabulary(config, source), source)


def llama(
    config: Mapping[str, Any],
    weights: Weights,
    vocabulary: Vocabulary,
    source: Source,
    table: Mapping[str, str] = LLAMA,
) -> LanguageModel:
    """Build a Llama-type model from a config and load its weights.

    Args:
        config: as in config.json.
        weights: by name, or as pairs of a name and a function that makes the tensor.
        vocabulary: its vocabulary.
        source: named in errors.
        table: pattern of the source's names -> ours.
    """
    kind = config["model_type"]
    c = DEFAULTS[kind] | dict(config)
    source.expect(c, {"hidden_act": ("silu", "swish"), "pretraining_tp": 1, "partial_rotary_factor": 1.0})
    dim, heads = c["hidden_size"], c["num_attention_heads"]
    kv, width = c.get("num_key_value_heads") or heads, c.get("head_dim") or dim // heads
    inner, context = c["intermediate_size"], c["max_position_embeddings"]
    # `attention_bias` of Llama and Qwen3 is for all four projections; Qwen2 has biases of q, k and v
    attention_bias, mlp_bias = bool(c.get("attention_bias")), bool(c.get("mlp_bias"))
    trunk = _trunk(
        source,
        dim,
        c["num_hidden_layers"],
        heads,
        kv_heads=kv,
        norm="rms",
        activation="swiglu",
        qk_norm=kind == "qwen3",
        window=_window(c, kind, source),
        rope=1,
        config={
            "mlp_dim": inner,
            "eps": c["rms_norm_eps"],
            "bias": attention_bias or mlp_bias,
            "qkv_bias": kind == "qwen2" or attention_bias,
            "head_dim": None if width * heads == dim else width,
            **_rope(c, source),
        },
    )
    tied = c.get("tie_word_embeddings", False)
    model = _build(vocabulary, c["vocab_size"], dim, context, "none", trunk, tied, source)
    rows = {
        "q": (0, heads * width),
        "k": (heads * width, kv * width),
        "v": ((heads + kv) * width, kv * width),
    }
    rows |= {"gate": (0, inner), "up": (inner, inner)}
    # the block has all biases or none: those that only attention or only the MLP has become zero in the other
    zero = ["trunk.blocks.*.attn.proj.bias"] if not attention_bias else []
    zero += ["trunk.blocks.*.mlp.fc1.bias", "trunk.blocks.*.mlp.fc2.bias"] if not mlp_bias else []
    stream_weights(model, weights, table, source.name, rows=rows, skip=LLAMA_ANGLES, zero=zero)
    return model


def _trunk(source: Source, dim: int, depth: int, heads: int, **settings: Any) -> Transformer:
    try:
        with torch.device("meta"):  # no memory and no initialisation before the weights are loaded
            return Transformer(dim, depth, heads, **settings)
    except ValueError as e:
        raise source.error(f"its config cannot be built: {e}") from e


def check_depth(names: Iterable[str], layers: str, depth: Any, source: Source) -> None:
    """Check that the number of layers in the config and in the weights agree, before the model is built.

    Args:
        names: names of the weights.
        layers: prefix of a layer's number in them.
        depth: number of layers in the config.

    Raises:
        InputError: the numbers differ.
    """
    found = {n.removeprefix(layers).partition(".")[0] for n in names if n.startswith(layers)}
    if len(found) != depth:
        raise source.error(f"the config has {depth} layers, the weights {len(found)}")


def _window(c: Mapping[str, Any], kind: str, source: Source) -> int | None:
    """Attention window in tokens, which must be the same in all layers; None: no window."""
    window = c.get("sliding_window")
    if kind != "mistral" and not c.get("use_sliding_window"):
        window = None
    layers = set(c.get("layer_types") or ())
    if window is not None and kind != "mistral" and not layers:
        full = min(c.get("max_window_layers", 28), c["num_hidden_layers"])
        layers = {"full_attention"} if full else set()
        layers |= {"sliding_attention"} if full < c["num_hidden_layers"] else set()
    if layers == {"full_attention"}:
        return None
    if len(layers) > 1 or layers - {"sliding_attention"}:
        raise source.error(f"layers of several kinds ({', '.join(sorted(layers))}) are not supported")
    return window


def _rope(c: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Settings of RoPE from an older or newer config."""
    rope = dict(c.get("rope_scaling") or {}) | dict(c.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0)
    how = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise source.error(f"partial_rotary_factor={rope['partial_rotary_factor']} is not supported, 1.0 is")
    if how == "default":
        return {"rope_theta": theta}
    if how != "llama3":
        raise source.error(f"rope_type={how!r} is not supported, 'default' and 'llama3' are")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [n for n in names if n not in rope]
    if missing:
        raise source.error(f"rope_type='llama3' lacks {missing}")
    return {"rope_theta": theta, "rope_scaling": tuple(float(rope[n]) for n in names)}


def _normalize_names(
    weights: dict[str, Tensor], prefix: str, tied: bool, embedding: str, source: Source
) -> dict[str, Tensor]:
    """Weights without the prefix of the trunk in a model with a head; the copy of a tied head is dropped."""
    out = {k.removeprefix(prefix): v for k, v in weights.items()}
    if len(out) != len(weights):
        raise source.error(f"weights of one name with and without {prefix!r}")
    head = out.get("lm_head.weight")
    if tied and head is not None:
        if embedding not in out or not torch.equal(head, out[embedding]):
            raise source.error("tie_word_embeddings is true, but lm_head.weight is not the embedding")
        del out["lm_head.weight"]
    return out


# ---- vocabulary -------------------------------------------------------------------------------------------------


def read_vocabulary(config: Mapping[str, Any], source: Source) -> Vocabulary:
    """The given vocabulary or that of the folder, with end tokens and chat template."""
    backend, given = source.vocabulary, source.tokenizer
    ids = (dict(config) | source.generation_settings).get("eos_token_id")
    ids = [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]
    if backend is None:
        return Vocabulary(end=str(ids[0]) if ids else None, ends=tuple(ids[1:]))
    config = source.read("tokenizer_config.json") or {}
    start, end = start_and_end(backend)
    for name in (getattr(given, "eos_token", None), _token(config.get("eos_token"))):
        if end is None and name is not None and backend.token_to_id(name) is not None:
            end = name
    if end is None and ids:
        end = backend.id_to_token(ids[0])
    ends = tuple(i for i in ids if end is None or i != backend.token_to_id(end))
    template = getattr(given, "chat_template", None) or config.get("chat_template")
    file = source.folder and source.folder / "chat_template.jinja"
    if not template and file and file.is_file():
        template = file.read_text(encoding="utf-8")
    if isinstance(template, list):  # several, by name
        template = {t["name"]: t["template"] for t in template}
    if isinstance(template, Mapping):
        template = template.get("default")
    return Vocabulary(backend, start, end, ends, template)


def _token(token: Any) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token


def pad_vocabulary(backend: tokenizers.Tokenizer, rows: int, source: Source) -> tokenizers.Tokenizer:
    """Add a token for every unused row of an embedding, ``<|unused_123|>``.

    Raises:
        InputError: the vocabulary is larger than the embedding.
    """
    size = max(backend.get_vocab().values(), default=-1) + 1
    if size > rows:
        raise source.error(
            f"the vocabulary has {size} tokens and the model {rows} embeddings: give its own tokenizer"
        )
    backend.add_special_tokens(
        [AddedToken(f"<|unused_{i}|>", special=True, normalized=False) for i in range(size, rows)]
    )
    if max(backend.get_vocab().values(), default=-1) + 1 != rows:
        raise source.error(f"the vocabulary has tokens like '<|unused_{size}|>' already")
    return backend


def _build(
    vocabulary: Vocabulary,
    rows: int,
    dim: int,
    context: int,
    positions: str,
    trunk: Transformer,
    tied: bool,
    source: Source,
) -> LanguageModel:
    backend = (
        numeric_vocabulary(rows)
        if vocabulary.backend is None
        else pad_vocabulary(vocabulary.backend, rows, source)
    )
    with torch.device("meta"):
        front = TextTokenizer(
            backend, dim, context, positions=positions, start=vocabulary.start, end=vocabulary.end
        )
        if vocabulary.template is None and not vocabulary.ends:
            model = LanguageModel(front, trunk, tied=tied)
        else:
            model = ChatModel(
                front, trunk, tied=tied, chat_template=vocabulary.template, stop_ids=vocabulary.ends
            )
    return model.to_empty(device="cpu")
