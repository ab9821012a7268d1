"""Spoken English prompts and utterances of two Debian packages, downloaded into the cache on first use."""

from __future__ import annotations

import re
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Rows, split_of


def _numbered(first: int, step: int, words: str, prefix: str = "") -> dict[str, str]:
    """File names counted from `first` by `step`, and the words they stand for: "h-1" -> "first", "h-2" -> "second" ..."""
    return {f"{prefix}{first + n * step}": word for n, word in enumerate(words.split())}


# text of the prompts whose file name differs from their words
_PROMPTS = {
    **_numbered(
        0,
        1,
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen",
    ),
    **_numbered(20, 10, "twenty thirty forty fifty sixty seventy eighty ninety"),
    **_numbered(
        1,
        1,
        "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
        "fifteenth sixteenth seventeenth eighteenth nineteenth",
        "h-",
    ),
    **_numbered(
        20, 10, "twentieth thirtieth fortieth fiftieth sixtieth seventieth eightieth ninetieth", "h-"
    ),
    **_numbered(0, 1, "Sunday Monday Tuesday Wednesday Thursday Friday Saturday", "day-"),
    **_numbered(
        0,
        1,
        "January February March April May June July August September October November December",
        "mon-",
    ),
    **{f"h-{name}": name + "th" for name in ("hundred", "thousand", "million", "billion")},
    "a-m": "a m",
    "p-m": "p m",
    "oclock": "o'clock",
}
_ALPHABET = _numbered(
    ord("a"),
    1,
    "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey x-ray yankee zulu",
)


def open_voice(split: str | None = None, exact: bool = True) -> Rows:
    """Spoken English words and sentences: telephone prompts by one speaker, 10 transcribed utterances by others.

    Each row: `id`, `audio` (WAV path), `text` (transcript), `class` ("digits", "letters", "phonetic", "prompts", "cards",
    "books"), `exact` (whether the file name is the transcript), `split` (by a hash of the text, about 80 / 8 / 12).
    The prompts are 8 kHz, mono; their text is the file name, which for sentences is only an approximation
    ("conf-onlyperson"). The utterances are 16 kHz, with transcripts.

    Args:
        split: "train", "validation" or "test"; None for all.
        exact: False adds the prompts whose text is only an approximation.
    """
    root = fetch.cached("voice", _fill) / "usr/share"
    records = _prompts(root / "asterisk/sounds/en_US_f_Allison", exact)
    spoken = root / "pocketsphinx/test/data"
    records += _utterances("cards", spoken / "cards/cards.transcription")
    records += _utterances("books", spoken / "librivox/transcription")
    for record in records:
        record["split"] = split_of(record["text"].casefold())
    rows = Rows(records, name="voice")
    return rows if split is None else rows.split(split)


def _fill(folder: Path) -> None:
    for package in ("asterisk-core-sounds-en-wav", "pocketsphinx-testdata"):
        fetch.deb(package, folder)


def _prompts(root: Path, exact: bool) -> list[dict]:
    records = []
    for path in sorted(root.rglob("*.wav")):
        folder, name = path.relative_to(root).parent.as_posix(), path.stem
        known = {
            "digits": _PROMPTS.get(name, name),
            "letters": None if name.startswith("ascii") or "-" in name else name,
            "phonetic": _ALPHABET.get(str(ord(name[0]))),
        }.get(folder)
        if folder == "silence" or "tone" in name or name.startswith("beep") or not (known or not exact):
            continue
        record = {
            "id": f"{folder}/{name}".removeprefix("./"),
            "audio": str(path),
            "text": known or re.sub(r"[-_]+", " ", name),
            "class": folder if folder in ("digits", "letters", "phonetic") else "prompts",
            "exact": known is not None,
        }
        records.append(record)
    return records


def _utterances(kind: str, transcripts: Path) -> list[dict]:
    records = []
    for text, name in re.findall(r"<s>(.*?)</s>\s*\((.+?)\)", transcripts.read_text("ascii")):
        audio = str(transcripts.with_name(f"{name}.wav"))
        text = " ".join(text.split())
        records.append({"id": f"{kind}/{name}", "audio": audio, "text": text, "class": kind, "exact": True})
    return records
