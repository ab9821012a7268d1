"""The image sheet: queries down the page, what was found for each from left to right, as PNG and as HTML.

The PNG is for looking at and for showing around; the HTML page holds its thumbnails in itself, so that it opens
from disk without a server and can be sent to someone.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import html
import io
import os
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from worldtokens.data.files import modality_of, shown
from worldtokens.parts import write_whole

THUMB, GAP, MARGIN = 144, 16, 28  # pixels
PER_LINE = 8  # thumbnails side by side; more go on in a second line
_TITLE, _CAPTION, _HEAD = 22, 14, 28  # font sizes
_INK, _PALE, _LINE, _MARK = (24, 28, 36), (104, 112, 124), (222, 226, 232), (22, 138, 84)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A thumbnail: the file, its score, and the words under it (default: the file's name).

    `right` is True for an answer known to be right; it gets a frame and a tick.
    """

    path: str
    score: float
    caption: str | None = None
    right: bool = False

    @property
    def words(self) -> str:
        return self.caption if self.caption is not None else shown(Path(self.path).stem)


@dataclasses.dataclass(frozen=True)
class Row:
    """A query and its answers, best first; `image` is the file that was asked with, if any."""

    title: str
    cells: Sequence[Cell]
    picture: str | None = None


def save_sheet(
    rows: Sequence[Row], out: str | os.PathLike, title: str = "", note: str = ""
) -> tuple[Path, Path]:
    """Write the sheet as ``out.png`` and ``out.html``.

    Args:
        rows: the queries.
        out: path without an extension (``.png`` or ``.html`` at its end is taken off).
        title: a line above everything.
        note: a small line under the title.

    Returns:
        The two paths.
    """
    out = Path(out)
    base = out.with_suffix("") if out.suffix.lower() in (".png", ".html") else out
    base.parent.mkdir(parents=True, exist_ok=True)
    png, page = base.with_name(base.name + ".png"), base.with_name(base.name + ".html")
    data = io.BytesIO()
    draw_sheet(rows, title, note).save(data, "PNG", optimize=True)
    write_whole(png, data.getvalue())
    write_whole(page, html_sheet(rows, title, note, page.parent).encode("utf-8", "backslashreplace"))
    return png, page


# ---- thumbnails ------------------------------------------------------------------------------------------


