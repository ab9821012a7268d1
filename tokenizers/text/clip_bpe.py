"""CLIP's own reading of text, id for id as open_clip does it, made fast without changing a single id.

CLIP mends text with ftfy, undoes HTML entities twice, collapses white space, lowers the case, cuts the rest into
pieces by one regular expression and encodes each piece by byte pairs (Radford et al., 2021). Three facts make that
quick:

- For most text the mending is the identity, and a look at its characters proves it (`mend`).
- No piece crosses white space, so the ids of a text are those of its words, and words repeat (`Words`).
- Only new pieces are encoded, by Rust.

The cutting is left to the `regex` module and not to Rust, whose Unicode tables lack some 17,000 letters that
`regex` knows (counted over all code points with tokenizers 0.23).
"""

from __future__ import annotations

import functools
import gzip
import html
import importlib.util
import re
import unicodedata
from array import array
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import ftfy
import numpy as np
import regex
import tokenizers
from ftfy.badness import is_bad
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from worldtokens.errors import InputError
from worldtokens.tokenizers.text.vocabulary import byte_letters

START, END = "<|startoftext|>", "<|endoftext|>"
SUFFIX = "</w>"
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
MERGES = 49152 - 256 - 2  # the file lists more than CLIP uses

_pieces = regex.compile(PATTERN, regex.IGNORECASE).findall

_BETWEEN = "\0"  # stands between texts; no mended one holds it: ftfy removes it, and HTML cannot write it

# ---- mending ---------------------------------------------------------------------------------------------

# Every step of ftfy and html acts only on text that holds one of certain characters, so a look at the characters
# often proves that nothing would change. From the narrow proof to the wide one; tests/tokenizers/text/test_tokenizer.py compares all of
# them with ftfy itself, over every code point and over random text.

# ASCII text is touched by nothing but entities and control characters (line breaks end up as spaces anyway).
_TOUCHED_ASCII = "&\x00-\x08\x0b\x0e-\x1f\x7f"
_ascii_touched = re.compile(f"[{_TOUCHED_ASCII}]").search
_UNTOUCHED = bytes(b for b in range(0x80) if not re.match(f"[{_TOUCHED_ASCII}]", chr(b)))

# Text of these characters alone holds nothing that ftfy mends one by one. Left out are the letters that its mojibake
# patterns hinge on. What remains of those patterns needs a small letter before an accented capital, or hyphens.
_SMALL = "ß-öø-ıĵķĸĺļľŀłńņňŋōŏőŕŗřśŝşšţťŧũūŭůűųŵŷźżžΐά-ώ\u0430-\u045f"
_CAPITAL = "ÀÁÄ-ÍÏÑ-ÖÚ-Ý"
_SAFE = (
    f"\t\x20-\x25\x27-\x7e\xa0·–—…{_SMALL}{_CAPITAL}"
    "Έ-ΊΌΎΏΑ-ΡΣ-ΫЁЄІЇА-Я"
    "\u05d0-\u05ea\u0620-\u064a\u0660-\u0669\u06f0-\u06f9"
    "\u0901-\u0903\u0904-\u0939\u093e-\u094d\u0982\u0983\u0985-\u09b9\u09be-\u09cd\u0e01-\u0e3a\u0e40-\u0e4e"
    "\u1ea0-\u1ef9\u200d\u2600-\u27bf\u3001-\u3020\u3041-\u3096\u30a1-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
    "\ufe0f\U0001f000-\U0001faff"
)
_unsafe = re.compile(f"[^{_SAFE}]").search
_capital_inside = re.compile(f"[{_SMALL}][{_CAPITAL}]").search
_HINGES = "ВГРСΒΓΞΟ"
_hyphen_between = re.compile(f"[{_HINGES}]-[{_HINGES}]").search

# Characters that ftfy changes one by one, and line breaks, at which it starts anew. What is left of ftfy when none
# of these is present: mojibake (`is_bad`) and normal form C.
_touched = re.compile(
    "[&\x00-\x08\x0a-\x1f\x7f-\x9f\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\u02bc\u2018-\u201f\u2028\u2029"
    "\u206a-\u206f\u3000\ud800-\udfff\ufb00-\ufb06\ufeff\uff00-\uffef\ufff9-\ufffc]"
).search
_QUOTES = dict.fromkeys(map(ord, "\u02bc\u2018\u2019\u201a\u201b"), "'")
_QUOTES |= dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f"), '"')


