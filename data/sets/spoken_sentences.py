"""Sentences of a small grammar as speech with known text: espeak-ng says them, see `data.spoken`.

Sentences and voices are divided by the same split, so that the test rows are unseen sentences in unheard voices.
"""

from __future__ import annotations

import random
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Rows, side_of
from worldtokens.data.sets.spoken_digits import ACCENTS, family, held, keep, voices

COUNTS = {"train": 4000, "validation": 200, "test": 400}
WORDS = {
    "number": ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "many"],
    "size": ["big", "small", "old", "new", "long", "round", "heavy", "little"],
    "colour": ["red", "green", "blue", "yellow", "black", "white", "brown", "orange"],
    "thing": [
        "apple",
        "bird",
        "cat",
        "dog",
        "book",
        "cup",
        "flower",
        "horse",
        "key",
        "ship",
        "spoon",
        "train",
    ],
    "place": ["table", "house", "river", "window", "garden", "bridge", "door", "mountain", "tree", "wall"],
    "where": ["under", "behind", "near", "on", "above", "beside"],
    "does": ["sleeps", "stands", "waits", "falls", "turns", "stays"],
}
FORMS = (
    "{number} {size} {colour} {thing}s {where} the {place}",
    "{number} {colour} {thing}s",
    "the {size} {thing} {does} {where} the {place}",
    "the {colour} {thing} {does}",
    "is the {thing} {where} the {size} {place}",
    "{number} {thing}s and {number} {size} {place}s",
    "where is the {size} {colour} {thing}",
)


def open_spoken_sentences(split: str | None = None) -> Rows:
    """4,600 English sentences such as "seven small red ships near the bridge", 3 to 8 words, about 65 words in all.

    Each row: `id`, `audio` (WAV bytes, 22,050 Hz, 1 to 4 s), `text` (lower case, no punctuation), `voice`, `accent`, `split`.
    Every sentence is said once. A sentence's text decides its side, and its voice is drawn from the families of voices
    on that side (as in the spoken digits): 4,000 to learn from, 200 and 400 of unseen sentences by unheard voices.

    Args:
        split: "train", "validation" or "test"; None for all.

    Raises:
        InputError: espeak-ng is not there and cannot be fetched.
    """
    rows = Rows(held(fetch.cached("spoken_sentences", _fill)), name="spoken_sentences")
    return rows if split is None else rows.split(split)


def sentence(rng: random.Random) -> str:
    """A sentence of the grammar; the words of one kind that it holds differ."""
    form = rng.choice(FORMS)
    for kind, words in WORDS.items():
        chosen = rng.sample(words, form.count(f"{{{kind}}}"))
        for word in chosen:
            form = form.replace(f"{{{kind}}}", word, 1)
    return form


def _fill(folder: Path) -> None:
    rng, heard = random.Random(0), voices()
    by_side = {side: [v for v in heard if side_of(family(v)) == side] for side in COUNTS}
    left, known, rows = dict(COUNTS), set(), []
    while any(left.values()):
        text = sentence(rng)
        side = side_of(text)
        if text in known or not left[side]:
            continue
        known.add(text)
        left[side] -= 1
        rows.append(
            {
                "id": f"{side}/{COUNTS[side] - left[side]}",
                "text": text,
                "voice": rng.choice(by_side[side]),
                "accent": rng.choice(ACCENTS),
                "speed": rng.randint(130, 210),
                "pitch": rng.randint(25, 75),
                "split": side,
            }
        )
    keep(folder, rows)
