"""Hugging Face's decoders as `LanguageModel`: GPT-2, and Llama with its kin (Mistral, Qwen2, Qwen3).

Llama's kin differ in four places, all of them settings of the one block: where biases are, how wide a head is, whether
queries and keys are normed, and how far back a token reads. A weight file of any of them, or a .gguf (`gguf.py`), fills
the model tensor by tensor.
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
from worldtokens.pretrained.hf.source import Source, numbers
from worldtokens.pretrained.streaming import pour
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
GPT2_MASKS = ("h.*.attn.bias", "h.*.attn.masked_bias")  # triangles of ones that older files hold
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
LLAMA_ANGLES = ("layers.*.self_attn.rotary_emb.inv_freq",)  # made from the config; older files hold them
# what `config.json` leaves out where it is the default of its class
LEFT_OUT = {"rms_norm_eps": 1e-6, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
DEFAULTS = {
    "llama": LEFT_OUT | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": LEFT_OUT
    | {"vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 131072}
    | {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": LEFT_OUT
    | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
    | {"num_key_value_heads": 32},
}
DEFAULTS["qwen3"] = DEFAULTS["qwen2"] | {"head_dim": 128}
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Callable[[], Tensor]]]


@dataclasses.dataclass(frozen=True)
class Words:
    """A vocabulary and what is known of its use.

    Args:
        rust: the vocabulary, or None: texts are then ids written as numbers.
        start, end: tokens around a text, or None.
        ends: further ids that end a continuation.
        template: chat template (Jinja), or None.
    """

    rust: tokenizers.Tokenizer | None = None
    start: str | None = None
    end: str | None = None
    ends: tuple[int, ...] = ()
    template: str | None = None


def convert_gpt2(config: Mapping[str, Any], weights: dict[str, Tensor], source: Source) -> LanguageModel:
    """GPT-2 with its head; see `from_hf`."""
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
    weights = _plain(weights, "transformer.", tied, "wte.weight", source)
    same_depth(weights, "h.", c.get("n_layer", 12), source)
    trunk = _trunk(
        source,
        dim,
        c.get("n_layer", 12),
        c.get("n_head", 12),
        activation=source.activation(c.get("activation_function", "gelu_new")),
        config={"mlp_dim": c.get("n_inner") or 4 * dim, "eps": c.get("layer_norm_epsilon", 1e-5)},
    )
    words = words_of(c, source)
    model = _model(words, c.get("vocab_size", 50257), dim, context, "learned", trunk, tied, source)
    maps = (
        "h.*.attn.c_attn.weight",
        "h.*.attn.c_proj.weight",
        "h.*.mlp.c_fc.weight",
        "h.*.mlp.c_proj.weight",
    )
    # GPT-2 multiplies from the left: its maps are written (inputs, outputs)
    pour(model, weights, GPT2, source.name, change=dict.fromkeys(maps, Tensor.t), derived=GPT2_MASKS)
    return model


def convert_llama(config: Mapping[str, Any], weights: dict[str, Tensor], source: Source) -> LanguageModel:
    """Llama, Mistral, Qwen2 or Qwen3 with its head; see `from_hf`."""
    tied = config.get("tie_word_embeddings", False)
    weights = _plain(weights, "model.", tied, "embed_tokens.weight", source)
    depth = (DEFAULTS[config["model_type"]] | dict(config))["num_hidden_layers"]
    same_depth(weights, "layers.", depth, source)
    return llama(config, weights, words_of(config, source), source)


def llama(
    config: Mapping[str, Any],
    weights: Weights,
    words: Words,
    source: Source,
    table: Mapping[str, str] = LLAMA,
) -> LanguageModel:
    """The model that a Llama-type config tells of, filled.

    Args:
        config: as in config.json.
        weights: by name, or as pairs of a name and what makes the tensor.
        words: its vocabulary.
        source: named in errors.
        table: pattern of their names -> ours.
    """
    kind = config["model_type"]
    c = DEFAULTS[kind] | dict(config)
    source.expect(c, {"hidden_act": ("silu", "swish"), "pretraining_tp": 1, "partial_rotary_factor": 1.0})
    dim, heads = c["hidden_size"], c["num_attention_heads"]
    kv, width = c.get("num_key_value_heads") or heads, c.get("head_dim") or dim // heads
    inner, context = c["intermediate_size"], c["max_position_embeddings"]
    # Llama's and Qwen3's `attention_bias` is one of all four maps; Qwen2 has one of q, k and v
    all_four, feed = bool(c.get("attention_bias")), bool(c.get("mlp_bias"))
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
            "bias": all_four or feed,
            "qkv_bias": kind == "qwen2" or all_four,
            "head_dim": None if width * heads == dim else width,
            **_rope(c, source),
        },
    )
    tied = c.get("tie_word_embeddings", False)
    model = _model(words, c["vocab_size"], dim, context, "none", trunk, tied, source)
    rows = {
        "q": (0, heads * width),
        "k": (heads * width, kv * width),
        "v": ((heads + kv) * width, kv * width),
    }
    rows |= {"gate": (0, inner), "up": (inner, inner)}
    # one of attention and feed-forward may have biases alone: the other's are zero then
    zero = ["trunk.blocks.*.attn.proj.bias"] if not all_four else []
    zero += ["trunk.blocks.*.mlp.fc1.bias", "trunk.blocks.*.mlp.fc2.bias"] if not feed else []
    pour(model, weights, table, source.name, rows=rows, derived=LLAMA_ANGLES, zero=zero)
    return model


def _trunk(source: Source, dim: int, depth: int, heads: int, **settings: Any) -> Transformer:
    try:
        with torch.device("meta"):  # no memory and no random numbers for what is filled anyway
            return Transformer(dim, depth, heads, **settings)
    except ValueError as e:
        raise source.refuse(f"its config cannot be built: {e}") from e


def same_depth(names: Iterable[str], layers: str, depth: Any, source: Source) -> None:
    """Check that a config's number of layers is the weights', before so many are built.

    Args:
        names: of the weights.
        layers: what stands before a layer's number in them.
        depth: of the config.
    """
    found = {n.removeprefix(layers).partition(".")[0] for n in names if n.startswith(layers)}
    if len(found) != depth:
        raise source.refuse(f"the config tells of {depth} layers, the weights hold {len(found)}")


def _window(c: Mapping[str, Any], kind: str, source: Source) -> int | None:
    """How far back a token reads, which must be the same in all layers."""
    window = c.get("sliding_window")
    if kind != "mistral" and not c.get("use_sliding_window"):
        window = None
    layers = set(c.get("layer_types") or ())
    if window is not None and kind != "mistral" and not layers:
        whole = min(c.get("max_window_layers", 28), c["num_hidden_layers"])
        layers = {"full_attention"} if whole else set()
        layers |= {"sliding_attention"} if whole < c["num_hidden_layers"] else set()
    if layers == {"full_attention"}:
        return None
    if len(layers) > 1 or layers - {"sliding_attention"}:
        raise source.refuse(f"layers of several kinds ({', '.join(sorted(layers))}) are not supported")
    return window


def _rope(c: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Settings of the rotary positions, as older and newer configs write them."""
    told = dict(c.get("rope_scaling") or {}) | dict(c.get("rope_parameters") or {})
    theta = float(told.get("rope_theta") or c.get("rope_theta") or 10000.0)
    how = told.get("rope_type", told.get("type", "default"))
    if told.get("partial_rotary_factor", 1.0) != 1.0:
        raise source.refuse(f"partial_rotary_factor={told['partial_rotary_factor']} is not supported, 1.0 is")
    if how == "default":
        return {"rope_theta": theta}
    if how != "llama3":
        raise source.refuse(f"rope_type={how!r} is not supported, 'default' and 'llama3' are")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    absent = [n for n in names if n not in told]
    if absent:
        raise source.refuse(f"rope_type='llama3' lacks {absent}")
    return {"rope_theta": theta, "rope_scaling": tuple(float(told[n]) for n in names)}


