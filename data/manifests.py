"""A user's own files as `Rows`: a folder, a CSV or TSV table, or JSON lines.

    rows = open_rows("photos/")                                     # cat.jpg beside cat.txt, or a telling file name
    rows = open_rows("pairs.csv", columns={"image": "filepath", "text": "title"})
    rows = open_rows("pairs.jsonl", on_error="skip"); print(rows.report())

A row that cannot be used stops the reading with an `InputError` that names file and line; with
`on_error="skip"` it is left out, counted, and listed in `rows.skipped`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from worldtokens.data.rows import Rows
from worldtokens.data.tables import (
    FILES,
    KIND,
    TABLES,
    Reading,
    read_json_lines,
    read_lines,
    read_table,
    several,
)
from worldtokens.errors import InputError

_CAPTION = (".txt", ".caption")
_CAMERA = re.compile(r"(img|dsc[nf]?|pxl|vid|mov|gopr|image|photo|image|screenshot|untitled|frame)[\d ]*")
_MAGIC = (
    (rb"\x89PNG", ".png"),
    (rb"\xff\xd8\xff", ".jpg"),
    (rb"GIF8", ".gif"),
    (rb"RIFF....WEBP", ".webp"),
    (rb"RIFF....WAVE", ".wav"),
    (rb"OggS", ".ogg"),
    (rb"fLaC", ".flac"),
)


def open_rows(
    source: str | Path,
    *,
    split: str | None = None,
    languages: Sequence[str] | None = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    files: Sequence[str] = FILES,
    encoding: str = "utf-8",
    encoding_errors: str = "strict",
    on_error: str = "raise",
    check: bool = True,
    merge: str | None = None,
    delimiter: str | None = None,
    header: Sequence[str] | None = None,
    quotes: bool = True,
    captions_from_names: bool = True,
) -> Rows:
    """Rows from a folder, a .csv/.tsv/.jsonl file, or a named set such as "emoji".

    A name of `data.samples` wins over a folder of that name; write "./emoji" for the folder.

    *Folder*: files with one stem in one subfolder make one row ("x.jpg", "x.wav"); hidden files are passed over. The
    caption is "x.txt", "x.caption" or "x.jpg.txt", each line of it one caption; without one, the words of the file
    name (see `words_of_name`); "IMG_2041.jpg" has none, and its row no text. `class` is the subfolder. A folder that holds
    "metadata.csv" or "metadata.jsonl" is read through that file.
    *Table*: quoted fields may hold commas, quotes and line breaks. An empty cell means that the row lacks that column.
    *JSON lines*: one object a line; `text` may be a list of captions.
    Paths are relative to the manifest. A column `file_name` stands for image, audio ... by the file's ending. Every row has an `id`: its first file's path as written, else its number.

    Args:
        split: one side of `Rows.split`; None for all rows.
        languages: for named sets, whose captions.
        columns: our column name -> the file's, e.g. {"image": "filepath"}; a list of the file's columns for several
            captions. Other columns keep their names. A column for a front-end of your own is named here, {"row": "row"}.
        files: columns (our names) whose values are paths.
        encoding: of the text files. A byte-order mark is dropped.
        encoding_errors: "strict": a byte that does not decode is an error; "replace": it becomes U+FFFD and the line
            is counted in `rows.replaced`.
        on_error: "raise", or "skip" rows that cannot be used.
        check: whether each file has to exist.
        merge: make one row of all that share this column's value, e.g. "image" where each line is another caption.
        delimiter: of a table; by default a tab for .tsv, else comma, or semicolon where the first line has no comma.
        header: the columns' names, for a table that does not begin with them.
        quotes: False reads a table's quote marks as plain characters.
        captions_from_names: False gives no text to a file without a caption file.

    Raises:
        InputError: with file, line, what was found and expected.
    """
    from worldtokens.data import samples

    if str(source) in samples.SETS:
        if columns or merge or header or delimiter:
            raise InputError(f"{source!r} is a named set: columns, merge, header and delimiter are for files")
        options = {} if languages is None else {"languages": languages}
        return samples.open(str(source), split=split, **options)
    path = Path(source).expanduser()
    if not path.exists():
        raise InputError(f"{source}: no such file or folder, and no named set ({', '.join(samples.SETS)})")
    if languages:
        raise InputError(
            f"{source}: languages= is for named sets; in a file, name the text's column with columns="
        )
    reading = Reading(
        columns or {}, tuple(files), encoding, encoding_errors, on_error, check, merge, delimiter, header, quotes,
        captions_from_names,
    )  # fmt: skip
    if path.is_dir():
        tables = [path / name for name in ("metadata.csv", "metadata.jsonl") if (path / name).is_file()]
        if tables:
            path = tables[0]
    if path.is_dir():
        records = list(_folder(path, reading))
    elif path.suffix.lower() in (".jsonl", ".ndjson"):
        records = list(read_json_lines(path, reading))
    elif path.suffix.lower() in TABLES:
        records = list(read_table(path, reading))
    else:
        raise InputError(
            f"{path}: found a {path.suffix or 'nameless'} file, expected a folder, .csv, .tsv or .jsonl"
        )
    records = _merged(records, merge) if merge else records
    if not records:
        why = f"; {len(reading.skipped)} skipped, the first: {reading.skipped[0]}" if reading.skipped else ""
        raise InputError(f"{path}: found no usable row{why}")
    rows = Rows(records, name=str(source), skipped=reading.skipped, replaced=reading.replaced)
    return rows if split is None else rows.split(split)


def words_of_name(stem: str) -> str:
    """The words of a file name: "Red-apple_03" -> "Red apple", "blueCar" -> "blue Car"; "" for "IMG_2041".

    Separators and capitals within a word divide; numbers at the end are counters and fall away; a name that a
    camera gave, or without a word of two letters (of any script), says nothing.
    """
    name = re.sub(r"[\W_]+", " ", unicodedata.normalize("NFC", stem))
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).strip()
    if _CAMERA.fullmatch(name.casefold()):
        return ""
    name = re.sub(r"(\s*\d+)+$", "", name)
    if not re.search(r"[^\W\d_]{2}|[\u3040-\u9fff]", name):
        return ""
    digits = sum(char.isdigit() for char in name)
    return "" if digits > len(name) / 3 else name  # a hash or a serial number


def _folder(root: Path, reading: Reading) -> Iterator[dict]:
    found: dict[tuple[str, str], list[Path]] = {}  # (folder, stem) -> media files
    captions: dict[tuple[str, str], Path] = {}
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        # macOS writes names in decomposed form; a caption made elsewhere has the composed one.
        stem, folder = unicodedata.normalize("NFC", path.stem), "/".join(parts[:-1])
        if path.suffix.lower() in _CAPTION:
            captions[folder, stem] = path
        elif path.suffix.lower() in KIND:
            found.setdefault((folder, stem), []).append(path)
    if not found:
        raise InputError(
            f"{root}: found no image, sound, clip or mesh (looked for {', '.join(sorted(KIND))}). "
            "Give a folder that holds some, or a .csv or .jsonl file that names them."
        )
    for (folder, stem), paths in found.items():
        kinds = [KIND[path.suffix.lower()] for path in paths]
        # x.jpg and x.wav belong together; x.jpg and x.png are two images with one caption.
        groups = [paths] if len(set(kinds)) == len(kinds) else [[path] for path in paths]
        for group in groups:
            names = [unicodedata.normalize("NFC", path.name) for path in group]
            sidecar = next(
                (captions[folder, name] for name in (stem, *names) if (folder, name) in captions), None
            )
            row = {"id": group[0].relative_to(root).as_posix()}
            row |= {KIND[path.suffix.lower()]: str(path) for path in group}
            if folder:
                row["class"] = folder
            if sidecar:
                lines = list(read_lines(sidecar, reading))
                texts = [text.strip() for _, text, _ in lines if text.strip()]
                if not texts or any(bad for _, _, bad in lines):
                    fault = next((bad for _, _, bad in lines if bad), None)
                    reading.bad(
                        fault or f"{sidecar}: found no caption, expected text. Write one or delete the file"
                    )
                    continue
                row["text"] = texts if len(texts) > 1 else texts[0]
            elif reading.captions_from_names and (words := words_of_name(stem)):
                row["text"] = words
            yield row


def _merged(records: list[dict], column: str) -> list[dict]:
    """One record for each value of `column`, captions gathered in order without repeats."""
    merged: dict = {}
    for number, record in enumerate(records):
        value = record.get(column)
        key = (number,) if value is None else str(value)
        if key not in merged:
            merged[key] = record
        elif "text" in record:
            texts = several(merged[key].get("text", [])) + several(record["text"])
            merged[key]["text"] = list(dict.fromkeys(texts))
    return list(merged.values())


def write_folder(rows: Rows, folder: str | Path, column: str = "image") -> list[Path]:
    """Writes each row's image as a file and its captions as a .txt beside it: a folder that `open_rows` reads.

    Files are named by the row's `id`, with the ending that the bytes call for; a file that has this name
    already is written over. Line breaks inside a caption become spaces.

    Args:
        rows: rows whose `column` holds bytes or a path.
        folder: made where absent.
        column: which column to write.

    Returns:
        The files' paths, in order of `rows`; rows without `column` are passed over.
    """
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[Path, None] = {}
    for number, row in enumerate(rows):
        if column not in row:
            continue
        value = row[column]
        data = value if isinstance(value, bytes) else Path(value).read_bytes()
        if isinstance(value, bytes):
            ending = next((ending for magic, ending in _MAGIC if re.match(magic, data, re.DOTALL)), ".bin")
        else:
            ending = Path(value).suffix
        stem = re.sub(r"[^\w.-]+", "_", str(row.get("id", number)).removesuffix(ending))
        place = folder / (stem + ending)
        if place in written:
            raise InputError(f"{rows.name}: two rows would be written to {place}; their ids have to differ")
        place.write_bytes(data)
        if texts := several(row.get("text", [])):
            lines = "\n".join(" ".join(text.split()) for text in texts)
            place.with_suffix(".txt").write_text(lines + "\n", "utf-8")
        written[place] = None
    return list(written)
