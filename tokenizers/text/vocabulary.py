"""What a text front-end asks of Hugging Face's `tokenizers`: open, train, and behave in forks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from worldtokens.errors import InputError


def open_vocabulary(source: tokenizers.Tokenizer | str | os.PathLike) -> tokenizers.Tokenizer:
    """A private copy of a vocabulary, from an object or a `tokenizer.json`, that neither cuts nor pads.

    Raises:
        InputError: there is no such file, or it is not a tokenizer.json.
    """
    if isinstance(source, tokenizers.Tokenizer):
        rust = tokenizers.Tokenizer.from_str(source.to_str())
    elif isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if not os.path.isfile(path):
            raise InputError(
                f"no vocabulary at {path!r}: expected a tokenizer.json, or 'clip' for the one that open_clip ships"
            )
        try:
            rust = tokenizers.Tokenizer.from_file(path)
        except Exception as e:  # the Rust side raises plain Exception
            raise InputError(f"{path} is not a tokenizer.json that `tokenizers` reads: {e}") from e
    else:
        raise InputError(
            f"vocabulary is a {type(source).__name__}, expected a tokenizers.Tokenizer, the path of a tokenizer.json "
            "or 'clip'; a transformers tokenizer holds one as .backend_tokenizer"
        )
    rust.no_truncation()
    rust.no_padding()
    return rust


def around(rust: tokenizers.Tokenizer) -> tuple[str | None, str | None]:
    """The tokens that a vocabulary's post-processor puts before and after a text.

    Raises:
        InputError: there is more than one on a side.
    """
    bare, full = rust.encode("a", add_special_tokens=False).ids, rust.encode("a").ids
    for k in range(len(full) - len(bare) + 1):
        if full[k : k + len(bare)] == bare:
            head, tail = full[:k], full[k + len(bare) :]
            if len(head) <= 1 and len(tail) <= 1:
                return tuple(rust.id_to_token(side[0]) if side else None for side in (head, tail))
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
    """A byte-level BPE learned from texts; control tokens get the first ids, `end` id 0."""
    control = list(dict.fromkeys([end, *([start] if start else []), *specials]))
    if vocab_size < 256 + len(control):
        raise InputError(
            f"vocab_size={vocab_size} has no room for 256 bytes and {len(control)} special tokens: give "
            f"{256 + len(control)} or more"
        )
    if isinstance(texts, str):
        raise InputError("texts is one str, expected an iterable of them: give [text]")
    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in control],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # checked before Rust sees them: an error raised inside its loop loses its type
    checked = [checked_text(t, f"text {i}") for i, t in enumerate(texts)]
    rust.train_from_iterator(checked, trainer, length=len(checked))
    template = ([start] if start else []) + ["$A", end]
    rust.post_processor = processors.TemplateProcessing(
        single=" ".join(template), special_tokens=[(t, rust.token_to_id(t)) for t in template if t != "$A"]
    )
    return rust


def checked_text(text: object, where: str) -> str:
    """`text` if it is a str that UTF-8 can write.

    Raises:
        InputError: it is not.
    """
    if not isinstance(text, str):
        raise InputError(
            f"{where} is a {type(text).__name__} ({text!r:.40}), expected a str"
            + (": decode it first, as in raw.decode('utf-8')" if isinstance(text, bytes | bytearray) else "")
        )
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InputError(
            f"{where} holds the lone surrogate {text[e.start]!r} at character {e.start}, which UTF-8 cannot write: "
            "read its file with errors='replace'"
        ) from e
    return str(text)


def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for each of the 256 bytes, in CLIP's order: the printable bytes first."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(0x100 + i) for i, b in enumerate(other)}


def _quiet_forks(key: str = "TOKENIZERS_PARALLELISM") -> None:
    """Let a process that has encoded with threads fork: no warning, and no waiting for threads that did not come along.

    The Rust side warns in the child unless the variable is set when the fork happens, and a child must not use
    threads whatever the variable said before.
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
