"""Models from .gguf files, as llama.cpp and Ollama keep them: Llama, Qwen2 and Qwen3 types with byte-level vocabularies.

A .gguf holds everything in one file: settings, packed weights, vocabulary and chat template. Its settings are brought into
the form of a Hugging Face config, and from there it takes the same road (`hf_decoders.py`). Each tensor is unpacked only
when its place in the model is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from worldtokens.backbone.positions import stretched
from worldtokens.pretrained.gguf_file import GGUFFile
from worldtokens.pretrained.hf_decoders import LLAMA, Words, llama, same_depth
from worldtokens.pretrained.hf_source import Source
from worldtokens.tasks.language_model import LanguageModel
from worldtokens.tokenizers.vocabulary import open_vocabulary

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
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens
# how text is cut before byte pairs are joined, by the header's name for it; None: GPT-2's way
_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = ("llama-bpe", "llama-v3", "llama3"), ("qwen2", "deepseek-r1-qwen")
CUTS = {"gpt-2": None, "gpt2": None, "smollm": "digits"}
CUTS |= dict.fromkeys(LLAMA3, _CUT % "1,3") | dict.fromkeys(QWEN2, _CUT % "1")


def convert_gguf(path: str | Path, tokenizer: Any = None) -> LanguageModel:
    """A .gguf file as a `LanguageModel` in float32, eval mode.

    Args:
        path: of the file.
        tokenizer: a vocabulary to use instead of the file's: what `from_hf` takes.

    Raises:
        InputError: the file is damaged or cut off, or holds an architecture, a vocabulary, a setting or a tensor that
            isn't supported, or lacks one; named.
    """
    file = GGUFFile(path)
    kind = file.values.get("general.architecture")
    source = Source(str(path), str(kind))
    if kind not in ARCHITECTURES:
        raise source.refuse(f"this architecture isn't supported, {', '.join(ARCHITECTURES)} are")
    config = settings(file, source)
    _agree(file, config, source)
    if tokenizer is None:
        rust = vocabulary(file, source)
    else:
        rust = open_vocabulary(getattr(tokenizer, "backend_tokenizer", tokenizer))
    words = _words(file, rust, source)
    return llama(config, _weights(file, config), words, source, TABLE).eval()


def settings(file: GGUFFile, source: Source) -> dict[str, Any]:
    """The header as a config.json of Hugging Face."""
    kind = file.values["general.architecture"]

    def told(name: str) -> Any:
        return file.values.get(f"{kind}.{name}")

    for name, allowed in EXPECTED.items():
        if told(name) is not None and told(name) not in allowed:
            raise source.refuse(f"{kind}.{name}={told(name)!r} isn't supported, {allowed[0]!r} is")
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
    # the header's vocab_size is optional, the embedding isn't
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
        raise source.refuse(f"{FREQUENCIES} isn't Llama 3.1's (low 1, high 4, original length 8,192)")
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


# ---- words -------------------------------------------------------------------------------------------------


def vocabulary(file: GGUFFile, source: Source) -> tokenizers.Tokenizer:
    """The header's byte-level BPE.

    Raises:
        InputError: the header holds another kind of vocabulary, or cuts text in a way that isn't known.
    """

    def told(name: str, default: Any = None) -> Any:
        return file.values.get(f"tokenizer.{name}", default)

    if told("ggml.model") != "gpt2":
        raise source.refuse(
            f"a vocabulary of the kind {told('ggml.model')!r} isn't supported, byte-level BPE ('gpt2') is: give "
            "tokenizer=, such as the path of its tokenizer.json"
        )
    cut = told("ggml.pre", "gpt-2")
    if cut not in CUTS:
        raise source.refuse(
            f"text cut by {cut!r} isn't supported, {', '.join(CUTS)} are: give tokenizer=, such as the path of its "
            "tokenizer.json"
        )
    tokens, merges = told("ggml.tokens"), told("ggml.merges")
    kinds = told("ggml.token_type") or [1] * len(tokens or ())
    if not tokens or merges is None or len(kinds) != len(tokens):
        raise source.refuse("the header lacks tokenizer.ggml.tokens, merges or a kind for each token")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise source.refuse("the header's vocabulary names a token twice")
    try:
        pairs = [tuple(m.split(" ", 1)) for m in merges]
        # Llama 3 looks a whole word up before it joins bytes
        rust = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=cut in LLAMA3))
    except Exception as e:  # the Rust side raises plain Exception
        raise source.refuse(f"the header's vocabulary isn't byte pairs: {e}") from e
    level = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(told("ggml.add_space_prefix", False)), use_regex=True
    )
    if CUTS[cut] == "digits":
        level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    elif CUTS[cut]:
        split = pre_tokenizers.Split(Regex(CUTS[cut]), behavior="isolated")
        level = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    rust.pre_tokenizer, rust.decoder = level, decoders.ByteLevel()
    if cut in QWEN2:
        rust.normalizer = normalizers.NFC()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        named = [t for t, k in zip(tokens, kinds, strict=True) if k == kind]
        rust.add_tokens([AddedToken(t, special=special, normalized=False) for t in named])
    if len(rust.get_vocab()) != len(tokens):
        raise source.refuse("the header's added tokens aren't all in its vocabulary")

    return rust


def _words(file: GGUFFile, rust: tokenizers.Tokenizer, source: Source) -> Words:
    """A vocabulary with the header's start and end token and chat template."""

    def told(name: str, default: Any = None) -> Any:
        return file.values.get(f"tokenizer.{name}", default)

    def named(key: str) -> str | None:
        i = told(f"ggml.{key}_token_id")
        name = None if i is None else rust.id_to_token(i)
        if i is not None and name is None:
            raise source.refuse(f"tokenizer.ggml.{key}_token_id is {i}, which the vocabulary hasn't")
        return name

    # without a word about it, llama.cpp adds a start token to a vocabulary of Llama 3's kind alone
    adds = told("ggml.add_bos_token", told("ggml.pre") in LLAMA3)
    start, end = named("bos") if adds else None, named("eos")
    ends = tuple(i for i in (told("ggml.eot_token_id"),) if i is not None and i != told("ggml.eos_token_id"))
    return Words(rust, start, end, ends, told("chat_template"))
