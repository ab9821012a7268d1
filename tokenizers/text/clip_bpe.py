"""CLIP's byte-pair encoding, equal to open_clip's id by id, and faster.

CLIP normalises text (see `normalize.lower`), splits it by one regular expression and encodes each piece by byte pairs
(Radford et al., 2021). Two facts make that fast:

- No piece crosses white space, so the ids of a text are those of its words, and words repeat (`WordCache`).
- Only new pieces are encoded, by Rust.

The `regex` module does the splitting and not Rust, whose Unicode tables lack some 17,000 letters that `regex` knows
(counted over all code points with tokenizers 0.23).
"""

from __future__ import annotations

import gzip
import importlib.util
from array import array
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import regex
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from worldtokens.errors import InputError
from worldtokens.tokenizers.text.normalize import SEPARATOR, UNCHANGED_ASCII, code_point_roles, fix_texts
from worldtokens.tokenizers.text.vocabulary import bytes_to_unicode

START, END = "<|startoftext|>", "<|endoftext|>"
SUFFIX = "</w>"
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
MERGES = 49152 - 256 - 2  # the file lists more than CLIP uses

_split = regex.compile(PATTERN, regex.IGNORECASE).findall


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """CLIP's splitting, stored in the tokenizer.json so that other programs can use the file."""
    split = pre_tokenizers.Split(Regex("(?i)" + PATTERN), "removed", invert=True)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def vocabulary() -> tokenizers.Tokenizer:
    """CLIP's 49,408 tokens as a `tokenizers.Tokenizer`, from the file that open_clip_torch ships.

    Raises:
        InputError: open_clip_torch is not installed or lacks the file.
    """
    spec = importlib.util.find_spec("open_clip")  # found, not imported: the import takes seconds
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / "bpe_simple_vocab_16e6.txt.gz" if folders else None
    if path is None or not path.is_file():
        raise InputError(
            f"CLIP's vocabulary is read from open_clip_torch's bpe_simple_vocab_16e6.txt.gz, found {path}: "
            "pip install open_clip_torch, or give a tokenizer.json to TextTokenizer.from_file"
        )
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")[1 : MERGES + 1]
    merges = [(a, b) for a, b in map(str.split, lines)]
    chars = list(bytes_to_unicode().values())
    names = chars + [c + SUFFIX for c in chars] + [a + b for a, b in merges] + [START, END]
    vocab = {name: i for i, name in enumerate(names)}
    bpe = models.BPE(vocab, merges, end_of_word_suffix=SUFFIX)
    out = tokenizers.Tokenizer(bpe)
    out.pre_tokenizer = pre_tokenizer()
    out.decoder = decoders.ByteLevel()
    out.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(t, vocab[t]) for t in (START, END)]
    )
    out.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (START, END)])
    return out


HEAD, TAIL = -1, -2  # mark the start and end of each text while all ids of a batch are one array
_BYTE_TO_CHAR = bytes_to_unicode()
_HEAD, _TAIL = (array("i", [mark]).tobytes() for mark in (HEAD, TAIL))


class WordCache:
    """Text -> ids through a bounded cache of words. Safe to share between threads.

    The ids of a word are stored as bytes of int32, so that the ids of a batch are one join.

    Args:
        backend: a vocabulary whose pieces never cross white space (see `supports`).
        limit: maximum number of characters of the cached words; the cache is cleared when it is reached.
    """

    longest = 256  # characters; longer "words" are not cached

    def __init__(self, backend: tokenizers.Tokenizer, limit: int = 2**21) -> None:
        self._bpe = backend.model  # has no added tokens, so no text can spell a special one
        self._limit = limit
        code_point_roles()  # computed now, not with the first text
        names = (n.removesuffix(SUFFIX) for n in backend.get_vocab() if n.endswith(SUFFIX))
        self._start = self._encode([n for n in names if n.isascii() and n.isalpha()])
        self._start[SEPARATOR] = _TAIL + _HEAD
        self._clear()

    def _clear(self) -> None:
        self._table, self._size = self._start.copy(), 0

    @staticmethod
    def supports(backend: tokenizers.Tokenizer) -> bool:
        """Whether this vocabulary splits and encodes as CLIP's does."""
        return (
            isinstance(backend.model, models.BPE)
            and backend.model.end_of_word_suffix == SUFFIX
            and backend.normalizer is None
            and backend.pre_tokenizer is not None
            and backend.pre_tokenizer.__getstate__() == pre_tokenizer().__getstate__()
        )

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_table": self._start.copy(), "_size": 0}

    def encode(self, texts: Sequence[str], head: list[int], tail: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """All ids as one int32 array, and the length of each text.

        Args:
            texts: at least one.
            head, tail: one id or none before and after every text.
        """
        joint = f" {SEPARATOR} "
        whole = joint.join(texts)
        if not (
            whole.isascii()
            and whole.count(SEPARATOR) == len(texts) - 1
            and not whole.encode().translate(None, UNCHANGED_ASCII + b"\0")
        ):
            whole = joint.join(fix_texts(texts))
        words = whole.lower().split()
        table = self._table
        try:
            ids = b"".join(map(table.__getitem__, words))
        except KeyError:
            table = self._learn(table, list(set(words).difference(table)))
            ids = b"".join(map(table.__getitem__, words))
        flat = np.frombuffer(bytearray(_HEAD + ids + _TAIL), np.int32)
        ends = np.flatnonzero(flat == TAIL)
        lengths = np.diff(ends, prepend=-1)
        keep = np.ones(len(flat), bool)
        for index, mark in ((ends + 1 - lengths, head), (ends, tail)):
            if mark:
                flat[index] = mark[0]
            else:
                keep[index] = False
        if head and tail:
            return flat, lengths
        return flat[keep], lengths - (not head) - (not tail)

    def _learn(self, table: dict[str, bytes], new: list[str]) -> dict[str, bytes]:
        # an alphabetic word is one piece; others are split, and their pieces may be cached already
        split = {w: [w] if w.isalpha() else _split(w) for w in new}
        fresh = self._encode(list(set(chain.from_iterable(split.values())).difference(table)))
        for word, pieces in split.items():
            if word not in fresh:
                fresh[word] = b"".join([fresh[p] if p in fresh else table[p] for p in pieces])
        size = sum(map(len, fresh))
        if max(map(len, new)) > self.longest:
            return {**table, **fresh}
        if self._size + size > self._limit:
            # other threads may still use the old table
            self._clear()
            return {**table, **fresh}
        table.update(fresh)
        self._size += size
        return table

    def _encode(self, pieces: list[str]) -> dict[str, bytes]:
        # one by one and directly on the model: for words, Rust's batch call spends more time on threads than on encoding
        encode, out = self._bpe.tokenize, {}
        for piece in pieces:
            found = encode(piece.encode().decode("latin-1").translate(_BYTE_TO_CHAR))
            out[piece] = array("i", [token.id for token in found]).tobytes()
        return out
