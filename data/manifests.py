"""Opens the user's own data as `Rows`: a folder, a CSV or TSV table, or JSON lines.

    rows = open_rows("photos/")                           # captions from cat.txt next to cat.jpg, or from the file name
    rows = open_rows("pairs.csv", columns={"image": "filepath", "text": "title"})
    rows = open_rows("pairs.jsonl", on_error="skip"); print(rows.report())

An invalid row raises an `InputError` that names file and line; with `on_error="skip"` it is skipped and listed in
`rows.skipped`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from worldtokens.data.rows import Rows
from worldtokens.data.tables import (
    COLUMN_OF,
    DELIMITERS,
    FILE_COLUMNS,
    ReadContext,
    as_list,
    read_json_lines,
    read_lines,
    read_table,
)
from worldtokens.errors import InputError

_CAPTION_FILES = (".txt", ".caption")
_CAMERA = re.compile(r"(img|dsc[nf]?|pxl|vid|mov|gopr|image|photo|picture|screenshot|untitled|frame)[\d ]*")
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
    files: Sequence[str] = FILE_COLUMNS,
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
    """Opens a folder, a .csv/.tsv/.jsonl file, or a named set such as "emoji".

    A name of `data.samples` takes precedence over a folder; write "./emoji" for the folder.

    *Folder*: files with the same stem in one folder are one row ("x.jpg", "x.wav"); hidden files are skipped. Captions
    come from "x.txt", "x.caption" or "x.jpg.txt", one per line; without such a file, from the file name (see
    `caption_from_name`). "IMG_2041.jpg" gives no caption, and its row has no `text`. `class` is the subfolder. A folder
    with "metadata.csv" or "metadata.jsonl" is read through that file.
    *Table*: quoted fields may contain commas, quotes and line breaks. An empty cell means that the row lacks that column.
    *JSON lines*: one object per line; `text` may be a list of captions.
    Paths are relative to the manifest. A column `file_name` becomes image, audio ... by the file's extension. Every row
    has an `id`: the path of its first file as written, else its number.

    Args:
        source: a folder, a file, or a name of `data.samples`.
        split: a split of `Rows.split`; None for all rows.
        languages: of the captions, for named sets.
        columns: new column name -> the file's column, e.g. {"image": "filepath"}; a list of the file's columns for several
            captions. Other columns keep their names. Columns for a custom front-end are listed here too, {"row": "row"}.
        files: columns (new names) whose values are paths.
        encoding: of the text files. A byte-order mark is dropped.
        encoding_errors: "strict": an undecodable byte is an error; "replace": it becomes U+FFFD and the line is counted in
            `rows.replaced`.
        on_error: "raise", or "skip" invalid rows.
        check: whether each file must exist.
        merge: merge rows with the same value of this column into one, e.g. "image" if each line is another caption.
        delimiter: of a table; default: a tab for .tsv, else a comma, or a semicolon if the first line has no comma.
        header: the column names of a table without a header line.
        quotes: False treats quote marks in a table as plain characters.
        captions_from_names: False gives no text to files without a caption file.

    Raises:
        InputError: with file, line, what was found and what was expected.
    """
    from worldtokens.data import samples

    if str(source) in samples.SETS:
        if columns or merge or header or delimiter:
            raise InputError(
                f"{source!r} is a named set: columns, merge, header and delimiter apply to files only"
            )
        options = {} if languages is None else {"languages": languages}
        return samples.open(str(source), split=split, **options)
    path = Path(source).expanduser()
    if not path.exists():
        raise InputError(f"{source}: no such file or folder, and no named set ({', '.join(samples.SETS)})")
    if languages:
        raise InputError(
            f"{source}: languages= applies to named sets only; choose the text column of a file with columns="
        )
    context = ReadContext(
        columns or {}, tuple(files), encoding, encoding_errors, on_error, check, merge, delimiter, header, quotes,
        captions_from_names,
    )  # fmt: skip
    if path.is_dir():
        tables = [path / name for name in ("metadata.csv", "metadata.jsonl") if (path / name).is_file()]
        if tables:
            path = tables[0]
    if path.is_dir():
        records = list(_folder(path, context))
    elif path.suffix.lower() in (".jsonl", ".ndjson"):
        records = list(read_json_lines(path, context))
    elif path.suffix.lower() in DELIMITERS:
        records = list(read_table(path, context))
    else:
        raise InputError(
            f"{path}: found a {path.suffix or 'nameless'} file, expected a folder, .csv, .tsv or .jsonl"
        )
    records = _merged(records, merge) if merge else records
    if not records:
        why = f"; {len(context.skipped)} skipped, the first: {context.skipped[0]}" if context.skipped else ""
        raise InputError(f"{path}: found no usable row{why}")
    rows = Rows(records, name=str(source), skipped=context.skipped, replaced=context.replaced)
    return rows if split is None else rows.split(split)


def caption_from_name(stem: str) -> str:
    """A caption from a file name: "Red-apple_03" -> "Red apple", "blueCar" -> "blue Car"; "" for "IMG_2041".

    Words are separated at punctuation, underscores and inner capitals; numbers at the end are dropped. Names from
    cameras, and names without a word of two letters (of any script), give "".
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


