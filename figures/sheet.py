"""Image sheet of search results as PNG and HTML: one row per query, its results from left to right.

The HTML page embeds its thumbnails, so it opens from disk without a server and without other files.
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

from worldtokens.data.files import modality_of, printable
from worldtokens.parts import write_whole

THUMB, GAP, MARGIN = 144, 16, 28  # pixels
PER_LINE = 8  # thumbnails per line; further ones go to the next line
_TITLE, _CAPTION, _HEAD = 22, 14, 28  # font sizes
_INK, _PALE, _LINE, _MARK = (24, 28, 36), (104, 112, 124), (222, 226, 232), (22, 138, 84)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A thumbnail: a file, its score, and its caption (default: the file's name).

    `correct` marks a result known to be correct: it has a green frame and a tick.
    """

    path: str
    score: float
    caption: str | None = None
    correct: bool = False

    @property
    def label(self) -> str:
        """Text under the thumbnail."""
        return self.caption if self.caption is not None else printable(Path(self.path).stem)


@dataclasses.dataclass(frozen=True)
class Row:
    """A query and its results, best first; `image` is the path of the query image, if there is one."""

    title: str
    cells: Sequence[Cell]
    image: str | None = None


def save_sheet(
    rows: Sequence[Row], out: str | os.PathLike, title: str = "", note: str = ""
) -> tuple[Path, Path]:
    """Write the sheet as ``out.png`` and ``out.html``.

    Args:
        rows: the queries.
        out: path without extension (``.png`` or ``.html`` is removed).
        title: heading of the sheet.
        note: smaller line under the heading.

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
    """Square RGB thumbnail of a file: the whole image, aspect ratio kept, centred on white.

    A video gives its first frame; other files give a grey tile with their modality.
    """
    kind = modality_of(path)
    try:
        image = _first_frame(path) if kind == "video" else _open(path, size)
    except Exception:  # one unreadable file must not stop the sheet: it gets a grey tile
        image = None
    out = Image.new("RGB", (size, size), "white")
    if image is None:
        label = kind if kind not in (None, "image") else "unreadable" if os.path.exists(path) else "missing"
        ImageDraw.Draw(out).rectangle((0, 0, size - 1, size - 1), fill=(238, 240, 243))
        font = _font(label, _CAPTION)
        ImageDraw.Draw(out).text((size / 2, size / 2), label, fill=_PALE, font=font, anchor="mm")
        return out
    scale = size / max(image.size)
    new = tuple(max(1, round(side * scale)) for side in image.size)
    image = image.resize(new, Image.Resampling.BICUBIC if scale > 1 else Image.Resampling.LANCZOS)
    out.paste(image, ((size - new[0]) // 2, (size - new[1]) // 2))
    return out


def _open(path: str, size: int) -> Image.Image:
    with Image.open(path) as im:
        im.draft("RGB", (2 * size, 2 * size))  # decodes a JPEG at reduced size
        im.load()
        if im.mode.startswith("I") or im.mode == "F":  # 16 or more bits per pixel: PIL would clip, not scale
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

    with av.open(path) as video:
        return next(video.decode(video=0)).to_image()


# ---- type ------------------------------------------------------------------------------------------------


@functools.cache
def _dejavu(bold: bool) -> tuple[str, dict]:
    """Path of the font that matplotlib ships, and its character map."""
    import matplotlib
    from matplotlib.ft2font import FT2Font

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    file = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", name)
    return file, FT2Font(file).get_charmap()


@functools.cache
def _system_faces() -> list[tuple[str, dict]]:
    """Fonts of the system, for scripts that DejaVu lacks, such as Chinese and Japanese."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    faces = []
    for file in sorted(font_manager.findSystemFonts(fontext="ttf")):
        try:
            faces.append((file, FT2Font(file).get_charmap()))
        except (RuntimeError, OSError):  # e.g. colour fonts, which PIL cannot draw
            continue
    return faces


