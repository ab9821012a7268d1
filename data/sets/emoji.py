"""The embedded set: 3,786 emoji images with captions in six languages, read from `emoji.zip`.

The pack is a plain zip file with three members: `README.txt`, `index.jsonl` (one line per image) and `pictures.bin`, the
concatenated PNG files, stored uncompressed so that an image is one seek and one read. `scripts/pack_emoji.py` builds it;
`EMOJI_LICENSE.md` names the sources and licences.
"""

from __future__ import annotations

import functools
import json
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

from worldtokens.data.rows import Packed, Rows
from worldtokens.errors import InputError

PACK = Path(__file__).parent.parent / "emoji.zip"
LANGUAGES = ("en", "fr", "de", "es", "ru", "ja")

_TONES = {"1F3FB", "1F3FC", "1F3FD", "1F3FE", "1F3FF"}
_IGNORED = {"200D", "2640", "2642", "27A1", *_TONES}  # joiner, woman, man, facing right, skin tones
_PEOPLE = {"1F468": "P", "1F469": "P", "1F9D1": "P"}  # man, woman, person
_PEOPLE |= {"1F466": "C", "1F467": "C", "1F9D2": "C", "1F474": "O", "1F475": "O", "1F9D3": "O"}  # child, old
# the same concept under unrelated code points, with near-identical images; the values are names as `emoji_concept` gives
_SAME = {
    "1F46B": "P-1F91D-P",  # two people holding hands
    "1F46C": "P-1F91D-P",
    "1F46D": "P-1F91D-P",
    "1F491": "P-2764-P",  # couple with heart
    "1F48F": "P-2764-1F48B-P",  # kiss
    "1F46A": "family",
    "1F478": "1FAC5",  # princess, prince, person with crown
    "1F934": "1FAC5",
    "1F930": "1FAC4",  # pregnant woman, man, person
    "1FAC3": "1FAC4",
    "1F385": "P-1F384",  # Santa Claus, Mrs. Claus, Mx Claus
    "1F936": "P-1F384",
    "1F57A": "1F483",  # man, woman dancing
    "1F64E": "1F64D",  # pouting, frowning: images that differ by one line
    "1F1E7-1F1FB": "1F1F3-1F1F4",  # Bouvet Island has Norway's flag
}


def emoji_id(code: str) -> str:
    """The code point sequence that both sources are joined on: "2764-fe0f" -> "2764"."""
    return "-".join(part for part in code.upper().split("-") if part != "FE0F")


def emoji_concept(base: str) -> str:
    """Name of the concept of a base emoji, without gender, direction and persons.

    "woman firefighter", "man firefighter" and "firefighter" are one concept, and so are all families: their images are
    near duplicates. Splits are by concept, which never separates the variants of a base emoji.
    """
    parts = [_PEOPLE.get(part, part) for part in base.split("-") if part not in _IGNORED]
    if len(parts) > 1 and set(parts) <= {"P", "C"}:
        return "family"
    key = "-".join(parts)
    return _SAME.get(key, key)


def emoji_captions(label: str, tags: Sequence[str], skin_tone: bool = False) -> list[str]:
    """The captions of one emoji in one language.

    1. the label: "grinning face"
    2. label and keywords: "grinning face: cheerful, cheery, grin, happy ..." (a comma instead of the colon if the label has
       a colon)
    3. the keywords: "cheerful, cheery, grin, happy ..." - not for a skin-tone variant, since all variants share them

    Keywords contained in the label are dropped from 2 and 3.

    Args:
        label: the emoji's name.
        tags: its keywords.
        skin_tone: True for an image with a skin tone.
    """
    name = label.casefold()
    rest = ", ".join(tag for tag in tags if tag.casefold() not in name)
    if not rest:
        return [label]
    captions = [label, f"{label}{',' if ':' in label else ':'} {rest}"]
    return captions if skin_tone else [*captions, rest]


@functools.lru_cache(maxsize=2)
def _index(pack: str) -> tuple[int, list[dict]]:
    """Offset of the first image in the pack, and the lines of the index."""
    try:
        with zipfile.ZipFile(pack) as archive:
            member = archive.getinfo("pictures.bin")
            with open(pack, "rb") as file:
                # the local header repeats name and extra field with their own lengths (APPNOTE 4.3.7)
                file.seek(member.header_offset + 26)
                start = file.tell() + 4 + sum(struct.unpack("<HH", file.read(4)))
            return start, [json.loads(line) for line in archive.read("index.jsonl").splitlines()]
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{pack}: {error}; expected the packed emoji set. Install worldtokens again, or build the pack with "
            "`python scripts/pack_emoji.py` in a checkout."
        ) from error


def open_emoji(split: str | None = None, languages: Sequence[str] = ("en",), skin_tones: bool = True) -> Rows:
    """The emoji set, or one of its fixed splits.

    Each row: `id` (hex code points), `base` (the id without skin tone), `concept` (the split is by concept), `image` (PNG
    bytes, 64 x 64), `text` (list of captions, see `emoji_captions`; those of the first language first), `labels`
    (language -> label), `tags` (keywords, first language), `group`, `subgroup`, `char` (the emoji as a character), `split`.

    Args:
        split: "train", "validation" or "test"; None for all.
        languages: of the captions, from `LANGUAGES`.
        skin_tones: False drops the 1,875 skin-tone variants of other images.
    """
    languages = (languages,) if isinstance(languages, str) else tuple(languages)
    unknown = [language for language in languages if language not in LANGUAGES]
    if unknown or not languages:
        raise InputError(f"emoji: languages {languages}; expected one or more of {', '.join(LANGUAGES)}")
    start, index = _index(str(PACK))
    tags = {line["id"]: line["tags"] for line in index if "tags" in line}
    records = []
    for line in index:
        skin_tone = line["id"] != line["base"]
        if skin_tone and not skin_tones:
            continue
        keywords = tags[line["base"]]
        captions = [
            emoji_captions(line["labels"][lang], keywords.get(lang, ()), skin_tone) for lang in languages
        ]
        record = {
            "id": line["id"],
            "base": line["base"],
            "concept": line["concept"],
            "image": Packed(str(PACK), start + line["start"], line["size"]),
            "text": list(dict.fromkeys(text for group in captions for text in group)),
            "labels": {language: line["labels"][language] for language in languages},
            "tags": keywords.get(languages[0], []),
            "group": line["group"],
            "subgroup": line["subgroup"],
            "char": line["char"],
            "split": line["split"],
        }
        records.append(record)
    rows = Rows(records, name="emoji")
    return rows if split is None else rows.split(split)
