"""Vocabulary of a .gguf header as a `tokenizers.Tokenizer`, with its control tokens and chat template.

Two types: byte-level BPE (Llama 3, Qwen2, SmolLM2), and SentencePiece BPE (``▁`` for a space, ``<0x0A>`` for a byte without
token; Llama 2, TinyLlama, Mistral), whose merges are recovered from the scores.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from worldtokens.errors import InputError
from worldtokens.pretrained.gguf.file import GGUFFile
from worldtokens.pretrained.hf.decoders import Vocabulary
from worldtokens.pretrained.hf.source import Source
from worldtokens.tokenizers.text.vocabulary import open_vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types
# regular expression that splits text before BPE, by the header's name of the pre-tokenizer; None: GPT-2's
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = ("llama-bpe", "llama-v3", "llama3"), ("qwen2", "deepseek-r1-qwen")
PRE_TOKENIZERS = {"gpt-2": None, "gpt2": None, "smollm": "digits"}
PRE_TOKENIZERS |= dict.fromkeys(LLAMA3, _SPLIT % "1,3") | dict.fromkeys(QWEN2, _SPLIT % "1")
TYPES = ("gpt2", "llama")


def read_vocabulary(file: GGUFFile, source: Source, given: Any = None) -> Vocabulary:
    """The header's vocabulary, or a given one, with the header's start and end token and chat template.

    Args:
        file: the .gguf file.
        source: named in errors.
        given: `tokenizer` of `from_hf`, or None.

    Raises:
        InputError: the type of vocabulary or the pre-tokenizer is not supported.
    """
    metadata = _metadata(file)
    if given is not None:
        backend = open_vocabulary(getattr(given, "backend_tokenizer", given))
    elif metadata.get("ggml.model") not in TYPES:
        raise source.error(
            f"a vocabulary of type {metadata.get('ggml.model')!r} is not supported, {' and '.join(TYPES)} are: give "
            "tokenizer=, such as the path of its tokenizer.json"
        )
    else:
        backend = _vocabulary(metadata, source)

    def token(key: str) -> str | None:
        i = metadata.get(f"ggml.{key}_token_id")
        name = None if i is None else backend.id_to_token(i)
        if i is not None and name is None:
            raise source.error(f"tokenizer.ggml.{key}_token_id is {i}, which is not in the vocabulary")
        return name

    # by default llama.cpp adds a start token for these two types only
    default = metadata.get("ggml.model") == "llama" or metadata.get("ggml.pre") in LLAMA3
    start, end = token("bos") if metadata.get("ggml.add_bos_token", default) else None, token("eos")
    more = metadata.get("ggml.eot_token_id")
    ends = (more,) if more is not None and more != metadata.get("ggml.eos_token_id") else ()
    return Vocabulary(backend, start, end, ends, metadata.get("chat_template"))


def _metadata(file: GGUFFile) -> dict[str, Any]:
    prefix = "tokenizer."
    return {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}


def _vocabulary(metadata: dict[str, Any], source: Source) -> tokenizers.Tokenizer:
    tokens = metadata.get("ggml.tokens")
    kinds = metadata.get("ggml.token_type") or [NORMAL] * len(tokens or ())
    if not tokens or len(kinds) != len(tokens):
        raise source.error("the header lacks tokenizer.ggml.tokens, or a type for each token")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise source.error("the header's vocabulary has a token twice")
    build = _byte_level if metadata["ggml.model"] == "gpt2" else _sentencepiece
    try:
        backend = build(metadata, vocab, kinds, source)
    except InputError:
        raise
    except Exception as e:  # the Rust side raises plain Exception
        raise source.error(f"the header's vocabulary is not BPE: {e}") from e
    for kind, special in ((UNKNOWN, True), (CONTROL, True), (USER_DEFINED, False)):
        added = [t for t, k in zip(tokens, kinds, strict=True) if k == kind]
        backend.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])
    if len(backend.get_vocab()) != len(tokens):
        raise source.error("the header's added tokens are not all in its vocabulary")
    return backend


def _byte_level(
    metadata: dict[str, Any], vocab: dict[str, int], kinds: list[int], source: Source
) -> tokenizers.Tokenizer:
    name = metadata.get("ggml.pre", "gpt-2")
    if name not in PRE_TOKENIZERS:
        raise source.error(
            f"pre-tokenizer {name!r} is not supported, {', '.join(PRE_TOKENIZERS)} are: give tokenizer=, such as the path of its "
            "tokenizer.json"
        )
    if "ggml.merges" not in metadata:
        raise source.error("the header lacks tokenizer.ggml.merges")
    pairs = [tuple(m.split(" ", 1)) for m in metadata["ggml.merges"]]
    # Llama 3 looks up whole words before it merges bytes
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=name in LLAMA3))
    level = pre_tokenizers.ByteLevel(add_prefix_space=bool(metadata.get("ggml.add_space_prefix", False)))
    if PRE_TOKENIZERS[name] == "digits":
        level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    elif PRE_TOKENIZERS[name]:
        split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS[name]), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        level = pre_tokenizers.Sequence([split, plain])
    backend.pre_tokenizer, backend.decoder = level, decoders.ByteLevel()
    if name in QWEN2:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(
    metadata: dict[str, Any], vocab: dict[str, int], kinds: list[int], source: Source
) -> tokenizers.Tokenizer:
    scores = metadata.get("ggml.scores")
    if not scores or len(scores) != len(vocab):
        raise source.error("the header lacks tokenizer.ggml.scores, one for each token")
    names = list(vocab)
    plain = {t for t, k in zip(names, kinds, strict=True) if k == NORMAL}
    pairs = []
    for token in plain:  # control tokens are never merged from letters
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in plain and right in plain:
                pairs.append((-scores[vocab[token]], vocab[left], vocab[right], left, right))
    unknown = next((t for t, k in zip(names, kinds, strict=True) if k == UNKNOWN), None)
    model = models.BPE(
        vocab, [p[3:] for p in sorted(pairs)], unk_token=unknown, byte_fallback=True, fuse_unk=True
    )
    backend = tokenizers.Tokenizer(model)
    before = metadata.get("ggml.add_space_prefix", True)
    space = [normalizers.Prepend("▁")] if before else []
    backend.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if before else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend
