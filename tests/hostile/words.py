"""Hostile texts, tables, manifests and scenes."""

from __future__ import annotations

import json

import numpy as np
from cases import case
from pictures import halves, noise, picture

# ---- texts -----------------------------------------------------------------------------------------------------

START, END = 49406, 49407


def plain(raw) -> bool:
    """One start, one end, and no control token between."""
    return raw[0] == START and raw[-1] == END and not ((raw[1:-1] == START) | (raw[1:-1] == END)).any()


T = "text"  # CLIP's pieces, 77 places
case(T, "cat.txt", 4, lambda: b"\xef\xbb\xbfa cat\r\n", lambda raw: raw.tolist() == [START, 320, 2368, END])
case(T, "spelled-control.txt", 10, lambda: b"a<|endoftext|>b", plain)
case(T, "image-tag.txt", 5, lambda: b"<image>", plain)
case(T, "long.txt", 77, lambda: b"a photo of a cat " * 100, plain)
case(T, "joined-emoji.txt", 11, lambda: "👩‍👩‍👧‍👦 猫".encode(), plain)
case(T, "nothing.txt", "empty", lambda: b"")
case(T, "blank.txt", 2, lambda: b" \n\t ")
case(T, "one-word-of-a-megabyte.txt", 77, lambda: b"a" * (1 << 20), plain)
case(T, "a-million-marks.txt", 77, lambda: b"&" * (1 << 20), plain)
case(T, "accents-on-one-letter.txt", 77, lambda: ("e" + "\u0301" * 100_000).encode(), plain)
case(T, "zero-byte.txt", 3, lambda: b"a\0b", plain)  # as CLIP cleans it: "ab"
case(T, "windows-1252.txt", "byte 0x92 at 2", lambda: b"it\x92s")
case(T, "utf-16.txt", "isn't UTF-8", lambda: "a cat".encode("utf-16"))
case(T, "image.txt", "isn't UTF-8", lambda: picture(noise(4, 4, 3)))
case(T, "surrogate.txt", "isn't UTF-8", lambda: b"a \xed\xa0\x80")
case(T, "missing.txt", "no such file", lambda path: None)

# ---- series ----------------------------------------------------------------------------------------------------


def table(rows: int, **at: str) -> bytes:
    """Two columns of whole numbers, but for the cells given as row3="nan,1"."""
    lines = [at.get(f"row{i}", f"{i},{i * i}") for i in range(rows)]
    return ("load,heat\n" + "\n".join(lines) + "\n").encode()


def stamped(*times: str) -> bytes:
    return ("time,load,heat\n" + "".join(f"{t},{i},{i}\n" for i, t in enumerate(times))).encode()


S = "series"  # two channels, patches of 4 every 2 steps
case(S, "20-rows.csv", 2 * 9, lambda: table(20))
case(S, "one-row.csv", 2, lambda: table(1))
case(S, "5-rows.csv", 2 * 2, lambda: table(5))
case(S, "missing-values.csv", 2 * 9, lambda: table(20, row3="nan,", row9="-,81"))
case(S, "semicolons.csv", 2, lambda: b"load;heat\n1;2\n")
case(S, "nothing-observed.csv", "", lambda: table(3, row0=",", row1=",", row2=","))
case(S, "decimal-commas.csv", "line 2", lambda: b'load,heat\n"1,5",2\n')
case(S, "ragged.csv", "line 5: found 3 fields", lambda: table(9, row3="1,2,3"))
case(S, "word.csv", "line 4, column 'heat'", lambda: table(9, row2="1,warm"))
case(S, "infinite.csv", "finite", lambda: table(9, row2="1,inf"))
case(S, "1e300.csv", "finite", lambda: table(9, row2="1,1e300"))
case(S, "no-names.csv", "line 1", lambda: b"1,2\n3,4\n")
case(S, "twice-named.csv", "2 times", lambda: b"load,load\n1,2\n")
case(S, "names-alone.csv", "no rows", lambda: b"load,heat\n")
case(S, "three-columns.csv", "", lambda: b"a,b,c\n1,2,3\n")
case(S, "empty.csv", "", lambda: b"")
case(S, "blank-between.csv", "blank", lambda: table(9, row3=""))
case(S, "byte-0x92.csv", "line 2: holds byte 0x92", lambda: b"load,heat\n1,it\x92s\n")
case(S, "open-quote.csv", "", lambda: b'load,heat\n"1,2\n3,4\n')
case(S, "zero-bytes.csv", "", lambda: b"load,heat\n\0\0,\0\n")
case(S, "field-of-a-megabyte.csv", "", lambda: b"load,heat\n" + b"1" * (1 << 20) + b",2\n")
case(S, "image.csv", "", lambda: picture(noise(8, 8, 3)))
Z = "series timed"
case(Z, "a-row-left-out.csv", 2 * 2, lambda: stamped("0", "1", "2", "4"))
case(Z, "backwards.csv", "doesn't come after", lambda: stamped("2", "1"))
case(Z, "ages-apart.csv", "nearly all missing", lambda: stamped("0", "1", "1e12"))
case(Z, "no-time.csv", "", lambda: stamped("0", "yesterday"))
case(Z, "endless.csv", "", lambda: stamped("0", "1e999"))

# ---- manifests -------------------------------------------------------------------------------------------------


def beside(name: str, data: bytes | str) -> dict[str, bytes]:
    """A manifest and one image that it may name, a.png."""
    return {name: data if isinstance(data, bytes) else data.encode(), "a.png": picture(noise(4, 4, 3))}


