"""Normalisation of text before encoding, by open_clip's names.

All normalizers repair text with ftfy, unescape HTML entities twice and collapse white space. ftfy is slow, and for most
text it changes nothing: the characters of a text prove that, so ftfy is called only where the proof fails.
"""

from __future__ import annotations

import functools
import html
import re
import string
import unicodedata
from collections.abc import Sequence

import ftfy
import numpy as np
from ftfy.badness import is_bad

# joins the texts of a batch; no normalised text holds it: ftfy removes it, and HTML cannot spell it
SEPARATOR = "\0"

# Every step of ftfy and html changes only text that holds certain characters, so their absence proves that nothing would
# change. The proofs are ordered from narrow to wide; test_normalize.py compares them with ftfy itself, over every code
# point and over random text.

# In ASCII text only entities and control characters are changed (line breaks become spaces anyway).
_CHANGED_ASCII = "&\x00-\x08\x0b\x0e-\x1f\x7f"
_ascii_changed = re.compile(f"[{_CHANGED_ASCII}]").search
UNCHANGED_ASCII = bytes(b for b in range(0x80) if not re.match(f"[{_CHANGED_ASCII}]", chr(b)))

# ftfy changes none of these characters one by one. The letters essential to its mojibake patterns are excluded. The
# remaining patterns need a small letter before an accented capital, or hyphens.
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
_PIVOTS = "ВГРСΒΓΞΟ"
_hyphen_between = re.compile(f"[{_PIVOTS}]-[{_PIVOTS}]").search

# Characters that ftfy changes one by one, and line breaks, at which it splits the text. Without these, what remains of
# ftfy is mojibake (`is_bad`) and normal form C.
_changes = re.compile(
    "[&\x00-\x08\x0a-\x1f\x7f-\x9f\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\u02bc\u2018-\u201f\u2028\u2029"
    "\u206a-\u206f\u3000\ud800-\udfff\ufb00-\ufb06\ufeff\uff00-\uffef\ufff9-\ufffc]"
).search
_QUOTES = dict.fromkeys(map(ord, "\u02bc\u2018\u2019\u201a\u201b"), "'")
_QUOTES |= dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f"), '"')


def fix_text(text: str) -> str:
    """ftfy and two rounds of HTML unescaping, skipped where they provably change nothing but white space."""
    if text.isascii():
        if ("&" not in text and text.isprintable()) or not _ascii_changed(text):
            return text
    else:
        straight = text.replace("\u2019", "'")  # the typographic apostrophe alone is in no mojibake pattern
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
                not _changes(straight)
                and unicodedata.is_normalized("NFC", straight)
                and not is_bad(text)
                and (straight == text or not is_bad(straight))
            ):
                return straight
    return html.unescape(html.unescape(ftfy.fix_text(text)))


def fix_texts(texts: Sequence[str]) -> list[str]:
    """`fix_text` for many texts: the wide proof for all of them at once, by table look-up."""
    whole = SEPARATOR.join(texts)
    # lone surrogates cannot be looked up
    if len(texts) < 32 or not _encodable(whole) or not unicodedata.is_normalized("NFC", whole):
        return [fix_text(t) for t in texts]
    role = code_point_roles()[np.frombuffer(whole.encode("utf-32-le"), np.uint32)]
    ends = np.flatnonzero(role == _END)
    if len(ends) != len(texts) - 1:
        return [fix_text(t) for t in texts]
    bad = np.flatnonzero(role == _OTHER)
    inside = np.flatnonzero((role[:-1] == _LOW) & (role[1:] == _HIGH))
    between = np.flatnonzero((role[:-2] == _PIVOT) & (role[1:-1] == _HYPHEN) & (role[2:] == _PIVOT))
    out = whole.replace("\u2019", "'").split(SEPARATOR)
    for i in set(np.searchsorted(ends, np.concatenate([bad, inside, between])).tolist()):
        out[i] = fix_text(texts[i])
    return out


_OTHER, _IS_SAFE, _LOW, _HIGH, _PIVOT, _HYPHEN, _END = range(7)


@functools.cache
def code_point_roles() -> np.ndarray:
    """The role of every code point in the wide proof."""
    roles = np.full(0x110000, _OTHER, np.uint8)
    parts = ((_SAFE, _IS_SAFE), (_SMALL, _LOW), (_CAPITAL, _HIGH), (_PIVOTS, _PIVOT))
    for characters, role in (*parts, ("\\-", _HYPHEN), ("\u2019", _IS_SAFE), (SEPARATOR, _END)):
        # the set of a regular expression, range by range
        for first, last in re.findall(r"(\\?.)(?:-(.))?", characters, re.DOTALL):
            first = first[-1]
            roles[ord(first) : ord(last or first) + 1] = role
    return roles


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-32-le")
    except UnicodeEncodeError:
        return False
    return True


def lower(text: str) -> str:
    """CLIP's: repaired, white space collapsed, lower case."""
    return whitespace(text).lower()


def whitespace(text: str) -> str:
    """Repaired, white space collapsed, case kept."""
    return " ".join(fix_text(text).split())


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def canonicalize(text: str) -> str:
    """SigLIP's (Zhai et al. 2023): repaired, ASCII punctuation removed, lower case."""
    text = fix_text(text).replace("_", " ").translate(_NO_PUNCTUATION)
    return " ".join(text.lower().split())


NORMALIZERS = {"clip": lower, "whitespace": whitespace, "canonicalize": canonicalize}
