"""English-Spanish Bible verses, downloaded into the cache on first use."""

from __future__ import annotations

import functools
import itertools
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Rows, connected_groups, split_of
from worldtokens.errors import InputError

_MODULES = {"en": "engKJV2006eb", "es": "spaRV1909eb"}
# whole books held out by `open_verses(books=True)`: of several genres, from both testaments
HELD_OUT_BOOKS = {
    "validation": ("Amos", "Titus", "1Pet"),
    "test": ("Ruth", "Esth", "Jonah", "Mal", "Phil", "Jas", "1John"),
}
_BOOK = re.compile(r'osisID="(\w+)"[^>]*type="book"')
_CHAPTER = re.compile(r'<chapter [^>]*osisID="(\w+\.\d+)"[^>]*sID=')
# editorial headings are dropped, titles of Psalms kept: the Spanish text has them in the verse
_DROPPED = re.compile(r"<note\b.*?</note>|<title\b(?![^>]*canonical=\"true\").*?</title>", re.DOTALL)


def open_verses(
    split: str | None = None,
    languages: tuple[str, str] = ("en", "es"),
    books: bool = False,
    unit: str = "verse",
) -> Rows:
    """31,084 verse pairs: the King James Version (1769 text) and the Reina-Valera of 1909, both public domain.

    Each row: `id` ("Gen.1.1"), `en`, `es`, `text` (the first of `languages`), `target` (the second), `book`, `split`.
    Notes and headings are dropped. The split is by hash, about 80 / 8 / 12; verses that are identical in either language
    are in one split. Parallel passages of the Gospels count as different.

    Args:
        split: "train", "validation" or "test"; None for all.
        languages: source (`text`) and target (`target`) language, of "en" and "es".
        books: True holds out whole books (`HELD_OUT_BOOKS`), about 670 test verses; those that also occur in other books,
            in either language, are dropped.
        unit: "verse", or "chapter" (1,189 rows, `id` "Gen.1", one verse per line); chapters also hold out whole books.
    """
    if unit not in ("verse", "chapter"):
        raise InputError(f"verses: unit {unit!r}, expected 'verse' or 'chapter'")
    if sorted(languages) not in (["en"], ["es"], ["en", "es"]):
        raise InputError(f"verses: languages {languages}; expected 'en', 'es' or both")
    source, target = (*languages, *languages)[:2]

    def fill(folder: Path) -> None:
        for package in ("sword-text-kjv", "sword-text-sparv"):
            fetch.deb(package, folder)

    records = _verse_records(str(fetch.cached("verses", fill) / "usr/share/sword/modules/texts/ztext"))
    if books or unit == "chapter":
        records = _by_book(records)
    records = _chapters(records) if unit == "chapter" else records
    rows = Rows(
        [{**record, "text": record[source], "target": record[target]} for record in records], name="verses"
    )
    return rows if split is None else rows.split(split)


def _by_book(records: Sequence[dict]) -> list[dict]:
    split = {book: name for name, books in HELD_OUT_BOOKS.items() for book in books}
    known = {r[language].casefold() for r in records if r["book"] not in split for language in _MODULES}
    return [
        {**r, "split": split.get(r["book"], "train")}
        for r in records
        if r["book"] not in split or not {r[language].casefold() for language in _MODULES} & known
    ]


@functools.lru_cache(maxsize=1)
def _verse_records(root: str) -> tuple[dict, ...]:
    records = []
    for testament in ("ot", "nt"):
        english, spanish = (read_ztext(Path(root) / name, testament) for name in _MODULES.values())
        book = chapter = ""
        verse = 0
        for one, other in zip(english, spanish, strict=True):
            if match := _BOOK.search(one):
                book = match[1]
            if match := _CHAPTER.search(one):
                chapter, verse = match[1], 0
                continue
            verse += 1
            pair = {"en": plain_verse(one), "es": plain_verse(other)}
            if all(pair.values()):
                records.append({"id": f"{chapter}.{verse}", **pair, "book": book})
    groups = connected_groups(
        (row["id"], "en " + row["en"].casefold(), "es " + row["es"].casefold()) for row in records
    )
    for record, group in zip(records, groups, strict=True):
        record["split"] = split_of(group)
    return tuple(records)


def _chapters(verses: Sequence[dict]) -> list[dict]:
    chapters = []
    for id, rows in itertools.groupby(verses, key=lambda row: row["id"].rpartition(".")[0]):
        rows = list(rows)
        texts = {language: "\n".join(row[language] for row in rows) for language in _MODULES}
        chapters.append({"id": id, **texts, "book": rows[0]["book"], "split": rows[0]["split"]})
    return chapters


def read_ztext(folder: Path, testament: str) -> list[str]:
    """The entries of a SWORD zText module in order: headings, chapter starts and verses, with markup.

    `.bzs` lists compressed blocks (offset, size, raw size), `.bzv` entries within a block (block, offset, length), `.bzz`
    has the blocks.

    Args:
        folder: the module's folder.
        testament: "ot" or "nt".
    """
    try:
        blocks, entries, data = (
            (folder / f"{testament}.{end}").read_bytes() for end in ("bzs", "bzv", "bzz")
        )
        raw = [
            zlib.decompress(data[start : start + size])
            for start, size, _ in struct.iter_unpack("<III", blocks)
        ]
        found = struct.iter_unpack("<IIH", entries)
        return [raw[block][start : start + size].decode() if size else "" for block, start, size in found]
    except (OSError, struct.error, zlib.error, IndexError, UnicodeDecodeError) as error:
        raise InputError(
            f"{folder}: {error}; expected a SWORD zText module. Remove the folder and open the set again"
        ) from error


def plain_verse(markup: str) -> str:
    """A verse without OSIS markup, notes and editorial headings."""
    text = _DROPPED.sub("", markup)
    # the Spanish module has no spaces around added words and between some marked ones
    text = re.sub(r"(?<=[\w>,;:.])(?=<(?:w|transChange)\b)|(?<=</transChange>)(?=[\w<])", " ", text)
    text = re.sub(r"<(?:lb|l|lg|div)\b[^>]*>", " ", text)
    text = re.sub(r"<[^>]+>", "", text).replace("¶", " ")
    text = re.sub(r"\s+([,.;:!?)])", r"\1", " ".join(text.split()))
    return re.sub(r"([(\[¡¿]) ", r"\1", text)