def told(*rows) -> str:
    return "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n"


M = "manifest"  # counts rows
OK = {"image": "a.png", "text": "a"}
for name, right, data in (
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
    ("image.csv", "", picture(noise(8, 8, 3))),
    ("two.jsonl", 2, told(OK, "", {"text": ["a", "b"]})),
    ("bad-line.jsonl", "line 2: not JSON", told(OK, "{bad")),
    ("list.jsonl", "line 1: found a list", told([1, 2])),
    ("deep.jsonl", "line 1: not JSON", "[" * 100_000 + "\n"),
    ("deep-object.jsonl", "line 1: not JSON", '{"text":' * 100_000 + "\n"),
    ("5000-digits.jsonl", "line 1", '{"text": ' + "9" * 5000 + "}\n"),
    ("number.jsonl", "holds 5", told({"text": 5})),
    ("zero-byte-in-path.jsonl", "no file", told({"image": "a\0.png"})),
    ("long-path.jsonl", "no file", told({"image": "a" * 5000 + ".png"})),
    ("no-such-user.jsonl", "no file", told({"image": "~nobody-of-this-name/a.png"})),
    ("surrogate.jsonl", "", told('{"image": "\\ud800.png"}')),
    ("byte-0x92.jsonl", "line 1: found byte 0x92", b'{"text": "it\x92s"}\n'),
    ("nothing.jsonl", "no usable row", b"\n\n"),
    ("own-columns.jsonl", "found row", told({"row": {"age": 3}})),
):
    case(M, f"{name.replace('.', '-')}/{name}", right, lambda path, n=name, d=data: _manifest(path, n, d))


def _manifest(path, name, data) -> None:
    for n, d in beside(name, data).items():
        (path.parent / n).write_bytes(d)


# ---- scenes ----------------------------------------------------------------------------------------------------

K = [[40.0, 0, 32], [0, 40, 16], [0, 0, 1]]
NERF = {"camera_angle_x": 1.0, "frames": [{"file_path": "a", "transform_matrix": np.eye(4).tolist()}]}


def scene(name: str = "cameras.json", text: str | bytes | None = None, **change) -> dict[str, bytes]:
    """Two views of one image, with what is changed."""
    facts = {"images": ["a.png", "a.png"], "intrinsics": K, "extrinsics": [np.eye(4).tolist()] * 2} | change
    facts = {k: v for k, v in facts.items() if v is not None}
    data = json.dumps(facts) if text is None else text
    return {name: data if isinstance(data, bytes) else data.encode(), "a.png": picture(halves())}


def nerf(**change) -> dict[str, bytes]:
    return scene("transforms.json", json.dumps(NERF | change))


C = "views"  # 32 x 32 in patches of 16: 4 tokens a view
far = [[[1.0, 0, 0, 1e20], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]] * 2
case(C, "two-views", 8, lambda: scene())
case(C, "nerf", 4, lambda: nerf())
case(C, "no-cameras", "neither cameras.json", lambda: {"a.png": picture(halves())})
case(C, "no-intrinsics", "has no intrinsics", lambda: scene(intrinsics=None))
case(C, "no-image", "c.png", lambda: scene(images=["a.png", "c.png"]))
case(C, "outside", "outside of its folder", lambda: scene(images=["a.png", "../two-views/a.png"]))
case(C, "absolute", "outside of its folder", lambda: scene(images=["a.png", "/dev/zero"]))
case(C, "zero-byte", "", lambda: scene(images=["a.png", "a\0.png"]))
case(C, "long-name", "", lambda: scene(images=["a.png", "a" * 5000]))
case(C, "number-for-name", "file name", lambda: scene(images=["a.png", 7]))
case(C, "one-camera-short", "2 images", lambda: scene(extrinsics=[np.eye(4).tolist()]))
case(C, "mirrored", "view 0", lambda: scene(extrinsics=[np.diag([1.0, 1, -1, 1]).tolist()] * 2))
case(C, "skewed", "no skew", lambda: scene(intrinsics=[[40, 9, 32], [0, 40, 16], [0, 0, 1]]))
case(C, "nan", "NaN", lambda: scene(intrinsics=[[float("nan"), 0, 32], [0, 40, 16], [0, 0, 1]]))
case(C, "far-away", "beyond", lambda: scene(extrinsics=far))
case(C, "words-for-numbers", "numbers", lambda: scene(intrinsics="wide"))
case(C, "ragged", "numbers", lambda: scene(extrinsics=[[1, 2], [3]]))
case(C, "no-view", "at least one image", lambda: scene(images=[], extrinsics=[]))
case(C, "not-json", "isn't JSON", lambda: scene(text="{'images': []}"))
case(C, "deep", "isn't JSON", lambda: scene(text="[" * 100_000))
case(C, "list", "holds a list", lambda: scene(text="[]"))
case(C, "bytes", "", lambda: scene(text=bytes(range(256))))
case(C, "empty", "empty", lambda: scene(text=b""))
case(C, "bent-lens", "undistort", lambda: nerf(k1=0.1))
case(C, "no-frames", "`frames`", lambda: nerf(frames=[]))
case(C, "no-angle", "camera_angle_x", lambda: nerf(camera_angle_x=None))
case(C, "other-shape", "the same shape", lambda: nerf(w=100, h=100))
case(C, "missing", "no such file", lambda path: None)
