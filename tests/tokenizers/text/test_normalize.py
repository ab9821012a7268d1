"""Normalisation equals open_clip's and ftfy's for every character and for random text."""

from __future__ import annotations

import random
import unicodedata

from worldtokens.tokenizers.text import normalize


def test_every_character_is_normalised_as_by_ftfy():
    from open_clip.tokenizer import _clean_lower

    # ideographs, Hangul and the empty planes by samples, all else one by one
    dull = [(0x3400, 0x9F00), (0xAC00, 0xD7A0), (0xD810, 0xDFF0), (0xE000, 0xF8F0), (0x17000, 0x1B000)]
    for code in [*range(0x1FB00), *range(0x1FB00, 0x110000, 997), *range(0xE0000, 0xE0200)]:
        if code % 64 and any(a <= code < b for a, b in dull):
            continue
        for frame in ("a{}b", "Я {} é"):
            text = frame.format(chr(code))
            assert normalize.lower(text) == _clean_lower(text), hex(code)


def test_random_text_is_normalised_as_by_ftfy():
    """Mojibake depends on neighbours: random sequences of the characters in ftfy's own patterns."""
    from ftfy.badness import MOJIBAKE_CATEGORIES
    from open_clip.tokenizer import _clean_lower

    rng = random.Random(0)
    classes = "".join(f"{k}" for k in MOJIBAKE_CATEGORIES.values())
    hard = [c for c in map(chr, range(0x80, 0x2600)) if c in classes]
    tame = [c for c in map(chr, range(0x20, 0x600)) if not normalize._unsafe(c)]
    for pool in (tame, hard + tame[:95], hard):
        texts = [
            "".join(rng.choices(pool, k=rng.randint(2, 7)) + rng.choices(" -aÉéГ’", k=3)) for _ in range(4000)
        ]
        texts = [unicodedata.normalize("NFC", t) for t in texts]  # as a batch, to test the proof by table
        wanted = [_clean_lower(t) for t in texts]
        for text, whole, want in zip(texts, normalize.fix_texts(texts), wanted, strict=True):
            assert normalize.lower(text) == want, text
            assert " ".join(whole.split()).lower() == want, text