def _plain(
    weights: dict[str, Tensor], prefix: str, tied: bool, embedding: str, source: Source
) -> dict[str, Tensor]:
    """Weights without the prefix that a model with a head puts before its trunk's; a tied head is left out."""
    out = {k.removeprefix(prefix): v for k, v in weights.items()}
    if len(out) != len(weights):
        raise source.refuse(f"weights with and without {prefix!r} of one name")
    head = out.get("lm_head.weight")
    if tied and head is not None:
        if embedding not in out or not torch.equal(head, out[embedding]):
            raise source.refuse("tie_word_embeddings is true, but lm_head.weight is not the embedding")
        del out["lm_head.weight"]
    return out


# ---- words -------------------------------------------------------------------------------------------------


def words_of(config: Mapping[str, Any], source: Source) -> Words:
    """The vocabulary of a folder or one that was given, with its end token and chat template."""
    rust, given = source.vocabulary, source.tokenizer
    ids = (dict(config) | source.generation_settings).get("eos_token_id")
    ids = [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]
    if rust is None:
        return Words(end=str(ids[0]) if ids else None, ends=tuple(ids[1:]))
    told = source.read("tokenizer_config.json") or {}
    start, end = start_and_end(rust)
    for name in (getattr(given, "eos_token", None), _token(told.get("eos_token"))):
        if end is None and name is not None and rust.token_to_id(name) is not None:
            end = name
    if end is None and ids:
        end = rust.id_to_token(ids[0])
    ends = tuple(i for i in ids if end is None or i != rust.token_to_id(end))
    template = getattr(given, "chat_template", None) or told.get("chat_template")
    file = source.folder and source.folder / "chat_template.jinja"
    if not template and file and file.is_file():
        template = file.read_text(encoding="utf-8")
    if isinstance(template, list):  # several, by name
        template = {t["name"]: t["template"] for t in template}
    if isinstance(template, Mapping):
        template = template.get("default")
    return Words(rust, start, end, ends, template)


