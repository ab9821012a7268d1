"""Reads rows from tables (CSV, TSV) and JSON lines; every error names file and line.

Python's `csv` and `json` parse the fields. Text is decoded line by line, so that an invalid byte can be reported,
replaced and counted, or skipped with its row.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from worldtokens.data.files import MODALITY
from worldtokens.errors import InputError

FILE_COLUMNS = ("image", "audio", "video", "points")  # columns whose values are paths
KNOWN_COLUMNS = (*FILE_COLUMNS, "text", "views", "series", "class", "label", "id", "split")
COLUMN_OF = {ext: column for ext, column in MODALITY.items() if column in FILE_COLUMNS}  # extension -> column
DELIMITERS = {".csv": None, ".tsv": "\t", ".tab": "\t"}  # None: detected


@dataclass
class ReadContext:
    """The options of one `open_rows` call, the skipped rows and the number of replaced lines."""

    columns: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    files: Sequence[str] = FILE_COLUMNS
    encoding: str = "utf-8"
    encoding_errors: str = "strict"
    on_error: str = "raise"
    check: bool = True
    merge: str | None = None
    delimiter: str | None = None
    header: Sequence[str] | None = None
    quotes: bool = True
    captions_from_names: bool = True
    skipped: list[str] = field(default_factory=list)
    replaced: int = 0

    def __post_init__(self):
        for name, allowed in (("on_error", ("raise", "skip")), ("encoding_errors", ("strict", "replace"))):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise InputError(
                f"encoding={self.encoding!r}: no such encoding in Python; try 'cp1252'"
            ) from None

    def reject(self, message: str) -> None:
        """Raises, or records the message of a skipped row."""
        if self.on_error == "raise":
            raise InputError(message + ' (or on_error="skip" to skip such rows)')
        self.skipped.append(message)


def read_lines(path: Path, context: ReadContext) -> Iterator[tuple[int, str, str | None]]:
    """(number, text with its line break, decoding error or None) of each line of a text file."""
    data = path.read_bytes()
    encoding = codecs.lookup(context.encoding).name
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not encoding.startswith("utf-16"):
        raise InputError(f'{path}: found a UTF-16 file, expected {encoding}. Pass encoding="utf-16"')
    if encoding.startswith(("utf-16", "utf-32")):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not {encoding}: {error.reason} at byte {error.start}") from error
        yield from ((number, line, None) for number, line in enumerate(re.split(r"(?<=\n)", text), 1) if line)
        return
    if encoding == "utf-8":
        data = data.removeprefix(codecs.BOM_UTF8)
    for number, raw in enumerate(
        data.splitlines(keepends=True) if b"\n" not in data else _split_lines(data), 1
    ):
        try:
            yield number, raw.decode(encoding), None
        except UnicodeDecodeError as error:
            text = raw.decode(encoding, "replace")
            if context.encoding_errors == "replace":
                context.replaced += 1
                yield number, text, None
                continue
            byte = raw[error.start]
            character = bytes([byte]).decode("cp1252", "replace")
            yield (
                number,
                text,
                f"{path}, line {number}: found byte 0x{byte:02X} at column {error.start + 1}, expected {encoding} "
                f'(in Windows-1252 that byte is "{character}"). Pass encoding="cp1252" if the whole file uses it, or '
                'encoding_errors="replace" to replace such bytes by U+FFFD',
            )


def _split_lines(data: bytes) -> Iterator[bytes]:
    """Lines separated by line feeds only; a lone carriage return is part of its line."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def read_table(path: Path, context: ReadContext) -> Iterator[dict]:
    """Rows of a CSV or TSV file."""
    faults: dict[int, str] = {}

    def texts() -> Iterator[str]:
        for number, text, fault in read_lines(path, context):
            if fault:
                faults[number] = fault
            yield text

    stream = texts()
    first = next(stream, "")
    delimiter = context.delimiter or DELIMITERS[path.suffix.lower()]
    if delimiter is None:
        delimiter = ";" if "," not in first and ";" in first else ","
    reader = csv.reader(
        itertools.chain([first], stream),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if context.quotes else csv.QUOTE_NONE,
        strict=True,
    )
    names = list(context.header) if context.header else None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # after a missing quote the following rows cannot be separated: nothing to skip to
            raise InputError(
                f"{path}, line {line} (read up to line {reader.line_num}): {error}. Expected doubled quote marks inside "
                "quoted fields, and closed quoted fields. Pass quotes=False if quotes are plain characters in this file"
            ) from error
        if not cells:
            continue
        fault = next(
            (faults[number] for number in range(line, reader.line_num + 1) if number in faults), None
        )
        where = f"{path}, line {line}"
        if names is None:
            if fault:
                raise InputError(fault)
            names = _header([cell.strip() for cell in cells], where, context)
        elif fault:
            context.reject(fault)
        elif len(cells) != len(names):
            context.reject(
                f"{where}: found {len(cells)} fields, expected {len(names)} ({', '.join(names)}). Quote fields "
                f"that contain {delimiter!r}"
            )
        else:
            row = {name: cell for name, cell in zip(names, cells, strict=True) if cell.strip()}
            yield from _normalized(row, where, path, context)