def mend(text: str) -> str:
    """ftfy and two rounds of HTML unescaping, skipped where they provably change nothing but white space."""
    if text.isascii():
        if ("&" not in text and text.isprintable()) or not _ascii_touched(text):
            return text
    else:
        straight = text.replace(
            "\u2019", "'"
        )  # the apostrophe of printed French; alone it takes part in no pattern
        if (
            not _unsafe(straight)
            and not _capital_inside(straight)
            and ("-" not in straight or not _hyphen_between(straight))
        ):
            if unicodedata.is_normalized("NFC", straight):
                return straight
        else:
            straight = text.translate(_QUOTES)
            if (
                not _touched(straight)
                and unicodedata.is_normalized("NFC", straight)
                and not is_bad(text)
                and (straight == text or not is_bad(straight))
            ):
                return straight
    return html.unescape(html.unescape(ftfy.fix_text(text)))


def mend_all(texts: Sequence[str]) -> list[str]:
    """`mend` for many texts: the wide proof is given for all of them at once, by table look-up."""
    whole = _BETWEEN.join(texts)
    # inside a lone surrogate nothing can be looked up
    if len(texts) < 32 or not _written(whole) or not unicodedata.is_normalized("NFC", whole):
        return [mend(t) for t in texts]
    kind = _kinds()[np.frombuffer(whole.encode("utf-32-le"), np.uint32)]
    ends = np.flatnonzero(kind == _END)
    if len(ends) != len(texts) - 1:
        return [mend(t) for t in texts]
    bad = np.flatnonzero(kind == _OTHER)
    inside = np.flatnonzero((kind[:-1] == _LOW) & (kind[1:] == _HIGH))
    between = np.flatnonzero((kind[:-2] == _HINGE) & (kind[1:-1] == _HYPHEN) & (kind[2:] == _HINGE))
    out = whole.replace("\u2019", "'").split(_BETWEEN)
    for i in set(np.searchsorted(ends, np.concatenate([bad, inside, between])).tolist()):
        out[i] = mend(texts[i])
    return out


_OTHER, _SAFE_KIND, _LOW, _HIGH, _HINGE, _HYPHEN, _END = range(7)


@functools.cache
def _kinds() -> np.ndarray:
    """For every code point what part it takes in the wide proof."""
    kinds = np.full(0x110000, _OTHER, np.uint8)
    parts = ((_SAFE, _SAFE_KIND), (_SMALL, _LOW), (_CAPITAL, _HIGH), (_HINGES, _HINGE))
    for characters, kind in (*parts, ("\\-", _HYPHEN), ("\u2019", _SAFE_KIND), (_BETWEEN, _END)):
        for first, last in re.findall(
            r"(\\?.)(?:-(.))?", characters, re.DOTALL
        ):  # a regex's set, range by range
            first = first[-1]
            kinds[ord(first) : ord(last or first) + 1] = kind
    return kinds


def _written(text: str) -> bool:
    try:
        text.encode("utf-32-le")
    except UnicodeEncodeError:
        return False
    return True


def clean(text: str) -> str:
    """CLIP's cleaning: mended, one space for any white space, lower case."""
    return " ".join(mend(text).split()).lower()


# ---- vocabulary ------------------------------------------------------------------------------------------


def splitter() -> pre_tokenizers.PreTokenizer:
    """CLIP's cutting for a tokenizer.json, so that the file is whole for other programs too."""
    cut = pre_tokenizers.Split(Regex("(?i)" + PATTERN), "removed", invert=True)
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def vocabulary() -> tokenizers.Tokenizer:
    """CLIP's 49,408 tokens as a `tokenizers.Tokenizer`, from the file that open_clip_torch ships.

    Raises:
        InputError: open_clip_torch is not installed or lacks the file.
    """
    spec = importlib.util.find_spec("open_clip")  # found, not imported: the import takes seconds
    places = spec.submodule_search_locations if spec else None
    path = Path(places[0]) / "bpe_simple_vocab_16e6.txt.gz" if places else None
    if path is None or not path.is_file():
        raise InputError(
            f"CLIP's vocabulary is read from open_clip_torch's bpe_simple_vocab_16e6.txt.gz, found {path}: "
            "pip install open_clip_torch, or give a tokenizer.json to TextTokenizer.from_file"
        )
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")[1 : MERGES + 1]
    merges = [tuple(line.split()) for line in lines]
    letters = list(byte_letters().values())
    names = letters + [c + SUFFIX for c in letters] + [a + b for a, b in merges] + [START, END]
    vocab = {name: i for i, name in enumerate(names)}
    bpe = models.BPE(vocab, merges, end_of_word_suffix=SUFFIX)
    out = tokenizers.Tokenizer(bpe)
    out.pre_tokenizer = splitter()
    out.decoder = decoders.ByteLevel()
    out.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(t, vocab[t]) for t in (START, END)]
    )
    out.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (START, END)])
    return out


