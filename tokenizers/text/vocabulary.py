"""Vocabularies of Hugging Face's `tokenizers`: open, train, save, and fork safely."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from worldtokens.errors import InputError
from worldtokens.parts import write_whole
from worldtokens.tokenizers.text.read import read_text


def open_vocabulary(source: tokenizers.Tokenizer | str | os.PathLike) -> tokenizers.Tokenizer:
    """A private copy of a vocabulary, from an object or a `tokenizer.json`, without truncation and padding.

    Raises:
        InputError: there is no such file, or it is not a tokenizer.json.
    """
    if isinstance(source, tokenizers.Tokenizer):
        backend = tokenizers.Tokenizer.from_str(source.to_str())
    elif isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if not os.path.isfile(path):
            raise InputError(f"no vocabulary at {path!r}: expected a tokenizer.json, or 'clip' for CLIP's")
        try:
            backend = tokenizers.Tokenizer.from_file(path)
        except Exception as e:  # the Rust side raises plain Exception
            raise InputError(f"{path} is not a tokenizer.json that `tokenizers` reads: {e}") from e
    else:
        raise InputError(
            f"vocabulary is a {type(source).__name__}, expected a tokenizers.Tokenizer, the path of a tokenizer.json "
            "or 'clip'; a transformers tokenizer holds one as .backend_tokenizer"
        )
    backend.no_truncation()
    backend.no_padding()
    return backend


def start_and_end(backend: tokenizers.Tokenizer) -> tuple[str | None, str | None]:
    """The tokens that a vocabulary's post-processor adds before and after a text.

    Raises:
        InputError: more than one token on a side.
    """
    bare, full = backend.encode("a", add_special_tokens=False).ids, backend.encode("a").ids
    for k in range(len(full) - len(bare) + 1):
        if full[k : k + len(bare)] == bare:
            head, tail = full[:k], full[k + len(bare) :]
            if len(head) <= 1 and len(tail) <= 1:
                start, end = (backend.id_to_token(side[0]) if side else None for side in (head, tail))
                return start, end
            break
    raise InputError(
        f"the vocabulary's post-processor turns {bare} into {full}, more than one token on a side: name start= and end="
    )


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    start: str | None,
    end: str,
    specials: Sequence[str],
    min_frequency: int,
) -> tokenizers.Tokenizer:
    """Train a byte-level BPE; special tokens get the first ids, `end` id 0."""
    special = list(dict.fromkeys([end, *([start] if start else []), *specials]))
    if vocab_size < 256 + len(special):
        raise InputError(
            f"vocab_size={vocab_size} has no room for 256 bytes and {len(special)} special tokens: give "
            f"{256 + len(special)} or more"
        )
    if isinstance(texts, str):
        raise InputError("texts is one str, expected an iterable of them: give [text]")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # checked before they reach Rust: an error raised inside its loop loses its type
    checked = [read_text(t, f"text {i}") for i, t in enumerate(texts)]
    backend.train_from_iterator(checked, trainer, length=len(checked))
    template = ([start] if start else []) + ["$A", end]
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(template), special_tokens=[(t, backend.token_to_id(t)) for t in template if t != "$A"]
    )
    return backend


def token_id(backend: tokenizers.Tokenizer, argument: str, token: str | None) -> int | None:
    """The id of the token that an argument names, None for None.

    Raises:
        InputError: the vocabulary lacks the token.
    """
    if token is None:
        return None
    found = backend.token_to_id(token)
    if found is None:
        known = sorted(t.content for t in backend.get_added_tokens_decoder().values())
        raise InputError(
            f"{argument}={token!r} is not in the vocabulary; its added tokens are {known[:10]}: name one of them"
        )
    return found


def save_into(backend: tokenizers.Tokenizer, folder: Path | None) -> str:
    """Write a vocabulary into a model's folder, if there is one.

    Returns:
        The file's name: `tokenizer.json`, or one with a hash where that name is taken by another vocabulary of this
        model or of an older save, which is not overwritten.
    """
    data, name = backend.to_str().encode(), "tokenizer.json"
    if folder is not None:
        if (folder / name).exists() and (folder / name).read_bytes() != data:
            name = f"tokenizer-{hashlib.sha256(data).hexdigest()[:12]}.json"
        if not (folder / name).exists():
            write_whole(folder / name, data)
    return name


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable character for each of the 256 bytes, in CLIP's order: the printable bytes first."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(0x100 + i) for i, b in enumerate(other)}


def _quiet_forks(key: str = "TOKENIZERS_PARALLELISM") -> None:
    """Let a process that has encoded with threads fork: no warning, and no deadlock on threads that were not forked.

    Rust warns in the child unless the variable is set at the fork, and a child must not use threads whatever the
    variable was before.
    """
    ours = []

    def before() -> None:
        if key not in os.environ:
            os.environ[key] = "false"
            ours.append(True)

    def in_parent() -> None:
        if ours:
            ours.pop()
            os.environ.pop(key, None)

    def in_child() -> None:
        os.environ[key] = "false"

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


if hasattr(os, "register_at_fork"):
    _quiet_forks()
