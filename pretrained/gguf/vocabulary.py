"""The vocabulary of a .gguf's header as a `tokenizers.Tokenizer`, with its control tokens and chat template.

Two kinds: byte-level byte pairs (GPT-2's letters for bytes; Llama 3, Qwen2, SmolLM2) and SentencePiece's (``▁`` for a
space, ``<0x0A>`` for a byte without a piece; Llama 2, TinyLlama, Mistral), whose merges are found again from its scores.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from worldtokens.errors import InputError
from worldtokens.pretrained.gguf.file import GGUFFile
from worldtokens.pretrained.hf.decoders import Words
from worldtokens.pretrained.hf.source import Source
from worldtokens.tokenizers.text.vocabulary import open_vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of tokens
# how text is cut before byte pairs are joined, by the header's name for it; None: GPT-2's way
_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = ("llama-bpe", "llama-v3", "llama3"), ("qwen2", "deepseek-r1-qwen")
CUTS = {"gpt-2": None, "gpt2": None, "smollm": "digits"}
CUTS |= dict.fromkeys(LLAMA3, _CUT % "1,3") | dict.fromkeys(QWEN2, _CUT % "1")
KINDS = ("gpt2", "llama")


def words(file: GGUFFile, source: Source, given: Any = None) -> Words:
    """The header's vocabulary, or a given one, with the header's start and end token and chat template.

    Args:
        file: the .gguf.
        source: named in errors.
        given: what `from_hf` takes as `tokenizer`, or None.

    Raises:
        InputError: the header holds another kind of vocabulary, or cuts text in a way that is not known.
    """
    told = _told(file)
    if given is not None:
        rust = open_vocabulary(getattr(given, "backend_tokenizer", given))
    elif told.get("ggml.model") not in KINDS:
        raise source.refuse(
            f"a vocabulary of the kind {told.get('ggml.model')!r} is not supported, {' and '.join(KINDS)} are: give "
            "tokenizer=, such as the path of its tokenizer.json"
        )
    else:
        rust = _vocabulary(told, source)

    def named(key: str) -> str | None:
        i = told.get(f"ggml.{key}_token_id")
        name = None if i is None else rust.id_to_token(i)
        if i is not None and name is None:
            raise source.refuse(f"tokenizer.ggml.{key}_token_id is {i}, which the vocabulary has not")
        return name

    # where nothing is said, llama.cpp puts a start token before texts of these two kinds alone
    usual = told.get("ggml.model") == "llama" or told.get("ggml.pre") in LLAMA3
    start, end = named("bos") if told.get("ggml.add_bos_token", usual) else None, named("eos")
    more = told.get("ggml.eot_token_id")
    ends = (more,) if more is not None and more != told.get("ggml.eos_token_id") else ()
    return Words(rust, start, end, ends, told.get("chat_template"))


def _told(file: GGUFFile) -> dict[str, Any]:
    begin = "tokenizer."
    return {k.removeprefix(begin): v for k, v in file.values.items() if k.startswith(begin)}


def _vocabulary(told: dict[str, Any], source: Source) -> tokenizers.Tokenizer:
    tokens = told.get("ggml.tokens")
    kinds = told.get("ggml.token_type") or [NORMAL] * len(tokens or ())
    if not tokens or len(kinds) != len(tokens):
        raise source.refuse("the header lacks tokenizer.ggml.tokens, or a kind for each token")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise source.refuse("the header's vocabulary names a token twice")
    make = _byte_level if told["ggml.model"] == "gpt2" else _pieces
    try:
        rust = make(told, vocab, kinds, source)
    except InputError:
        raise
    except Exception as e:  # the Rust side raises plain Exception
        raise source.refuse(f"the header's vocabulary is not byte pairs: {e}") from e
    for kind, special in ((UNKNOWN, True), (CONTROL, True), (USER_DEFINED, False)):
        added = [t for t, k in zip(tokens, kinds, strict=True) if k == kind]
        rust.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])
    if len(rust.get_vocab()) != len(tokens):
        raise source.refuse("the header's added tokens are not all in its vocabulary")
    return rust


def _byte_level(
    told: dict[str, Any], vocab: dict[str, int], kinds: list[int], source: Source
) -> tokenizers.Tokenizer:
    cut = told.get("ggml.pre", "gpt-2")
    if cut not in CUTS:
        raise source.refuse(
            f"text cut by {cut!r} is not supported, {', '.join(CUTS)} are: give tokenizer=, such as the path of its "
            "tokenizer.json"
        )
    if "ggml.merges" not in told:
        raise source.refuse("the header lacks tokenizer.ggml.merges")
    pairs = [tuple(m.split(" ", 1)) for m in told["ggml.merges"]]
    # Llama 3 looks a whole word up before it joins bytes
    rust = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=cut in LLAMA3))
    level = pre_tokenizers.ByteLevel(add_prefix_space=bool(told.get("ggml.add_space_prefix", False)))
    if CUTS[cut] == "digits":
        level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    elif CUTS[cut]:
        split = pre_tokenizers.Split(Regex(CUTS[cut]), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        level = pre_tokenizers.Sequence([split, plain])
    rust.pre_tokenizer, rust.decoder = level, decoders.ByteLevel()
    if cut in QWEN2:
        rust.normalizer = normalizers.NFC()
    return rust


def _pieces(
    told: dict[str, Any], vocab: dict[str, int], kinds: list[int], source: Source
) -> tokenizers.Tokenizer:
    scores = told.get("ggml.scores")
    if not scores or len(scores) != len(vocab):
        raise source.refuse("the header lacks tokenizer.ggml.scores, one for each token")
    names = list(vocab)
    plain = {t for t, k in zip(names, kinds, strict=True) if k == NORMAL}
    pairs = []
    for token in plain:  # control tokens are not joined from letters, whatever their names
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in plain and right in plain:
                pairs.append((-scores[vocab[token]], vocab[left], vocab[right], left, right))
    unknown = next((t for t, k in zip(names, kinds, strict=True) if k == UNKNOWN), None)
    model = models.BPE(
        vocab, [p[3:] for p in sorted(pairs)], unk_token=unknown, byte_fallback=True, fuse_unk=True
    )
    rust = tokenizers.Tokenizer(model)
    before = told.get("ggml.add_space_prefix", True)
    space = [normalizers.Prepend("▁")] if before else []
    rust.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if before else []
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return rust
