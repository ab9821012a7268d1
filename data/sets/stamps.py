"""Tux Paint's stamps: captioned images, captions in 77 languages, spoken captions in a dozen.

The Debian package `tuxpaint-stamps-default` (161 MB, GPL-2) is downloaded into the cache on first use; it is not part of
worldtokens. An image `x.png` has `x.txt` (first line English, then `fr.utf8=...`), `x_desc.ogg` (spoken English),
`x_desc_fr.ogg` (spoken French) and `x.ogg` (a sound effect).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Rows, connected_groups, split_of
from worldtokens.errors import InputError

PACKAGE = "tuxpaint-stamps-default"
# English and the languages with most recordings
SPOKEN_LANGUAGES = ("en", "fr", "ro", "ru", "bg", "ca", "es", "el", "be", "da")
_CAPTION = re.compile(r"([A-Za-z_@]+)\.utf8=(.*)")
_SPEECH = re.compile(r"(?P<stem>.+)_desc(?:_(?P<language>[A-Za-z_]+))?")


def open_stamps(
    split: str | None = None,
    languages: Sequence[str] = ("en",),
    audio: str | None = None,
    drawings: bool = False,
    folder: str | Path | None = None,
) -> Rows:
    """The 785 stamps with PNG images, sorted by path; with `drawings`, all 950.

    Each row: `id` (path without extension), `image` (PNG path), `text` (list of captions in `languages`), `audio` (list of
    paths of spoken captions in `languages`), `captions` (language -> caption, all languages), `speech` (language -> path of
    the spoken caption, OGG 44.1 kHz), `sound` (path of a sound effect; most rows have none), `class` (folder, e.g.
    "animals/birds"), `split`. 165 stamps are SVG drawings only. SVG cannot be rendered here, so they are dropped by
    default; with `drawings` they have `svg` (path) instead of `image`, and their captions and speech are usable pairs.

    Stamps with the same English caption ("A flower.") and stamps of one numbered series ("frog", "frog-1") are in one
    split, by hash, about 80 / 8 / 12.

    Args:
        split: "train", "validation" or "test"; None for all.
        languages: of the captions and recordings in `text` and `audio`. Rows without any lack that column.
        audio: a language, e.g. "fr": `audio` is then the path of the caption spoken in it; rows without one are dropped.
        drawings: True adds the stamps that are SVG only.
        folder: an unpacked copy of the stamps' folder, instead of downloading the package.
    """
    if folder is None:
        root = fetch.cached("stamps", lambda work: fetch.deb(PACKAGE, work)) / "usr/share/tuxpaint/stamps"
    else:
        root = Path(folder).expanduser()
    languages = (languages,) if isinstance(languages, str) else tuple(languages)
    records = []
    all_records = _records(str(root))
    for record in all_records:
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
    _check_known(all_records, "languages", languages, "captions")
    _check_known(all_records, "audio", () if audio is None else (audio,), "speech")
    rows = Rows(records, name="stamps")
    return rows if split is None else rows.split(split)


def open_spoken(
    split: str | None = None, languages: Sequence[str] = SPOKEN_LANGUAGES, folder: str | Path | None = None
) -> Rows:
    """The stamps' captions, one per row: the image, the caption in one language, and its recording.

    Each row: `id` ("animals/birds/owl fr"), `stamp` (the id in `open_stamps`, shared by all rows of the stamp), `image` (PNG
    path; missing for SVG stamps), `text`, `audio` (OGG path; missing without a recording), `language`, `class`, `split`
    (that of the stamp).

    Args:
        split: "train", "validation" or "test"; None for all.
        languages: of the captions.
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
    """The captions in a stamp's .txt file, language -> text; the first line is English."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}; expected a UTF-8 caption file. Download the set again") from error
    captions = {"en": lines[0].strip()} if lines and lines[0].strip() else {}
    for line in lines[1:]:
        if (match := _CAPTION.fullmatch(line.strip())) and match[2].strip():
            captions.setdefault(match[1], match[2].strip())
    return captions


@functools.lru_cache(maxsize=2)
def _records(root: str) -> tuple[dict, ...]:
    base = Path(root)
    recordings: dict[str, dict[str, str]] = {}
    for path in sorted(base.rglob("*.ogg")):
        name = path.relative_to(base).as_posix().split(".ogg")[0]  # one file has the extension ".ogg.ogg"
        if match := _SPEECH.fullmatch(name):
            recordings.setdefault(match["stem"], {})[match["language"] or "en"] = str(path)
        else:
            recordings.setdefault(name, {})["sound"] = str(path)
    records = []
    # images without captions, such as x_mirror.png, are mirrored variants: not rows
    for captions in sorted(base.rglob("*.txt")):
        path = next((p for p in map(captions.with_suffix, (".png", ".svg")) if p.is_file()), None)
        if path is None:
            continue
        stem = path.relative_to(base).with_suffix("").as_posix()
        speech = dict(recordings.get(stem, ()))
        column = "image" if path.suffix == ".png" else "svg"
        record = {"id": stem, column: str(path), "class": path.parent.relative_to(base).as_posix()}
        record["captions"] = read_captions(captions)
        effect = speech.pop("sound", None)
        record["speech"] = speech
        if effect:
            record["sound"] = effect
        records.append(record)
    if not records:
        raise InputError(
            f"{base}: found no captioned image, expected Tux Paint's stamps. Remove that folder and open the set "
            "again, or give folder= an unpacked copy's usr/share/tuxpaint/stamps"
        )
    for record, group in zip(records, connected_groups(map(_group_keys, records)), strict=True):
        record["split"] = split_of(group)
    return tuple(records)


def _group_keys(record: dict) -> tuple[str, str]:
    """Keys shared by stamps with the same English caption, or of one numbered series ("frog", "frog-1")."""
    series = re.sub(r"[\W_]*\d*$", "", record["id"].rpartition("/")[2]).casefold()
    name = f"{record['class']}/{series}"
    return name, "caption " + record["captions"].get("en", name).casefold()
