"""Handwritten digits: OpenCV's sample sheet, downloaded into the cache on first use."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

from PIL import Image

from worldtokens.data import fetch
from worldtokens.data.rows import Packed, Rows
from worldtokens.data.sets.spoken_digits import WORDS


def open_digits(split: str | None = None) -> Rows:
    """5,000 handwritten digits, 20 x 20 pixels, white on black: OpenCV's sample sheet (500 of each class).

    Each row: `id` ("7-3-41": digit, line, column of the sheet), `image` (PNG bytes), `class` ("7"), `text` ("seven"), `split`.
    Neighbours on the sheet are similar, so the split is by column: 80 / 8 / 12 of each hundred.

    Args:
        split: "train", "validation" or "test"; None for all.
    """
    folder = fetch.cached("digits", _fill)
    records, start = [], 0
    for number, size in enumerate(json.loads((folder / "sizes.json").read_text())):
        line, column = divmod(number, 100)
        digit = line // 5
        record = {
            "id": f"{digit}-{line % 5}-{column}",
            "image": Packed(str(folder / "digits.bin"), start, size),
            "class": str(digit),
            "text": WORDS[digit],
            "split": "train" if column < 80 else "validation" if column < 88 else "test",
        }
        records.append(record)
        start += size
    rows = Rows(records, name="digits")
    return rows if split is None else rows.split(split)


def _fill(folder: Path) -> None:
    fetch.deb("opencv-doc", folder / "package")
    sheet = Image.open(folder / "package/usr/share/doc/opencv-doc/examples/data/digits.png").convert("L")
    sizes = []
    with open(folder / "digits.bin", "wb") as file:
        for top in range(0, 1000, 20):
            for left in range(0, 2000, 20):
                png = io.BytesIO()
                sheet.crop((left, top, left + 20, top + 20)).save(png, "PNG")
                sizes.append(file.write(png.getvalue()))
    (folder / "sizes.json").write_text(json.dumps(sizes))
    shutil.rmtree(folder / "package")
