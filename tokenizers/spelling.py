"""Ids back to text, all at once or as they come in."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.vocabulary import byte_letters


class Speller:
    """Spells the ids of one vocabulary.

    Byte-level vocabularies are spelled byte by byte, so that a stream can hold an unfinished character back and
    the whole is exactly the text; others are left to their own decoder.

    Args:
        rust: the vocabulary.
        size: how many ids there are.
        specials: ids of control tokens, left out unless asked for.
    """

    def __init__(self, rust: tokenizers.Tokenizer, size: int, specials: set[int]) -> None:
        self._rust, self._size, self._specials = rust, size, specials
        self._table = _byte_table(rust, size) if isinstance(rust.decoder, decoders.ByteLevel) else None

    def decode(self, ids: Iterable[int] | Tensor, special: bool) -> str:
        if self._table is not None:
            return "".join(self.stream(ids, special))
        return self._rust.decode([self._known(i) for i in _whole(ids)], skip_special_tokens=not special)

    def stream(self, ids: Iterable[int] | Tensor, special: bool) -> Iterator[str]:
        if self._table is None:
            yield from self._stream_rust(_whole(ids), special)
            return
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        space = b""  # CLIP marks the ends of words: the space after one is due when another follows
        for i in _whole(ids):
            i = self._known(i)
            if i in self._specials and not special:
                continue
            raw, ends = self._table[i]
            text = utf8.decode(space + raw)
            space = b" " if ends else b""
            if text:
                yield text
        rest = utf8.decode(b"", final=True)
        if rest:
            yield rest

    def _stream_rust(self, ids: Iterable[int], special: bool) -> Iterator[str]:
        # such decoders look at a token's neighbours: all is decoded again and what is new is handed out
        held, shown, text = [], 0, ""
        for i in ids:
            held.append(self._known(i))
            text = self._rust.decode(held, skip_special_tokens=not special)
            if len(text) > shown and not text.endswith("\ufffd"):
                yield text[shown:]
                shown = len(text)
        if text[shown:]:
            yield text[shown:]

    def spell(self, i: int) -> bytes:
        i = self._known(i)
        if self._table is not None:
            return self._table[i][0]
        # what SentencePiece's vocabularies call a byte
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", self._rust.id_to_token(i) or "")
        return bytes.fromhex(byte[1]) if byte else self._rust.decode([i], skip_special_tokens=False).encode()

    def _known(self, i: int) -> int:
        if not 0 <= i < self._size:
            raise InputError(f"id {i} is outside this vocabulary of {self._size} tokens")
        return int(i)


def _byte_table(rust: tokenizers.Tokenizer, size: int) -> list[tuple[bytes, bool]]:
    """For each id the bytes that it spells, and whether it ends a word."""
    byte = {c: b for b, c in byte_letters().items()}
    suffix = getattr(rust.model, "end_of_word_suffix", None)
    added = rust.get_added_tokens_decoder()
    table = [(b"", False)] * size
    for name, i in rust.get_vocab().items():
        if i in added:
            table[i] = (name.encode(), False)
            continue
        ends = bool(suffix) and name.endswith(suffix)
        name = name[: -len(suffix)] if ends else name
        # a vocabulary may hold names that aren't byte letters without being marked as added: they spell themselves
        known = all(c in byte for c in name)
        table[i] = (bytes(byte[c] for c in name) if known else name.encode(), ends)
    return table


def _whole(ids: Iterable[int] | Tensor) -> Iterable[int]:
    if not isinstance(ids, Tensor):
        return ids
    if ids.ndim != 1 or ids.is_floating_point():
        raise InputError(f"ids are {ids.dtype} {tuple(ids.shape)}, expected whole numbers of shape (N,)")
    return ids.tolist()
