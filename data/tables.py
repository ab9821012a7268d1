"""Tables (CSV, TSV) and JSON lines as rows, with the line in every complaint.

Fields are parsed by Python's own `csv` and `json`. Text is decoded line by line, so that a byte that is not
UTF-8 can be named, replaced and counted, or skipped with its row alone.
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

from worldtokens.errors import InputError

FILES = ("image", "audio", "video", "points")  # columns whose values are paths
KNOWN = (*FILES, "text", "views", "series", "class", "label", "id", "split")
ENDINGS = {
    "image": "jpg jpeg jpe png webp gif bmp tif tiff avif",
    "audio": "wav flac ogg oga mp3 m4a opus aac",
    "video": "mp4 mkv webm avi mov m4v mpg mpeg",
    "points": "ply obj off stl glb gltf xyz",
}
KIND = {"." + ending: column for column, endings in ENDINGS.items() for ending in endings.split()}
TABLES = {".csv": None, ".tsv": "\t", ".tab": "\t"}


@dataclass
class Reading:
    """The options of one `open_rows` call and what went wrong so far."""

    columns: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    files: Sequence[str] = FILES
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
                f"encoding={self.encoding!r}: Python knows no such encoding; try 'cp1252'"
            ) from None

    def bad(self, message: str) -> None:
        if self.on_error == "raise":
            raise InputError(message + ' (or on_error="skip" to leave such rows out)')
        self.skipped.append(message)


def read_lines(path: Path, reading: Reading) -> Iterator[tuple[int, str, str | None]]:
    """(number, text with its line break, what is wrong with its bytes) for each line of a text file."""
    data = path.read_bytes()
    encoding = codecs.lookup(reading.encoding).name
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not encoding.startswith("utf-16"):
        raise InputError(f'{path}: found a UTF-16 file, expected {encoding}. Give encoding="utf-16"')
    if encoding.startswith(("utf-16", "utf-32")):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not {encoding}: {error.reason} at byte {error.start}") from error
        yield from ((number, line, None) for number, line in enumerate(re.split(r"(?<=\n)", text), 1) if line)
        return
    if encoding == "utf-8":
        data = data.removeprefix(codecs.BOM_UTF8)
    for number, raw in enumerate(data.splitlines(keepends=True) if b"\n" not in data else _cut(data), 1):
        try:
            yield number, raw.decode(encoding), None
        except UnicodeDecodeError as error:
            text = raw.decode(encoding, "replace")
            if reading.encoding_errors == "replace":
                reading.replaced += 1
                yield number, text, None
                continue
            byte = raw[error.start]
            looks = bytes([byte]).decode("cp1252", "replace")
            yield (
                number,
                text,
                f"{path}, line {number}: found byte 0x{byte:02X} at column {error.start + 1}, expected {encoding} "
                f'(in Windows-1252 that byte is "{looks}"). Give encoding="cp1252" if the whole file is in that, or '
                'encoding_errors="replace" to read on with a mark in its place',
            )


def _cut(data: bytes) -> Iterator[bytes]:
    """The lines of a file, by line feed alone; a lone carriage return is part of its line."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def read_table(path: Path, reading: Reading) -> Iterator[dict]:
    faults: dict[int, str] = {}

    def texts() -> Iterator[str]:
        for number, text, fault in read_lines(path, reading):
            if fault:
                faults[number] = fault
            yield text

    stream = texts()
    first = next(stream, "")
    delimiter = reading.delimiter or TABLES[path.suffix.lower()]
    if delimiter is None:
        delimiter = ";" if "," not in first and ";" in first else ","
    reader = csv.reader(
        itertools.chain([first], stream),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if reading.quotes else csv.QUOTE_NONE,
        strict=True,
    )
    names = list(reading.header) if reading.header else None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # Where a quote is missing, the rows behind it cannot be told apart: nothing to skip to.
            raise InputError(
                f"{path}, line {line} (read up to line {reader.line_num}): {error}. Expected each quote mark inside a "
                "quoted field doubled, and each quoted field closed. Give quotes=False if quotes mean nothing in this file"
            ) from error
        if not cells:
            continue
        bad = next((faults[number] for number in range(line, reader.line_num + 1) if number in faults), None)
        where = f"{path}, line {line}"
        if names is None:
            if bad:
                raise InputError(bad)
            names = _header([cell.strip() for cell in cells], where, reading)
        elif bad:
            reading.bad(bad)
        elif len(cells) != len(names):
            reading.bad(
                f"{where}: found {len(cells)} fields, expected {len(names)} ({', '.join(names)}). Put a field that "
                f"holds {delimiter!r} in quotes"
            )
        else:
            row = {name: cell for name, cell in zip(names, cells, strict=True) if cell.strip()}
            yield from _finished(row, where, path, reading)


