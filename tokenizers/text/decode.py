"""Ids to text, all at once or one id at a time."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.text.vocabulary import bytes_to_unicode


class IdDecoder:
    """Decodes the ids of one vocabulary.

    Byte-level vocabularies are decoded byte by byte, so that a stream can hold back an incomplete character and the
    result is exactly the text; other vocabularies use their own decoder.

    Args:
        backend: the vocabulary.
        size: number of ids.
        special_ids: ids of special tokens, skipped unless asked for.
    """

    def __init__(self, backend: tokenizers.Tokenizer, size: int, special_ids: set[int]) -> None:
        self._backend, self._size, self._special_ids = backend, size, special_ids
        self._table = _byte_table(backend, size) if isinstance(backend.decoder, decoders.ByteLevel) else None

    def decode(self, ids: Iterable[int] | Tensor, special: bool) -> str:
        if self._table is not None:
            return "".join(self.stream(ids, special))
        return self._backend.decode(
            [self._checked(i) for i in _to_ints(ids)], skip_special_tokens=not special
        )

    def stream(self, ids: Iterable[int] | Tensor, special: bool) -> Iterator[str]:
        decoder = StreamDecoder(self, special)
        for i in _to_ints(ids):
            if text := decoder.push(i):
                yield text
        if rest := decoder.end():
            yield rest

    def token_bytes(self, i: int) -> bytes:
        i = self._checked(i)
        if self._table is not None:
            return self._table[i][0]
        # SentencePiece vocabularies name a byte <0x0A>
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", self._backend.id_to_token(i) or "")
        return (
            bytes.fromhex(byte[1]) if byte else self._backend.decode([i], skip_special_tokens=False).encode()
        )

    def _checked(self, i: int) -> int:
        if not 0 <= i < self._size:
            raise InputError(f"id {i} is outside this vocabulary of {self._size} tokens")
        return int(i)


class StreamDecoder:
    """Decodes one text incrementally: ids in, text out as soon as its characters are complete.

    Args:
        decoder: of the vocabulary.
        special: include special tokens.
    """

    def __init__(self, decoder: IdDecoder, special: bool) -> None:
        self._decoder, self._special = decoder, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._space = b""  # CLIP marks the ends of words: the space is due when another token follows
        self._ids: list[int] = []
        self._emitted, self._text = 0, ""

    def push(self, i: int) -> str:
        """Add one id -> the new text, "" where a character is incomplete."""
        decoder, i = self._decoder, self._decoder._checked(i)
        if decoder._table is not None:
            if i in decoder._special_ids and not self._special:
                return ""
            raw, ends = decoder._table[i]
            text = self._utf8.decode(self._space + raw)
            self._space = b" " if ends else b""
            return text
        # these decoders depend on a token's neighbours: all ids are decoded again and the new text is returned
        self._ids.append(i)
        self._text = decoder._backend.decode(self._ids, skip_special_tokens=not self._special)
        return "" if self._text.endswith("\ufffd") else self._rest()

    def end(self) -> str:
        """The text held back: U+FFFD for an incomplete character, or ""."""
        return self._utf8.decode(b"", final=True) if self._decoder._table is not None else self._rest()

    def _rest(self) -> str:
        new, self._emitted = self._text[self._emitted :], max(self._emitted, len(self._text))
        return new


def _byte_table(backend: tokenizers.Tokenizer, size: int) -> list[tuple[bytes, bool]]:
    """For each id its bytes, and whether it ends a word."""
    byte = {c: b for b, c in bytes_to_unicode().items()}
    suffix = getattr(backend.model, "end_of_word_suffix", None) or ""
    added = backend.get_added_tokens_decoder()
    table = [(b"", False)] * size
    for name, i in backend.get_vocab().items():
        if i in added:
            table[i] = (name.encode(), False)
            continue
        ends = bool(suffix) and name.endswith(suffix)
        name = name[: -len(suffix)] if ends else name
        # tokens that are not in the byte alphabet and not marked as added stand for themselves
        known = all(c in byte for c in name)
        table[i] = (bytes(byte[c] for c in name) if known else name.encode(), ends)
    return table


def _to_ints(ids: Iterable[int] | Tensor) -> Iterable[int]:
    if not isinstance(ids, Tensor):
        return ids
    if ids.ndim != 1 or ids.is_floating_point():
        raise InputError(f"ids are {ids.dtype} {tuple(ids.shape)}, expected integers of shape (N,)")
    return ids.tolist()