def _header(names: list[str], where: str, context: ReadContext) -> list[str]:
    """Checks the column names of a table: at least one known name, no duplicates."""
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InputError(
            f"{where}: column {duplicates[0]!r} occurs {names.count(duplicates[0])} times; rename one"
        )
    requested = [name for source in context.columns.values() for name in as_list(source)]
    missing = [name for name in requested if name not in names]
    if missing:
        raise InputError(f"{where}: no column {missing[0]!r} (from columns=); found {', '.join(names)}")
    if not requested and not set(names) & {*KNOWN_COLUMNS, "file_name", *context.files}:
        raise InputError(
            f"{where}: found columns {', '.join(names)}; expected one or more of {', '.join(KNOWN_COLUMNS)}. Rename with "
            f'columns={{"image": "{names[0]}", ...}} (columns={{"{names[0]}": "{names[0]}"}} for a front-end of your own), '
            "or pass header=[...] if this line is a row"
        )
    return names


def read_json_lines(path: Path, context: ReadContext) -> Iterator[dict]:
    """Rows of a JSON lines file."""
    for number, text, fault in read_lines(path, context):
        where = f"{path}, line {number}"
        if fault:
            context.reject(fault)
        elif text.strip():
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                context.reject(f"{where}: not JSON: {error}. Expected one object per line")
                continue
            if isinstance(row, dict):
                yield from _normalized(row, where, path, context)
            else:
                context.reject(
                    f'{where}: found a {type(row).__name__}, expected an object: {{"image": ..., "text": ...}}'
                )


def as_list(value) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _normalized(row: dict, where: str, manifest: Path, context: ReadContext) -> Iterator[dict]:
    """The row with renamed columns, checked values and absolute paths; nothing if it was rejected."""
    row = {key: value for key, value in row.items() if value is not None and value != []}
    renamed = {name for source in context.columns.values() for name in as_list(source)}
    out = {key: value for key, value in row.items() if key not in renamed}
    if "file_name" in out:  # convention of Hugging Face datasets for image and audio folders
        column = COLUMN_OF.get(Path(str(out["file_name"])).suffix.lower(), "image")
        out.setdefault(column, out.pop("file_name"))
    for target, source in context.columns.items():
        values = [item for name in as_list(source) if name in row for item in as_list(row[name])]
        if values:
            listed = len(values) > 1 or any(isinstance(row.get(name), list) for name in as_list(source))
            out[target] = values if listed else values[0]
    for key in ("text", *context.files):
        values = as_list(out.get(key, []))
        if not all(isinstance(value, str) and value.strip() for value in values):
            context.reject(f"{where}: column {key!r} is {out[key]!r}, expected a non-empty string")
            return
    if isinstance(out.get("text"), str):
        out["text"] = out["text"].strip()
    first = next(iter(row), "path")
    if not any(key in out for key in (*KNOWN_COLUMNS[:-2], *context.files, *context.columns)):
        context.reject(
            f"{where}: found {', '.join(row) or 'no columns'}, expected one or more of {', '.join(KNOWN_COLUMNS)}. "
            f'Rename with columns={{"image": "{first}"}}; for a front-end of your own, columns={{"{first}": "{first}"}}'
        )
        return
    first = next((as_list(out[key])[0] for key in context.files if key in out), where.rpartition(" ")[2])
    for key in context.files:
        if key not in out:
            continue
        paths = []
        for value in as_list(out[key]):
            if re.match(r"[a-z][a-z0-9+.-]+://", value):
                context.reject(
                    f"{where}: column {key!r} is the URL {value}, expected a file. Download it first"
                )
                return
            try:
                file = manifest.parent / Path(value.strip()).expanduser()
                exists = not context.check or file.is_file()
            except (OSError, RuntimeError, ValueError):  # the name is too long, an unknown user, a NUL byte
                file, exists = Path(value[:200]), False
            if not exists:
                context.reject(f"{where}: no file {file}. Paths are relative to the manifest")
                return
            paths.append(str(file))
        out[key] = paths if isinstance(out[key], list) else paths[0]
    yield {"id": first, **out}