def thumbnail(path: str, size: int = THUMB) -> Image.Image:
    """A file as a square RGB image: whole, unstretched, in the middle of white.

    A clip shows its first frame; what cannot be shown gets a grey tile that says what it is.
    """
    kind = modality_of(path)
    try:
        picture = _first_frame(path) if kind == "video" else _open(path, size)
    except Exception:  # a sheet is drawn to the end: the tile says that this one cannot be shown
        picture = None
    out = Image.new("RGB", (size, size), "white")
    if picture is None:
        label = kind if kind not in (None, "image") else "cannot be shown" if os.path.exists(path) else "gone"
        ImageDraw.Draw(out).rectangle((0, 0, size - 1, size - 1), fill=(238, 240, 243))
        font = _font(label, _CAPTION)
        ImageDraw.Draw(out).text((size / 2, size / 2), label, fill=_PALE, font=font, anchor="mm")
        return out
    scale = size / max(picture.size)
    new = tuple(max(1, round(side * scale)) for side in picture.size)
    picture = picture.resize(new, Image.Resampling.BICUBIC if scale > 1 else Image.Resampling.LANCZOS)
    out.paste(picture, ((size - new[0]) // 2, (size - new[1]) // 2))
    return out


def _open(path: str, size: int) -> Image.Image:
    with Image.open(path) as im:
        im.draft("RGB", (2 * size, 2 * size))  # a JPEG is decoded no larger than needed
        im.load()
        if im.mode.startswith("I") or im.mode == "F":  # 16 bits a pixel and more: PIL would clip, not scale
            low, high = im.getextrema()
            im = im.point(lambda v: (v - low) * (255 / max(high - low, 1))).convert("L")
        im = ImageOps.exif_transpose(im)
        if "A" in im.getbands() or "transparency" in im.info:
            im = im.convert("RGBA")
            white = Image.new("RGBA", im.size, "white")
            im = Image.alpha_composite(white, im)
        return im.convert("RGB")


def _first_frame(path: str) -> Image.Image:
    import av

    with av.open(path) as clip:
        return next(clip.decode(video=0)).to_image()


# ---- type ------------------------------------------------------------------------------------------------


@functools.cache
def _dejavu(bold: bool) -> tuple[str, dict]:
    """The font that matplotlib ships, and its table of characters."""
    import matplotlib
    from matplotlib.ft2font import FT2Font

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    file = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", name)
    return file, FT2Font(file).get_charmap()


@functools.cache
def _system_faces() -> list[tuple[str, dict]]:
    """The system's fonts, for scripts that DejaVu lacks, such as Chinese and Japanese."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    faces = []
    for file in sorted(font_manager.findSystemFonts(fontext="ttf")):
        try:
            faces.append((file, FT2Font(file).get_charmap()))
        except (RuntimeError, OSError):  # colour fonts and the like, which cannot be drawn with
            continue
    return faces


@functools.lru_cache(maxsize=1024)
def _font(text: str, size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu, or the first font of the system that has more of the text's characters."""
    file, known = _dejavu(bold)
    letters = {ord(c) for c in text if not c.isspace()}
    if not letters <= known.keys():
        file, _ = max([(file, known), *_system_faces()], key=lambda face: len(letters & face[1].keys()))
    return ImageFont.truetype(file, size)


def _cut(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """The text, or as much of it as fits and an ellipsis."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    low, high = 0, len(text)
    while low < high:  # the longest beginning that fits
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if font.getlength(text[:middle].rstrip() + "…") <= width else (low, middle - 1)
        )
    return text[:low].rstrip() + "…"


def _lines(text: str, font: ImageFont.FreeTypeFont, width: float, most: int) -> list[str]:
    """The text in at most `most` lines, broken between words, the last one cut."""
    words, lines = text.split(), []
    while words and len(lines) < most - 1:
        n = 1
        while n < len(words) and font.getlength(" ".join(words[: n + 1])) <= width:
            n += 1
        lines.append(_cut(" ".join(words[:n]), font, width))
        words = words[n:]
    return [*lines, _cut(" ".join(words), font, width)] if words else lines


# ---- PNG -------------------------------------------------------------------------------------------------

_CAPTION_LINES = 2
_CELL_HEIGHT = THUMB + 8 + 18 * (1 + _CAPTION_LINES) + GAP
_ROW_HEAD = 44


def cell_box(
    rows: Sequence[Row], row: int, column: int, title: str = "", note: str = ""
) -> tuple[int, int, int, int]:
    """Where a thumbnail lies in the PNG: left, top, right, bottom in pixels."""
    top = MARGIN + _head_height(title, note)
    top += sum(_row_height(r) for r in rows[:row]) + _ROW_HEAD
    left, line = _left(rows), column // PER_LINE
    x, y = left + (column % PER_LINE) * (THUMB + GAP), top + line * _CELL_HEIGHT
    return x, y, x + THUMB, y + THUMB


def _left(rows: Sequence[Row]) -> int:
    """Query images stand in a column of their own, if there are any."""
    return MARGIN + (THUMB + 2 * GAP if any(r.picture for r in rows) else 0)


def _head_height(title: str, note: str) -> int:
    return (44 if title else 0) + (28 if note else 0) + (12 if title or note else 0)


def _row_height(row: Row) -> int:
    return _ROW_HEAD + max(1, -(-len(row.cells) // PER_LINE)) * _CELL_HEIGHT


def draw_sheet(rows: Sequence[Row], title: str = "", note: str = "") -> Image.Image:
    """The sheet as an RGB image on white; `cell_box` tells where each thumbnail lies."""
    columns = max([3, *(min(len(r.cells), PER_LINE) for r in rows)])
    width = _left(rows) + columns * (THUMB + GAP) - GAP + MARGIN
    height = 2 * MARGIN + _head_height(title, note) + sum(map(_row_height, rows)) - GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw, inner = ImageDraw.Draw(sheet), width - 2 * MARGIN
    if title:
        font = _font(title, _HEAD, bold=True)
        draw.text((MARGIN, MARGIN), _cut(title, font, inner), fill=_INK, font=font)
    if note:
        font = _font(note, _CAPTION)
        draw.text((MARGIN, MARGIN + (44 if title else 0)), _cut(note, font, inner), fill=_PALE, font=font)
    top = MARGIN + _head_height(title, note)
    for i, row in enumerate(rows):
        if i or title or note:
            draw.line((MARGIN, top - 8, width - MARGIN, top - 8), fill=_LINE)
        font = _font(row.title, _TITLE, bold=True)
        draw.text((MARGIN, top + 2), _cut(row.title, font, inner), fill=_INK, font=font)
        if row.picture:
            box = (MARGIN, top + _ROW_HEAD)
            sheet.paste(thumbnail(row.picture), box)
            _frame(draw, (*box, box[0] + THUMB, box[1] + THUMB), _INK)
            draw.text((MARGIN, box[1] + THUMB + 7), "asked with", fill=_PALE, font=_font("a", _CAPTION))
        if not row.cells:
            draw.text((_left(rows), top + _ROW_HEAD), "nothing found", fill=_PALE, font=_font("a", _CAPTION))
        for j, cell in enumerate(row.cells):
            _draw_cell(sheet, draw, cell, cell_box(rows, i, j, title, note))
        top += _row_height(row)
    return sheet


def _draw_cell(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, cell: Cell, box: tuple[int, int, int, int]
) -> None:
    x, y, _, bottom = box
    sheet.paste(thumbnail(cell.path), (x, y))
    _frame(draw, box, _MARK if cell.right else _LINE, 3 if cell.right else 1)
    score = f"{cell.score:.2f}" + (" ✓" if cell.right else "")
    color = _MARK if cell.right else _INK
    draw.text((x, bottom + 7), score, fill=color, font=_font(score, _CAPTION, bold=True))
    font = _font(cell.words, _CAPTION)
    for n, line in enumerate(_lines(cell.words, font, THUMB, _CAPTION_LINES)):
        draw.text((x, bottom + 25 + 18 * n), line, fill=_PALE, font=font)


def _frame(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], color, width: int = 1) -> None:
    """A frame around a thumbnail, outside of its pixels."""
    x, y, right, bottom = box
    draw.rectangle(
        (x - width - 2, y - width - 2, right + width + 1, bottom + width + 1), outline=color, width=width
    )


# ---- HTML ------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --ink: #181c24; --pale: #5b6470; --line: #dee2e8; --page: #fff; --mark: #117a49 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #eef0f4; --pale: #a9b2be; --line: #3a414c; --page: #15181d; --mark: #4cd196 } }
body { margin: 0 auto; padding: 2rem; max-width: 90rem; font: 15px/1.4 system-ui, sans-serif;
  color: var(--ink); background: var(--page) }
h1 { font-size: 1.6rem; margin: 0 } .note { color: var(--pale); margin: .3rem 0 1.5rem }
section { border-top: 1px solid var(--line); padding: 1rem 0 } h2 { font-size: 1.2rem; margin: 0 0 .8rem }
ol { list-style: none; margin: 0; padding: 0; display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)) }
figure { margin: 0; max-width: 10rem }
figure img { display: block; box-sizing: border-box; width: 100%; height: auto; padding: .2rem; background: #fff;
  border: 1px solid var(--line); border-radius: .4rem }
figcaption { color: var(--pale); overflow-wrap: anywhere; margin-top: .3rem }
figcaption b { color: var(--ink) } a { color: inherit; text-decoration: none } a:hover { text-decoration: underline }
.right img { outline: 3px solid var(--mark) } .right b { color: var(--mark) }
.asked { margin: 0 0 1rem } .asked img { border-color: var(--ink) }
"""


def html_sheet(rows: Sequence[Row], title: str = "", note: str = "", folder: str | os.PathLike = ".") -> str:
    """The sheet as one HTML page that needs no other file; `folder` is where it will lie, for links to the files."""
    e = html.escape
    heading = title or "Search results"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{e(heading)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{e(heading)}</h1>",
    ]
    if note:
        parts.append(f'<p class="note">{e(note)}</p>')
    for row in rows:
        parts.append(f"<section>\n<h2>{e(row.title)}</h2>")
        if row.picture:
            name = e(shown(Path(row.picture).name))
            img = f'<img src="{_data_uri(row.picture)}" width="{THUMB}" height="{THUMB}" alt="{name}">'
            parts.append(f'<figure class="asked">{img}<figcaption>asked with {name}</figcaption></figure>')
        parts.append("<ol>" if row.cells else "<p>nothing found</p>")
        for place, cell in enumerate(row.cells, 1):
            name = shown(Path(cell.path).name)
            alt = e(f"{place}. {cell.words}, score {cell.score:.2f}" + (", right" if cell.right else ""))
            img = f'<img src="{_data_uri(cell.path)}" width="{THUMB}" height="{THUMB}" alt="{alt}">'
            tick, mark = (" ✓", ' class="right"') if cell.right else ("", "")
            parts.append(
                f"<li{mark}><figure>"
                f'<a href="{e(_link(cell.path, folder))}" title="{e(name)}">{img}</a>'
                f"<figcaption><b>{cell.score:.2f}{tick}</b><br>{e(cell.words)}</figcaption></figure></li>"
            )
        parts.append("</ol>\n</section>" if row.cells else "</section>")
    return "\n".join([*parts, "</main>\n</body>\n</html>\n"])


def _data_uri(path: str) -> str:
    data = io.BytesIO()
    picture = thumbnail(path, 2 * THUMB)  # sharp on screens with two dots a pixel
    picture.save(data, "JPEG", quality=86)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def _link(path: str, folder: str | os.PathLike) -> str:
    """A link from a page in `folder` to the file: relative, so that both can be moved together."""
    try:
        there = os.path.relpath(path, folder)
    except ValueError:  # another drive
        return Path(path).resolve().as_uri()
    return urllib.parse.quote(os.fsencode(there.replace(os.sep, "/")))
