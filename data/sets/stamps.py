"""Tux Paint's stamps: captioned images, captions in 77 languages, spoken captions in a dozen.

The Debian package `tuxpaint-stamps-default` (161 MB, GPL-2) is fetched into the cache on first use; it is not
part of worldtokens. Beside an image `x.png` lie `x.txt` (first line English, then `fr.utf8=...`),
`x_desc.ogg` (spoken English), `x_desc_fr.ogg` (spoken French) and `x.ogg` (the noise the thing makes).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Rows, kin, side_of
from worldtokens.errors import InputError

PACKAGE = "tuxpaint-stamps-default"
# the languages of most recordings, and English
SPOKEN = ("en", "fr", "ro", "ru", "bg", "ca", "es", "el", "be", "da")
_CAPTION = re.compile(r"([A-Za-z_@]+)\.utf8=(.*)")
_SPEECH = re.compile(r"(?P<stem>.+)_desc(?:_(?P<language>[A-Za-z_]+))?")


def open_stamps(
    split: str | None = None,
    languages: Sequence[str] = ("en",),
    audio: str | None = None,
    drawings: bool = False,
    folder: str | Path | None = None,
) -> Rows:
    """The 785 stamps that are PNG images, in order of their paths; with `drawings`, all 950.

    Each row: `id` (path below the stamps' folder, no ending), `image` (PNG path), `text` (the captions in
    `languages`, a list), `audio` (paths of the captions spoken in `languages`, a list), `captions` (language -> caption,
    all), `speech` (language -> path of a spoken caption, OGG 44.1 kHz), `sound` (path of the noise it makes; most rows have none), `class` (folder, e.g. "animals/birds"), `split`.
    165 stamps are SVG drawings only. Nothing here renders SVG, so they are left out unless asked for, and then have `svg`
    (path) in place of `image`: their captions and speech are still pairs of text and sound.

    Stamps with the same English caption ("A flower.") and the stamps of one numbered series ("frog", "frog-1") fall on
    one side of the split, which is by hash, about 80 / 8 / 12.

    Args:
        split: "train", "validation" or "test"; None for all.
        languages: whose captions and recordings to give as `text` and `audio`. Rows with none of them lack that column.
        audio: a language, e.g. "fr": `audio` is the one path of the caption spoken in it; rows without are left out.
        drawings: True adds the stamps that are SVG only.
        folder: an unpacked copy of the stamps' folder, instead of fetching the package.
    """
    if folder is None:
        root = fetch.cached("stamps", lambda work: fetch.deb(PACKAGE, work)) / "usr/share/tuxpaint/stamps"
    else:
        root = Path(folder).expanduser()
    languages = (languages,) if isinstance(languages, str) else tuple(languages)
    records = []
    everything = _records(str(root))
    for record in everything:
        if "image" not in record and not drawings:
            continue
        texts = [record["captions"][language] for language in languages if language in record["captions"]]
        record = dict(record)
        if texts:
            record["text"] = texts
        spoken = [record["speech"][language] for language in languages if language in record["speech"]]
        if spoken:
            record["audio"] = spoken
        if audio is not None:
            if audio not in record["speech"]:
                continue
            record["audio"] = record["speech"][audio]
        records.append(record)
    _check_known(everything, "languages", languages, "captions")
    _check_known(everything, "audio", () if audio is None else (audio,), "speech")
    rows = Rows(records, name="stamps")
    return rows if split is None else rows.split(split)


def open_spoken(
    split: str | None = None, languages: Sequence[str] = SPOKEN, folder: str | Path | None = None
) -> Rows:
    """The stamps' captions, a row each: the image, the words in one language, and the recording of these very words.

    Each row: `id` ("animals/birds/owl fr"), `stamp` (its id in `open_stamps`, shared by the rows that show the same
    thing), `image` (PNG path; rows of stamps that are SVG only lack it), `text`, `audio` (OGG path; captions that nobody
    spoke lack it), `language`, `class`, `split` (the stamp's).

    Args:
        split: "train", "validation" or "test"; None for all.
        languages: which captions.
        folder: as in `open_stamps`.
    """
    languages = (languages,) if isinstance(languages, str) else tuple(languages)
    records = []
    for stamp in open_stamps(split, languages, drawings=True, folder=folder):
        for language in languages:
            if language not in stamp["captions"]:
                continue
            record = {
                "id": f"{stamp['id']} {language}",
                "stamp": stamp["id"],
                "text": stamp["captions"][language],
            }
            if "image" in stamp:
                record["image"] = stamp["image"]
            if language in stamp["speech"]:
                record["audio"] = stamp["speech"][language]
            record |= {"language": language, "class": stamp["class"], "split": stamp["split"]}
            records.append(record)
    return Rows(records, name="spoken" if split is None else f"spoken/{split}")


def _check_known(records: Sequence[dict], argument: str, languages: Sequence[str], column: str) -> None:
    known = {language for record in records for language in record[column]}
    unknown = [language for language in languages if language not in known]
    if unknown:
        raise InputError(
            f"stamps: {argument}: found {unknown[0]!r}, expected some of {', '.join(sorted(known))}"
        )


def read_captions(path: Path) -> dict[str, str]:
    """The captions of one stamp's .txt file, language -> text; the first line is English."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}; expected a UTF-8 caption file. Fetch the set again") from error
    captions = {"en": lines[0].strip()} if lines and lines[0].strip() else {}
    for line in lines[1:]:
        if (match := _CAPTION.fullmatch(line.strip())) and match[2].strip():
            captions.setdefault(match[1], match[2].strip())
    return captions


@functools.lru_cache(maxsize=2)
def _records(root: str) -> tuple[dict, ...]:
    base = Path(root)
    sounds: dict[str, dict[str, str]] = {}
    for path in sorted(base.rglob("*.ogg")):
        name = path.relative_to(base).as_posix().split(".ogg")[0]  # one file ends in ".ogg.ogg"
        if match := _SPEECH.fullmatch(name):
            sounds.setdefault(match["stem"], {})[match["language"] or "en"] = str(path)
        else:
            sounds.setdefault(name, {})["sound"] = str(path)
    records = []
    # Images without captions, such as x_mirror.png, show another stamp from its other side: not rows.
    for captions in sorted(base.rglob("*.txt")):
        path = next((p for p in map(captions.with_suffix, (".png", ".svg")) if p.is_file()), None)
        if path is None:
            continue
        stem = path.relative_to(base).with_suffix("").as_posix()
        speech = dict(sounds.get(stem, ()))
        kind = "image" if path.suffix == ".png" else "svg"
        record = {"id": stem, kind: str(path), "class": path.parent.relative_to(base).as_posix()}
        record["captions"] = read_captions(captions)
        sound = speech.pop("sound", None)
        record["speech"] = speech
        if sound:
            record["sound"] = sound
        records.append(record)
    if not records:
        raise InputError(
            f"{base}: found no captioned image, expected Tux Paint's stamps. Remove that folder and open the set "
            "again, or give folder= an unpacked copy's usr/share/tuxpaint/stamps"
        )
    for record, group in zip(records, kin(map(_kin_keys, records)), strict=True):
        record["split"] = side_of(group)
    return tuple(records)


def _kin_keys(record: dict) -> tuple[str, str]:
    """Stamps with one English caption, or of one numbered series ("frog", "frog-1"), are alike."""
    series = re.sub(r"[\W_]*\d*$", "", record["id"].rpartition("/")[2]).casefold()
    name = f"{record['class']}/{series}"
    return name, "caption " + record["captions"].get("en", name).casefold()
