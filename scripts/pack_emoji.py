"""Build data/emoji.zip, the embedded image set, from two npm packages.

    python scripts/pack_emoji.py            # downloads about 30 MB with npm, writes data/emoji.zip
    python scripts/pack_emoji.py --check    # builds it again and compares it with the committed file

Images are copied byte for byte from emoji-datasource-twitter (already smaller than Pillow's optimised PNG), labels and
keywords from emojibase-data. Uses the standard library only. The build is reproducible: fixed order and dates, nothing
depends on the machine except Python's zlib, which compresses the index (2% of the file).
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
from worldtokens.data.rows import connected_groups, split_of
from worldtokens.data.sets.emoji import LANGUAGES, PACK, emoji_concept, emoji_id

IMAGES = "emoji-datasource-twitter@16.0.0"
LABELS = "emojibase-data@17.0.0"
# part of the committed file: its text stays as it is, so that `--check` gives the same bytes
README = f"""\
3,786 emoji pictures with captions in {", ".join(LANGUAGES)}.

pictures.bin  PNG files (64 x 64), one after another
index.jsonl   one picture a line: "start" and "size" say where it lies in pictures.bin

Pictures: Twemoji 16.0.1, Copyright Twitter, Inc and other contributors, CC-BY-4.0
(https://creativecommons.org/licenses/by/4.0/), the 64-pixel files of the npm package
{IMAGES} (Copyright Cal Henderson, MIT), unchanged. Labels and keywords: npm package
{LABELS} (Copyright Miles Johnson, MIT), after Unicode CLDR. Full notices: EMOJI_LICENSE.md.
"""


def gather(folder: Path) -> list[dict]:
    """The images in Unicode's order, joined with labels, keywords and concept; `png` has the bytes."""
    entries = {}
    for language in LANGUAGES:
        for entry in json.loads((folder / "labels" / language / "data.json").read_text("utf-8")):
            for each in (entry, *entry.get("skins", ())):
                entries[language, emoji_id(each["hexcode"])] = each
    rows = []
    for entry in json.loads((folder / "images" / "emoji.json").read_text("utf-8")):
        base = emoji_id(entry["unified"])
        for each in (entry, *entry.get("skin_variations", {}).values()):
            key = emoji_id(each["unified"])
            row = {
                "id": key,
                "base": base,
                "concept": emoji_concept(base),
                "char": entries["en", key]["emoji"],
                "group": entry["category"],
                "subgroup": entry["subcategory"],
                # some labels have typographic spaces: "drapeau\u202f: France"
                "labels": {lang: " ".join(entries[lang, key]["label"].split()) for lang in LANGUAGES},
                "png": (folder / "images/img/twitter/64" / each["image"]).read_bytes(),
            }
            if key == base:
                tags = {lang: entries[lang, key].get("tags", []) for lang in LANGUAGES}
                row["tags"] = {lang: [" ".join(tag.split()) for tag in found] for lang, found in tags.items()}
            rows.append(row)
    # Unicode's order, each base emoji before its variants: independent of the order of the source
    order = {row["base"]: entries["en", row["base"]].get("order", 1 << 30) for row in rows}
    return sorted(
        rows, key=lambda row: (order[row["base"]], row["base"], row["id"] != row["base"], row["id"])
    )


def join_equal_images(rows: list[dict]) -> None:
    """Merges concepts with an identical image, mostly flags of territories."""
    groups = connected_groups(
        (row["concept"], "png " + hashlib.sha256(row["png"]).hexdigest()) for row in rows
    )
    for row, group in zip(rows, groups, strict=True):
        row["concept"] = group
        row["split"] = split_of(group)


def pack(rows: list[dict]) -> bytes:
    """The zip's bytes."""
    images, lines = bytearray(), []
    for row in rows:
        png = row["png"]
        line = {key: value for key, value in row.items() if key != "png"} | {
            "start": len(images),
            "size": len(png),
        }
        lines.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")))
        images += png
    index = ("\n".join(lines) + "\n").encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data, method in (
            ("README.txt", README.encode(), zipfile.ZIP_STORED),
            ("pictures.bin", bytes(images), zipfile.ZIP_STORED),
            ("index.jsonl", index, zipfile.ZIP_DEFLATED),
        ):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr, info.compress_type = 3, 0o644 << 16, method
            archive.writestr(info, data, compresslevel=9)
    return file.getvalue()


def build() -> tuple[bytes, list[dict]]:
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        fetch.npm(IMAGES, folder / "images", ["emoji.json", "img/twitter/64"])
        fetch.npm(LABELS, folder / "labels", LANGUAGES)
        rows = gather(folder)
    join_equal_images(rows)
    return pack(rows), rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    check = parser.parse_args().check
    data, rows = build()
    for name, group in (("images", rows), ("base emoji", [row for row in rows if row["id"] == row["base"]])):
        print(f"{name}: {len(group):,}", dict(Counter(row["split"] for row in group)))
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
