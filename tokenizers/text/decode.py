"""Ids back to text, all at once or as they come in."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.text.vocabulary import byte_letters


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
        spelling = Spelling(self, special)
        for i in _whole(ids):
            if text := spelling.push(i):
                yield text
        if rest := spelling.end():
            yield rest

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


class Spelling:
    """One text being spelled: ids go in, text comes out as soon as its characters are whole.

    Args:
        speller: of the vocabulary.
        special: spell control tokens out.
    """

    def __init__(self, speller: Speller, special: bool) -> None:
        self._of, self._special = speller, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._space = b""  # CLIP marks the ends of words: the space after one is due when another follows
        self._held, self._shown, self._text = [], 0, ""

    def push(self, i: int) -> str:
        """One more id -> what it lets be shown, often all of it, "" where a character is unfinished."""
        of, i = self._of, self._of._known(i)
        if of._table is not None:
            if i in of._specials and not self._special:
                return ""
            raw, ends = of._table[i]
            text = self._utf8.decode(self._space + raw)
            self._space = b" " if ends else b""
            return text
        # such decoders look at a token's neighbours: all is decoded again and what is new is handed out
        self._held.append(i)
        self._text = of._rust.decode(self._held, skip_special_tokens=not self._special)
        return "" if self._text.endswith("\ufffd") else self._rest()

    def end(self) -> str:
        """What was held back: an unfinished character's stand-in, or ""."""
        return self._utf8.decode(b"", final=True) if self._of._table is not None else self._rest()

    def _rest(self) -> str:
        new, self._shown = self._text[self._shown :], max(self._shown, len(self._text))
        return new


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
        # a vocabulary may hold names that are not byte letters without being marked as added: they spell themselves
        known = all(c in byte for c in name)
        table[i] = (bytes(byte[c] for c in name) if known else name.encode(), ends)
    return table


def _whole(ids: Iterable[int] | Tensor) -> Iterable[int]:
    if not isinstance(ids, Tensor):
        return ids
    if ids.ndim != 1 or ids.is_floating_point():
        raise InputError(f"ids are {ids.dtype} {tuple(ids.shape)}, expected whole numbers of shape (N,)")
    return ids.tolist()
