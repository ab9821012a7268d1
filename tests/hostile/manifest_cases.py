"""Hostile manifests: tables and JSON lines that list files."""

from __future__ import annotations

import json

from cases import case
from image_cases import encode, noise


def with_image(name: str, data: bytes | str) -> dict[str, bytes]:
    """A manifest and one image, a.png."""
    return {name: data if isinstance(data, bytes) else data.encode(), "a.png": encode(noise(4, 4, 3))}


def jsonl(*rows) -> str:
    return "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n"


M = "manifest"  # expected: number of rows
OK = {"image": "a.png", "text": "a"}
for name, expected, data in (
    ("quotes-and-breaks.csv", 2, 'image,text\r\na.png,"a ""big"", red\r\nball"\r\na.png,b\r\n'),
    ("no-last-break.csv", 1, "\ufeffimage,text\na.png,b"),
    ("byte-0x92.csv", "line 3: found byte 0x92", b"image,text\na.png,b\na.png,it\x92s\n"),
    ("open-quote.csv", "line 2", 'image,text\na.png,"so it began\na.png,b\n'),
    ("too-many.csv", "line 2: found 3 fields", "image,text\na.png,one, two\n"),
    ("twice.csv", "2 times", "text,text\na,b\n"),
    ("utf-16.csv", "UTF-16", "image,text\na.png,b\n".encode("utf-16")),
    ("names-alone.csv", "no usable row", "image,text\n"),
    ("empty.csv", "no usable row", b""),
    ("field-of-a-megabyte.csv", "", "image,text\na.png," + "b" * (1 << 20) + "\n"),
    ("not-there.csv", "line 2: no file", "image,text\nb.png,b\n"),
    ("address.csv", "Download it first", "image,text\nhttp://localhost/a.png,b\n"),
    ("folder-named.csv", "no file", "image,text\n..,b\n"),
    ("other-columns.csv", "found columns", "path,title\na.png,b\n"),
    ("image.csv", "", encode(noise(8, 8, 3))),
    ("two.jsonl", 2, jsonl(OK, "", {"text": ["a", "b"]})),
    ("bad-line.jsonl", "line 2: not JSON", jsonl(OK, "{bad")),
    ("list.jsonl", "line 1: found a list", jsonl([1, 2])),
    ("deep.jsonl", "line 1: not JSON", "[" * 100_000 + "\n"),
    ("deep-object.jsonl", "line 1: not JSON", '{"text":' * 100_000 + "\n"),
    ("5000-digits.jsonl", "line 1", '{"text": ' + "9" * 5000 + "}\n"),
    ("number.jsonl", "is 5", jsonl({"text": 5})),
    ("zero-byte-in-path.jsonl", "no file", jsonl({"image": "a\0.png"})),
    ("long-path.jsonl", "no file", jsonl({"image": "a" * 5000 + ".png"})),
    ("no-such-user.jsonl", "no file", jsonl({"image": "~nobody-of-this-name/a.png"})),
    ("surrogate.jsonl", "", jsonl('{"image": "\\ud800.png"}')),
    ("byte-0x92.jsonl", "line 1: found byte 0x92", b'{"text": "it\x92s"}\n'),
    ("nothing.jsonl", "no usable row", b"\n\n"),
    ("own-columns.jsonl", "found row", jsonl({"row": {"age": 3}})),
):
    case(M, f"{name.replace('.', '-')}/{name}", expected, lambda path, n=name, d=data: _manifest(path, n, d))


def _manifest(path, name, data) -> None:
    for n, d in with_image(name, data).items():
        (path.parent / n).write_bytes(d)