def _header(names: list[str], where: str, reading: Reading) -> list[str]:
    """A table's column names, checked: that ours are among them, that none comes twice."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{where}: column {twice[0]!r} comes {names.count(twice[0])} times; rename one")
    asked = [name for wanted in reading.columns.values() for name in several(wanted)]
    lacking = [name for name in asked if name not in names]
    if lacking:
        raise InputError(
            f"{where}: no column {lacking[0]!r}, which columns= asks for; found {', '.join(names)}"
        )
    if not asked and not set(names) & {*KNOWN, "file_name", *reading.files}:
        raise InputError(
            f"{where}: found columns {', '.join(names)}; expected one or more of {', '.join(KNOWN)}. Rename with "
            f'columns={{"image": "{names[0]}", ...}} (columns={{"{names[0]}": "{names[0]}"}} for a front-end of your own), '
            "or name the columns with header=[...] if this line is a row"
        )
    return names


def read_json_lines(path: Path, reading: Reading) -> Iterator[dict]:
    for number, text, fault in read_lines(path, reading):
        where = f"{path}, line {number}"
        if fault:
            reading.bad(fault)
        elif text.strip():
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                reading.bad(f"{where}: not JSON: {error}. Expected one object a line")
                continue
            if isinstance(row, dict):
                yield from _finished(row, where, path, reading)
            else:
                reading.bad(
                    f'{where}: found a {type(row).__name__}, expected an object: {{"image": ..., "text": ...}}'
                )


def several(value) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _finished(row: dict, where: str, manifest: Path, reading: Reading) -> Iterator[dict]:
    """The row under our names, its values checked and its paths made whole; nothing where it was bad."""
    row = {key: value for key, value in row.items() if value is not None and value != []}
    taken = {name for wanted in reading.columns.values() for name in several(wanted)}
    out = {key: value for key, value in row.items() if key not in taken}
    if "file_name" in out:  # the Hugging Face convention for folders of images or sounds
        kind = KIND.get(Path(str(out["file_name"])).suffix.lower(), "image")
        out.setdefault(kind, out.pop("file_name"))
    for ours, wanted in reading.columns.items():
        values = [item for name in several(wanted) if name in row for item in several(row[name])]
        if values:
            listed = len(values) > 1 or any(isinstance(row.get(name), list) for name in several(wanted))
            out[ours] = values if listed else values[0]
    for key in ("text", *reading.files):
        values = several(out.get(key, []))
        if not all(isinstance(value, str) and value.strip() for value in values):
            reading.bad(f"{where}: column {key!r} holds {out[key]!r}, expected a string that is not empty")
            return
    if isinstance(out.get("text"), str):
        out["text"] = out["text"].strip()
    first = next(iter(row), "path")
    if not any(key in out for key in (*KNOWN[:-2], *reading.files, *reading.columns)):
        reading.bad(
            f"{where}: found {', '.join(row) or 'nothing'}, expected one or more of {', '.join(KNOWN)}. Rename with "
            f'columns={{"image": "{first}"}}; for a front-end of your own, columns={{"{first}": "{first}"}}'
        )
        return
    first = next((several(out[key])[0] for key in reading.files if key in out), where.rpartition(" ")[2])
    for key in reading.files:
        if key not in out:
            continue
        paths = []
        for value in several(out[key]):
            if re.match(r"[a-z][a-z0-9+.-]+://", value):
                reading.bad(
                    f"{where}: column {key!r} holds the address {value}, expected a file. Download it first"
                )
                return
            try:
                place = manifest.parent / Path(value.strip()).expanduser()
                there = not reading.check or place.is_file()
            except (OSError, RuntimeError, ValueError):  # too long a name, a user who is not, a NUL byte
                place, there = Path(value[:200]), False
            if not there:
                reading.bad(f"{where}: no file {place}. Paths are relative to the manifest; correct it")
                return
            paths.append(str(place))
        out[key] = paths if isinstance(out[key], list) else paths[0]
    yield {"id": first, **out}