def _folder(root: Path, context: ReadContext) -> Iterator[dict]:
    found: dict[tuple[str, str], list[Path]] = {}  # (folder, stem) -> media files
    captions: dict[tuple[str, str], Path] = {}
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        # macOS writes decomposed file names; caption files from other systems have composed ones
        stem, folder = unicodedata.normalize("NFC", path.stem), "/".join(parts[:-1])
        if path.suffix.lower() in _CAPTION_FILES:
            captions[folder, stem] = path
        elif path.suffix.lower() in COLUMN_OF:
            found.setdefault((folder, stem), []).append(path)
    if not found:
        raise InputError(
            f"{root}: found no image, audio, video or points file (looked for {', '.join(sorted(COLUMN_OF))}). "
            "Pass a folder that has some, or a .csv or .jsonl file with their paths."
        )
    for (folder, stem), paths in found.items():
        columns = [COLUMN_OF[path.suffix.lower()] for path in paths]
        # x.jpg and x.wav are one row; x.jpg and x.png are two images with the same caption
        groups = [paths] if len(set(columns)) == len(columns) else [[path] for path in paths]
        for group in groups:
            names = [unicodedata.normalize("NFC", path.name) for path in group]
            sidecar = next(
                (captions[folder, name] for name in (stem, *names) if (folder, name) in captions), None
            )
            row: dict[str, str | list[str]] = {"id": group[0].relative_to(root).as_posix()}
            row |= {COLUMN_OF[path.suffix.lower()]: str(path) for path in group}
            if folder:
                row["class"] = folder
            if sidecar:
                lines = list(read_lines(sidecar, context))
                texts = [text.strip() for _, text, _ in lines if text.strip()]
                if not texts or any(error for _, _, error in lines):
                    fault = next((error for _, _, error in lines if error), None)
                    context.reject(
                        fault or f"{sidecar}: found no caption, expected text. Write one or delete the file"
                    )
                    continue
                row["text"] = texts if len(texts) > 1 else texts[0]
            elif context.captions_from_names and (caption := caption_from_name(stem)):
                row["text"] = caption
            yield row


def _merged(records: list[dict], column: str) -> list[dict]:
    """One record per value of `column`, with all its captions in order and without repetitions."""
    merged: dict = {}
    for number, record in enumerate(records):
        value = record.get(column)
        key = (number,) if value is None else str(value)
        if key not in merged:
            merged[key] = record
        elif "text" in record:
            texts = as_list(merged[key].get("text", [])) + as_list(record["text"])
            merged[key]["text"] = list(dict.fromkeys(texts))
    return list(merged.values())


def write_folder(rows: Rows, folder: str | Path, column: str = "image") -> list[Path]:
    """Writes each row's image as a file and its captions as a .txt file: a folder that `open_rows` reads.

    Files are named by the row's `id`, with the extension of the detected format; existing files are overwritten. Line
    breaks inside captions become spaces.

    Args:
        rows: rows whose `column` is bytes or a path.
        folder: created if absent.
        column: the column to write.

    Returns:
        The paths of the files, in order of `rows`; rows without `column` are skipped.
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
            extension = next((ext for magic, ext in _MAGIC if re.match(magic, data, re.DOTALL)), ".bin")
        else:
            extension = Path(value).suffix
        stem = re.sub(r"[^\w.-]+", "_", str(row.get("id", number)).removesuffix(extension))
        path = folder / (stem + extension)
        if path in written:
            raise InputError(f"{rows.name}: two rows would be written to {path}; their ids must differ")
        path.write_bytes(data)
        if texts := as_list(row.get("text", [])):
            lines = "\n".join(" ".join(text.split()) for text in texts)
            path.with_suffix(".txt").write_text(lines + "\n", "utf-8")
        written[path] = None
    return list(written)
