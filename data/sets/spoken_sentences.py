"""Speech with transcripts: sentences of a small grammar, synthesised by espeak-ng (see `data.espeak`).

Sentences and voices have the same split: the test rows are unseen sentences by unseen voices.
"""

from __future__ import annotations

import random
from pathlib import Path

from worldtokens.data import espeak, fetch
from worldtokens.data.rows import Rows, split_of

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
    """4,600 English sentences such as "seven small red ships near the bridge", 3 to 8 words, about 65 distinct words.

    Each row: `id`, `audio` (WAV bytes, 22,050 Hz, 1 to 4 s), `text` (lower case, no punctuation), `voice`, `accent`, `split`.
    Every sentence is spoken once. The split is by a hash of the text; the voice is drawn from the voice families of that
    split (as in `spoken_digits`): 4,000 training rows, 200 and 400 rows of unseen sentences by unseen voices.

    Args:
        split: "train", "validation" or "test"; None for all.

    Raises:
        InputError: espeak-ng is not installed and cannot be downloaded.
    """
    rows = Rows(espeak.read_recordings(fetch.cached("spoken_sentences", _fill)), name="spoken_sentences")
    return rows if split is None else rows.split(split)


def sentence(rng: random.Random) -> str:
    """A random sentence of the grammar; its words of one kind are distinct."""
    form = rng.choice(FORMS)
    for kind, words in WORDS.items():
        chosen = rng.sample(words, form.count(f"{{{kind}}}"))
        for word in chosen:
            form = form.replace(f"{{{kind}}}", word, 1)
    return form


def _fill(folder: Path) -> None:
    rng, voices = random.Random(0), espeak.voices()
    by_split = {s: [v for v in voices if split_of(espeak.voice_family(v)) == s] for s in COUNTS}
    left, known, rows = dict(COUNTS), set(), []
    while any(left.values()):
        text = sentence(rng)
        split = split_of(text)
        if text in known or not left[split]:
            continue
        known.add(text)
        left[split] -= 1
        rows.append(
            {
                "id": f"{split}/{COUNTS[split] - left[split]}",
                "text": text,
                "voice": rng.choice(by_split[split]),
                "accent": rng.choice(espeak.ACCENTS),
                "speed": rng.randint(130, 210),
                "pitch": rng.randint(25, 75),
                "split": split,
            }
        )
    espeak.write_recordings(folder, rows)