@functools.lru_cache(maxsize=1024)
def _font(text: str, size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu, or the system font that has the most of the text's characters if DejaVu lacks some."""
    file, known = _dejavu(bold)
    letters = {ord(c) for c in text if not c.isspace()}
    if not letters <= known.keys():
        file, _ = max([(file, known), *_system_faces()], key=lambda face: len(letters & face[1].keys()))
    return ImageFont.truetype(file, size)


def _cut(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """The text, truncated with an ellipsis to `width` pixels."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    low, high = 0, len(text)
    while low < high:  # the longest prefix that fits
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if font.getlength(text[:middle].rstrip() + "…") <= width else (low, middle - 1)
        )
    return text[:low].rstrip() + "…"


def _lines(text: str, font: ImageFont.FreeTypeFont, width: float, most: int) -> list[str]:
    """The text in at most `most` lines, wrapped between words, the last one truncated."""
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
    """Box of a thumbnail in the PNG: left, top, right, bottom in pixels."""
    top = MARGIN + _head_height(title, note)
    top += sum(_row_height(r) for r in rows[:row]) + _ROW_HEAD
    left, line = _left(rows), column // PER_LINE
    x, y = left + (column % PER_LINE) * (THUMB + GAP), top + line * _CELL_HEIGHT
    return x, y, x + THUMB, y + THUMB


def _left(rows: Sequence[Row]) -> int:
    """Left edge of the results: right of a column of query images, if there are any."""
    return MARGIN + (THUMB + 2 * GAP if any(r.image for r in rows) else 0)


def _head_height(title: str, note: str) -> int:
    return (44 if title else 0) + (28 if note else 0) + (12 if title or note else 0)


def _row_height(row: Row) -> int:
    return _ROW_HEAD + max(1, -(-len(row.cells) // PER_LINE)) * _CELL_HEIGHT


def draw_sheet(rows: Sequence[Row], title: str = "", note: str = "") -> Image.Image:
    """The sheet as an RGB image on white; `cell_box` gives the box of each thumbnail."""
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
        if row.image:
            box = (MARGIN, top + _ROW_HEAD)
            sheet.paste(thumbnail(row.image), box)
            _frame(draw, (*box, box[0] + THUMB, box[1] + THUMB), _INK)
            draw.text((MARGIN, box[1] + THUMB + 7), "query image", fill=_PALE, font=_font("a", _CAPTION))
        if not row.cells:
            draw.text((_left(rows), top + _ROW_HEAD), "no results", fill=_PALE, font=_font("a", _CAPTION))
        for j, cell in enumerate(row.cells):
            _draw_cell(sheet, draw, cell, cell_box(rows, i, j, title, note))
        top += _row_height(row)
    return sheet


def _draw_cell(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, cell: Cell, box: tuple[int, int, int, int]
) -> None:
    x, y, _, bottom = box
    sheet.paste(thumbnail(cell.path), (x, y))
    _frame(draw, box, _MARK if cell.correct else _LINE, 3 if cell.correct else 1)
    score = f"{cell.score:.2f}" + (" ✓" if cell.correct else "")
    color = _MARK if cell.correct else _INK
    draw.text((x, bottom + 7), score, fill=color, font=_font(score, _CAPTION, bold=True))
    font = _font(cell.label, _CAPTION)
    for n, line in enumerate(_lines(cell.label, font, THUMB, _CAPTION_LINES)):
        draw.text((x, bottom + 25 + 18 * n), line, fill=_PALE, font=font)


def _frame(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], color, width: int = 1) -> None:
    """Frame around a thumbnail, outside its pixels."""
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
.correct img { outline: 3px solid var(--mark) } .correct b { color: var(--mark) }
.query { margin: 0 0 1rem } .query img { border-color: var(--ink) }
"""


def html_sheet(rows: Sequence[Row], title: str = "", note: str = "", folder: str | os.PathLike = ".") -> str:
    """The sheet as a self-contained HTML page; `folder` is the page's folder, to which links to the files are relative."""
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
        if row.image:
            name = e(printable(Path(row.image).name))
            img = f'<img src="{_data_uri(row.image)}" width="{THUMB}" height="{THUMB}" alt="{name}">'
            parts.append(f'<figure class="query">{img}<figcaption>query image {name}</figcaption></figure>')
        parts.append("<ol>" if row.cells else "<p>no results</p>")
        for rank, cell in enumerate(row.cells, 1):
            name = printable(Path(cell.path).name)
            alt = e(f"{rank}. {cell.label}, score {cell.score:.2f}" + (", correct" if cell.correct else ""))
            img = f'<img src="{_data_uri(cell.path)}" width="{THUMB}" height="{THUMB}" alt="{alt}">'
            tick, mark = (" ✓", ' class="correct"') if cell.correct else ("", "")
            parts.append(
                f"<li{mark}><figure>"
                f'<a href="{e(_link(cell.path, folder))}" title="{e(name)}">{img}</a>'
                f"<figcaption><b>{cell.score:.2f}{tick}</b><br>{e(cell.label)}</figcaption></figure></li>"
            )
        parts.append("</ol>\n</section>" if row.cells else "</section>")
    return "\n".join([*parts, "</main>\n</body>\n</html>\n"])


def _data_uri(path: str) -> str:
    data = io.BytesIO()
    image = thumbnail(path, 2 * THUMB)  # sharp on screens with a pixel ratio of 2
    image.save(data, "JPEG", quality=86)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def _link(path: str, folder: str | os.PathLike) -> str:
    """Relative link from a page in `folder` to the file, so that both can be moved together."""
    try:
        there = os.path.relpath(path, folder)
    except ValueError:  # another drive
        return Path(path).resolve().as_uri()
    return urllib.parse.quote(os.fsencode(there.replace(os.sep, "/")))