# ---- words -----------------------------------------------------------------------------------------------


HEAD, TAIL = -1, -2  # where a text begins and ends, while all ids of a batch are one array
_LETTERS = byte_letters()
_HEAD, _TAIL = (array("i", [mark]).tobytes() for mark in (HEAD, TAIL))


class Words:
    """Text -> ids through a bounded table of words already seen. Safe to share between threads.

    A word's ids are kept as bytes of int32, so that the ids of a whole batch are one join.

    Args:
        tokenizer: a vocabulary whose pieces never cross white space (`fits` tells).
        limit: how many characters of words the table may hold before it starts anew.
    """

    longest = 256  # characters; a longer "word" is not kept

    def __init__(self, tokenizer: tokenizers.Tokenizer, limit: int = 2**21) -> None:
        self._bpe = tokenizer.model  # knows no added tokens, so that no text can spell a special one
        self._limit = limit
        _kinds()  # made now, so that the first text need not wait
        names = (n.removesuffix(SUFFIX) for n in tokenizer.get_vocab() if n.endswith(SUFFIX))
        self._start = self._encode([n for n in names if n.isascii() and n.isalpha()])
        self._start[_BETWEEN] = _TAIL + _HEAD
        self._anew()

    def _anew(self) -> None:
        self._table, self._held = self._start.copy(), 0

    @staticmethod
    def fits(tokenizer: tokenizers.Tokenizer) -> bool:
        """Whether this vocabulary cuts and encodes as CLIP's does."""
        return (
            isinstance(tokenizer.model, models.BPE)
            and tokenizer.model.end_of_word_suffix == SUFFIX
            and tokenizer.normalizer is None
            and tokenizer.pre_tokenizer is not None
            and tokenizer.pre_tokenizer.__getstate__() == splitter().__getstate__()
        )

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_table": self._start.copy(), "_held": 0}

    def encode(self, texts: Sequence[str], head: list[int], tail: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """All ids one after another (int32), and how many each text has.

        Args:
            texts: at least one.
            head, tail: one id or none to put before and after every text.
        """
        joint = f" {_BETWEEN} "
        all_of_it = joint.join(texts)
        if not (
            all_of_it.isascii()
            and all_of_it.count(_BETWEEN) == len(texts) - 1
            and not all_of_it.encode().translate(None, _UNTOUCHED + b"\0")
        ):
            all_of_it = joint.join(mend_all(texts))
        words = all_of_it.lower().split()
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
        for places, mark in ((ends + 1 - lengths, head), (ends, tail)):
            if mark:
                flat[places] = mark[0]
            else:
                keep[places] = False
        if head and tail:
            return flat, lengths
        return flat[keep], lengths - (not head) - (not tail)

    def _learn(self, table: dict[str, bytes], new: list[str]) -> dict[str, bytes]:
        # an alphabetic word is one piece; others are cut, and their pieces may be known already
        cut = {w: [w] if w.isalpha() else _pieces(w) for w in new}
        fresh = self._encode(list(set(chain.from_iterable(cut.values())).difference(table)))
        for word, pieces in cut.items():
            if word not in fresh:
                fresh[word] = b"".join([fresh[p] if p in fresh else table[p] for p in pieces])
        size = sum(map(len, fresh))
        if max(map(len, new)) > self.longest:
            return {**table, **fresh}
        if self._held + size > self._limit:
            # other threads keep the old table for as long as they read from it
            self._anew()
            return {**table, **fresh}
        table.update(fresh)
        self._held += size
        return table

    def _encode(self, pieces: list[str]) -> dict[str, bytes]:
        # one by one and straight to the model: for words, Rust's batch call spends more on threads than on work
        encode, out = self._bpe.tokenize, {}
        for piece in pieces:
            found = encode(piece.encode().decode("latin-1").translate(_LETTERS))
            out[piece] = array("i", [token.id for token in found]).tobytes()
        return out