def _token(told: Any) -> str | None:
    return told["content"] if isinstance(told, Mapping) else told


def widened(rust: tokenizers.Tokenizer, rows: int, source: Source) -> tokenizers.Tokenizer:
    """A vocabulary with a name for every row of an embedding: what its makers left free is ``<|unused_123|>``.

    Raises:
        InputError: the vocabulary is larger than the embedding.
    """
    size = max(rust.get_vocab().values(), default=-1) + 1
    if size > rows:
        raise source.refuse(
            f"the vocabulary has {size} tokens and the model {rows} embeddings: give its own tokenizer"
        )
    rust.add_special_tokens(
        [AddedToken(f"<|unused_{i}|>", special=True, normalized=False) for i in range(size, rows)]
    )
    if max(rust.get_vocab().values(), default=-1) + 1 != rows:
        raise source.refuse(f"the vocabulary has names like '<|unused_{size}|>' of its own")
    return rust


def _model(
    words: Words,
    rows: int,
    dim: int,
    context: int,
    positions: str,
    trunk: Transformer,
    tied: bool,
    source: Source,
) -> LanguageModel:
    rust = numbers(rows) if words.rust is None else widened(words.rust, rows, source)
    with torch.device("meta"):
        front = TextTokenizer(rust, dim, context, positions=positions, start=words.start, end=words.end)
        if words.template is None and not words.ends:
            model = LanguageModel(front, trunk, tied=tied)
        else:
            model = ChatModel(front, trunk, tied=tied, chat_template=words.template, stop_ids=words.ends)
    return model.to_empty(device="cpu")
