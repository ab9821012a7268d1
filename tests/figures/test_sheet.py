"""The image sheet: positions and content of thumbnails, and an HTML page that is escaped and self-contained."""

import base64
import io
import os
import re
import urllib.parse
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image, ImageDraw

from worldtokens.figures.sheet import (
    PER_LINE,
    THUMB,
    Cell,
    Row,
    _font,
    _lines,
    cell_box,
    draw_sheet,
    save_sheet,
    thumbnail,
)

COLORS = [
    "red",
    "lime",
    "blue",
    "yellow",
    "cyan",
    "magenta",
    "orange",
    "black",
    "gray",
    "purple",
    "brown",
    "navy",
]


@pytest.fixture
def images(tmp_path):
    paths = []
    for i, color in enumerate(COLORS):
        paths.append(str(tmp_path / f"{color}.png"))
        Image.new("RGB", (20 + i, 20 + i), color).save(paths[-1])
    return paths


def middle(sheet, box):
    return sheet.getpixel(((box[0] + box[2]) // 2, (box[1] + box[3]) // 2))


@pytest.mark.parametrize("title", ["", "Held-out images"])
@pytest.mark.parametrize("image", [None, 0])
def test_each_thumbnail_is_in_its_cell(images, title, image):
    rows = [
        Row("first", [Cell(p, 0.5) for p in images]),  # more than one line
        Row(
            "second",
            [Cell(p, 0.5) for p in reversed(images[:3])],
            image=images[0] if image == 0 else None,
        ),
        Row("nothing", []),
        Row("third", [Cell(images[4], 0.1, "a caption", correct=True)]),
    ]
    sheet = draw_sheet(rows, title)
    boxes = []
    for i, row in enumerate(rows):
        for j, cell in enumerate(row.cells):
            box = cell_box(rows, i, j, title)
            boxes.append(box)
            assert (box[2] - box[0], box[3] - box[1]) == (THUMB, THUMB)
            color = os.path.basename(cell.path)[:-4]
            assert middle(sheet, box) == Image.new("RGB", (1, 1), color).getpixel((0, 0))
            # the box is one colour: nothing is drawn over it
            assert len(sheet.crop(box).getcolors(10**6)) == 1
    for a in boxes:
        assert a[0] >= 0 and a[2] <= sheet.width and a[3] <= sheet.height
        for b in boxes:
            assert a == b or a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    assert sheet.getpixel((0, 0)) == sheet.getpixel((sheet.width - 1, sheet.height - 1)) == (255, 255, 255)
    assert boxes[PER_LINE][0] == boxes[0][0] and boxes[PER_LINE][1] > boxes[0][3]


def test_score_and_caption_are_drawn_under_their_thumbnail(images):
    def under(score, caption):
        rows = [Row("q", [Cell(images[0], score, caption)])]
        x, _, right, bottom = cell_box(rows, 0, 0)
        return np.array(draw_sheet(rows).crop((x, bottom + 4, right, bottom + 60)).convert("L"))

    assert (under(0.5, "cat") < 128).sum() > 50
    assert (under(0.5, "cat") != under(0.6, "cat")).any() and (under(0.5, "cat") != under(0.5, "dog")).any()


def test_a_thumbnail_keeps_the_aspect_ratio_on_white(tmp_path):
    wide = tmp_path / "wide.png"
    Image.new("RGB", (400, 100), "red").save(wide)
    pixels = np.array(thumbnail(str(wide)))
    red = (pixels == (255, 0, 0)).all(-1)
    assert red.any(0).sum() == THUMB and red.any(1).sum() == THUMB // 4
    assert (pixels[0] == 255).all() and (pixels[-1] == 255).all()

    glass = tmp_path / "glass.png"  # red pixels, fully transparent
    Image.new("RGBA", (10, 10), (255, 0, 0, 0)).save(glass)
    assert (np.array(thumbnail(str(glass))) == 255).all()

    rotated = tmp_path / "rotated.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF: rotated by 90 degrees
    Image.new("RGB", (400, 100), "red").save(rotated, exif=exif)
    red = np.array(thumbnail(str(rotated)))[..., 1] < 100
    assert red.any(0).sum() < red.any(1).sum() == THUMB

    ramp = tmp_path / "ramp.png"  # 16 bits: scaled, not clipped
    Image.fromarray(np.linspace(0, 65535, 100).astype(np.uint16)[None].repeat(100, 0)).save(ramp)
    grey = np.array(thumbnail(str(ramp)))[THUMB // 2, :, 0].astype(int)
    assert grey[0] < 20 and grey[-1] > 235 and 100 < grey[THUMB // 2] < 155

    tiny = tmp_path / "tiny.gif"
    Image.new("P", (1, 1)).save(tiny)
    assert thumbnail(str(tiny)).size == (THUMB, THUMB)


def test_other_and_unreadable_files_give_a_grey_tile_with_a_label(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "song.mp3").write_bytes(b"ID3")
    tiles = [thumbnail(str(tmp_path / name)) for name in ("bad.png", "song.mp3", "missing.png")]
    assert len({t.tobytes() for t in tiles}) == 3  # three different labels
    for tile in tiles:
        assert 1 < len(tile.getcolors(10**6)) < 200


def test_a_video_gives_its_first_frame(tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "video.mp4"), "w") as out:
        stream = out.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 64
        for color in ("red", "blue", "blue"):
            frame = av.VideoFrame.from_image(Image.new("RGB", (64, 64), color))
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    r, g, b = thumbnail(str(tmp_path / "video.mp4")).getpixel((THUMB // 2, THUMB // 2))
    assert r > 200 and g < 60 and b < 60


def test_long_captions_are_wrapped_between_words_and_truncated():
    font = _font("a", 14)
    lines = _lines("smiling face with heart-shaped eyes and a very long description", font, THUMB, 2)
    assert len(lines) == 2 and lines[1].endswith("…") and lines[0].startswith("smiling face")
    assert all(font.getlength(line) <= THUMB for line in lines)
    assert font.getlength(_lines("x" * 500, font, THUMB, 2)[0]) <= THUMB
    assert _lines("", font, THUMB, 2) == [] and _lines("a\nb", font, THUMB, 2) == ["a b"]


class Page(HTMLParser):
    """Collects tags and text of a page, and checks that tags are closed in order."""

    VOID = {"meta", "img", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


NASTY = '<script>alert("x")</script> & \'"><img src=x onerror=alert(1)>'


def test_the_page_escapes_all_text(tmp_path):
    file = tmp_path / 'a #1 "b" <i>?%\'ü.png'
    Image.new("RGB", (9, 9), "red").save(file)
    raw = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.png")
    Image.new("RGB", (9, 9), "lime").save(raw)
    rows = [
        Row(NASTY, [Cell(str(file), 0.25, NASTY, correct=True), Cell(raw, 0.125)], image=str(file)),
        Row("b", []),
    ]
    _, page = save_sheet(rows, tmp_path / "out" / "sheet", title=NASTY, note=NASTY)
    text = page.read_text(encoding="utf-8")
    seen = Page(text)
    assert not seen.all("script") and len(seen.all("img")) == 3
    assert not any(name.startswith("on") for _, attrs in seen.tags for name in attrs)
    assert seen.text.count(NASTY) == 5  # title, heading, note, query, caption: literal
    alts = [img["alt"] for img in seen.all("img")]
    assert alts[1] == f"1. {NASTY}, score 0.25, correct" and alts[2] == r"2. \xff\n, score 0.12"
    # the links are relative to the page's folder
    for link, path in zip(seen.all("a"), (str(file), raw), strict=True):
        there = os.fsdecode(urllib.parse.unquote_to_bytes(link["href"]))
        assert os.path.samefile(os.path.join(page.parent, there), path)


def test_the_page_is_self_contained(images, tmp_path):
    rows = [Row("q", [Cell(p, 0.5) for p in images])]
    png, page = save_sheet(rows, tmp_path / "sheet.png")
    assert (png.name, page.name) == ("sheet.png", "sheet.html")
    text = page.read_text(encoding="utf-8")
    for tag, attrs in Page(text).tags:
        assert tag not in ("link", "script", "iframe")
        if tag == "img":
            kind, data = attrs["src"].split(",", 1)
            assert kind == "data:image/jpeg;base64"
            Image.open(io.BytesIO(base64.b64decode(data))).load()
    assert not re.search(r"url\(|@import|https?:", text)
    shown = [Image.open(io.BytesIO(base64.b64decode(i["src"].split(",")[1]))) for i in Page(text).all("img")]
    for im, path in zip(shown, images, strict=True):
        expected = Image.open(path).convert("RGB").getpixel((0, 0))
        assert np.abs(np.subtract(im.getpixel((THUMB, THUMB)), expected)).max() < 8


def test_a_name_with_a_dot_is_kept(images, tmp_path):
    png, _ = save_sheet([Row("q", [Cell(images[0], 1.0)])], tmp_path / "v1.2 sheet")
    assert png.name == "v1.2 sheet.png"


def test_other_scripts_use_a_font_with_their_characters():
    latin, greek = _font("red apple", 14), _font("κόκκινο μήλο", 14)
    assert "DejaVuSans" in os.path.basename(latin.path) and latin.path == greek.path
    im = Image.new("L", (200, 40), 255)
    ImageDraw.Draw(im).text((5, 5), "яблоко", font=_font("яблоко", 20), fill=0)
    assert (np.array(im) < 128).sum() > 100
    assert _font("りんご 🍎", 14) is not None  # whichever font this system has
