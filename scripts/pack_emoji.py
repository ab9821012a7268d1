"""Builds data/emoji.zip, the embedded image set, from the two npm packages that hold it.

    python scripts/pack_emoji.py            # fetches about 30 MB by npm, writes data/emoji.zip
    python scripts/pack_emoji.py --check    # builds again and compares with the committed file

Images are copied byte for byte from emoji-datasource-twitter (they are already compressed harder than
Pillow's optimiser does), labels and keywords come from emojibase-data. Needs no library beyond Python's own.
The same sources give the same bytes: members are in a fixed order, dates are fixed, nothing depends on the
machine, apart from Python's zlib, which compresses the index (2% of the file).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import kin, side_of
from worldtokens.data.sets.emoji import LANGUAGES, PACK, emoji_concept, emoji_id

PICTURES = "emoji-datasource-twitter@16.0.0"
WORDS = "emojibase-data@17.0.0"
README = f"""\
3,786 emoji images with captions in {", ".join(LANGUAGES)}.

pictures.bin  PNG files (64 x 64), one after another
index.jsonl   one image a line: "start" and "size" say where it lies in pictures.bin

Images: Twemoji 16.0.1, Copyright Twitter, Inc and other contributors, CC-BY-4.0
(https://creativecommons.org/licenses/by/4.0/), the 64-pixel files of the npm package
{PICTURES} (Copyright Cal Henderson, MIT), unchanged. Labels and keywords: npm package
{WORDS} (Copyright Miles Johnson, MIT), after Unicode CLDR. Full notices: EMOJI_LICENSE.md.
"""


def gather(folder: Path) -> list[dict]:
    """The images in Unicode's order, joined with their words and concept; `png` holds the bytes."""
    words = {}
    for language in LANGUAGES:
        for entry in json.loads((folder / "words" / language / "data.json").read_text("utf-8")):
            for each in (entry, *entry.get("skins", ())):
                words[language, emoji_id(each["hexcode"])] = each
    rows = []
    for entry in json.loads((folder / "images" / "emoji.json").read_text("utf-8")):
        base = emoji_id(entry["unified"])
        for each in (entry, *entry.get("skin_variations", {}).values()):
            key = emoji_id(each["unified"])
            row = {
                "id": key,
                "base": base,
                "concept": emoji_concept(base),
                "char": words["en", key]["emoji"],
                "group": entry["category"],
                "subgroup": entry["subcategory"],
                # Some labels carry the thin spaces of typesetting: "drapeau\u202f: France".
                "labels": {lang: " ".join(words[lang, key]["label"].split()) for lang in LANGUAGES},
                "png": (folder / "images/img/twitter/64" / each["image"]).read_bytes(),
            }
            if key == base:
                tags = {lang: words[lang, key].get("tags", []) for lang in LANGUAGES}
                row["tags"] = {lang: [" ".join(tag.split()) for tag in found] for lang, found in tags.items()}
            rows.append(row)
    # By Unicode's order, each base before its twins: independent of how the source happens to be sorted.
    order = {row["base"]: words["en", row["base"]].get("order", 1 << 30) for row in rows}
    return sorted(
        rows, key=lambda row: (order[row["base"]], row["base"], row["id"] != row["base"], row["id"])
    )


def join_equal_pictures(rows: list[dict]) -> None:
    """Concepts that share an image, byte for byte, become one: flags of territories, mostly."""
    groups = kin((row["concept"], "png " + hashlib.sha256(row["png"]).hexdigest()) for row in rows)
    for row, group in zip(rows, groups, strict=True):
        row["concept"] = group
        row["split"] = side_of(group)


def pack(rows: list[dict]) -> bytes:
    """The zip's bytes."""
    pictures, lines = bytearray(), []
    for row in rows:
        png = row["png"]
        line = {key: value for key, value in row.items() if key != "png"} | {
            "start": len(pictures),
            "size": len(png),
        }
        lines.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")))
        pictures += png
    index = ("\n".join(lines) + "\n").encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data, method in (
            ("README.txt", README.encode(), zipfile.ZIP_STORED),
            ("pictures.bin", bytes(pictures), zipfile.ZIP_STORED),
            ("index.jsonl", index, zipfile.ZIP_DEFLATED),
        ):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr, info.compress_type = 3, 0o644 << 16, method
            archive.writestr(info, data, compresslevel=9)
    return file.getvalue()


def build() -> tuple[bytes, list[dict]]:
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        fetch.npm(PICTURES, folder / "images", ["emoji.json", "img/twitter/64"])
        fetch.npm(WORDS, folder / "words", LANGUAGES)
        rows = gather(folder)
    join_equal_pictures(rows)
    return pack(rows), rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed pack, write nothing")
    check = parser.parse_args().check
    data, rows = build()
    for name, kept in (("images", rows), ("base emoji", [row for row in rows if row["id"] == row["base"]])):
        print(f"{name}: {len(kept):,}", dict(Counter(row["split"] for row in kept)))
    print(
        f"distinct images: {len({row['png'] for row in rows}):,}, concepts: {len({row['concept'] for row in rows}):,}"
    )
    print(f"{len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}")
    if not check:
        PACK.write_bytes(data)
        print(f"wrote {PACK}")
    elif PACK.read_bytes() != data:
        print(f"differs from {PACK}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
