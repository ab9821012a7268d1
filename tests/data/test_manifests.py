"""The user's own folders and tables: captions, encodings, quotes, and errors that name the line."""

import json
import unicodedata

import pytest

from worldtokens.data.manifests import caption_from_name, open_rows, write_folder
from worldtokens.errors import InputError

PNG = b"\x89PNG\r\n\x1a\n"  # enough, since nothing here decodes it


@pytest.fixture
def files(tmp_path):
    """Writes files: name -> text or bytes; every image named a.png, b.png, c.png exists."""

    def write(**contents):
        for name in ("a.png", "b.png", "c.png"):
            (tmp_path / name).write_bytes(PNG)
        for name, content in contents.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return write


def test_folder_pairs_files_with_captions(tmp_path):
    for name, content in {
        "cats/one.JPG": PNG,
        "cats/one.txt": "a black cat\n\na cat on a mat\n",
        "cats/two.png": PNG,
        "cats/two.png.txt": "a white cat",
        "red-Apple_03.webp": PNG,
        "IMG_2041.jpg": PNG,
        "bell.png": PNG,
        "bell.wav": b"RIFF",
        "bell.caption": "a ringing bell",
        "README.txt": "not a caption",
        ".hidden.png": PNG,
        ".cache/x.png": PNG,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = {row["id"]: row for row in open_rows(tmp_path)}
    assert list(rows) == ["IMG_2041.jpg", "bell.png", "cats/one.JPG", "cats/two.png", "red-Apple_03.webp"]
    assert rows["cats/one.JPG"]["text"] == ["a black cat", "a cat on a mat"]
    assert rows["cats/one.JPG"]["class"] == "cats" and "class" not in rows["bell.png"]
    assert rows["cats/two.png"]["text"] == "a white cat"
    assert rows["bell.png"]["audio"].endswith("bell.wav") and rows["bell.png"]["text"] == "a ringing bell"
    assert rows["red-Apple_03.webp"]["text"] == "red Apple"
    assert "text" not in rows["IMG_2041.jpg"]
    assert "text" not in open_rows(tmp_path, captions_from_names=False)[4]


def test_two_images_with_one_stem_are_two_rows(files):
    root = files(a_DOT_jpg=PNG, a_DOT_txt="twice")
    rows = [row for row in open_rows(root) if row.get("text") == "twice"]
    assert [row["id"] for row in rows] == ["a.jpg", "a.png"]


def test_decomposed_file_name_finds_its_caption(tmp_path):
    (tmp_path / (unicodedata.normalize("NFD", "é") + ".png")).write_bytes(PNG)
    (tmp_path / "é.txt").write_text("accent")
    assert open_rows(tmp_path)[0]["text"] == "accent"


@pytest.mark.parametrize(
    ("stem", "caption"),
    [
        ("blueCar", "blue Car"),
        ("12_angry_men", "12 angry men"),
        ("photo of a dog (2)", "photo of a dog"),
        ("кошка-01", "кошка"),
        ("猫", "猫"),
        ("DSC00012", ""),
        ("IMG_20210304_101010", ""),
        ("000000391895", ""),
        ("3f2a9c01b7", ""),
    ],
)
def test_captions_from_file_names(stem, caption):
    assert caption_from_name(stem) == caption


def test_folder_without_media_and_empty_caption(tmp_path, files):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="found no image"):
        open_rows(empty)
    root = files(a_DOT_txt=" \n")
    with pytest.raises(InputError, match=r"a\.txt: found no caption"):
        open_rows(root)
    rows = open_rows(root, on_error="skip")
    assert len(rows) == 2 and len(rows.skipped) == 1 and "1 rows skipped" in rows.report()


def test_csv_with_quotes_commas_and_line_breaks(files):
    table = 'image,text\r\na.png,"a ""big"", red\r\nball"\r\n\r\nb.png,plain\r\n'
    rows = open_rows(files(t_DOT_csv="\ufeff" + table) / "t.csv")
    assert [row["text"] for row in rows] == ['a "big", red\r\nball', "plain"]
    assert rows[0]["id"] == "a.png" and rows[0]["image"].endswith("/a.png")


def test_csv_errors_name_the_line_after_a_caption_of_two_lines(files):
    root = files(t_DOT_csv='image,text\na.png,"two\nlines"\nb.png,one, too many\nc.png,good\n')
    with pytest.raises(InputError, match=r"t\.csv, line 4: found 3 fields, expected 2 \(image, text\)"):
        open_rows(root / "t.csv")
    rows = open_rows(root / "t.csv", on_error="skip")
    assert [row["id"] for row in rows] == ["a.png", "c.png"] and "line 4" in rows.skipped[0]


def test_an_unclosed_quote_raises(files):
    root = files(t_DOT_tsv='image\ttext\na.png\t"so it began\nb.png\tsecond\n')
    for on_error in ("raise", "skip"):
        with pytest.raises(InputError, match=r"line 2 .*quotes=False"):
            open_rows(root / "t.tsv", on_error=on_error)
    assert [row["text"] for row in open_rows(root / "t.tsv", quotes=False)] == ['"so it began', "second"]


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_byte_0x92(files, name):
    if name == "t.csv":
        data = b"image,text\na.png,it is\nb.png,it\x92s\nc.png,end\n"
    else:
        data = b'{"image":"a.png","text":"it is"}\n{"image":"b.png","text":"it\x92s"}\n{"image":"c.png","text":"end"}\n'
    path = files(**{name.replace(".", "_DOT_"): data}) / name
    line = 3 if name == "t.csv" else 2
    with pytest.raises(InputError, match=rf"line {line}: found byte 0x92 .*cp1252"):
        open_rows(path)
    rows = open_rows(path, encoding_errors="replace")
    assert (rows[1]["text"], rows.replaced, len(rows)) == ("it\ufffds", 1, 3)
    rows = open_rows(path, on_error="skip")
    assert ([row["id"] for row in rows], len(rows.skipped)) == (["a.png", "c.png"], 1)
    assert open_rows(path, encoding="cp1252")[1]["text"] == "it’s"


def test_other_encodings_and_delimiters(files):
    text = "image;text\na.png;été\n"
    root = files(u_DOT_csv=text.encode("utf-16"), s_DOT_csv=text, m_DOT_csv=text.replace("\n", "\r"))
    with pytest.raises(InputError, match='encoding="utf-16"'):
        open_rows(root / "u.csv")
    assert open_rows(root / "u.csv", encoding="utf-16")[0]["text"] == "été"
    assert open_rows(root / "s.csv")[0]["text"] == open_rows(root / "m.csv")[0]["text"] == "été"


def test_columns_are_renamed_and_unknown_ones_raise(files):
    root = files(t_DOT_csv="filepath,title,alt\na.png,first,second\n", h_DOT_csv="a.png,first\n")
    with pytest.raises(InputError, match="found columns filepath, title, alt"):
        open_rows(root / "t.csv")
    with pytest.raises(InputError, match="no column 'caption'"):
        open_rows(root / "t.csv", columns={"text": "caption"})
    row = open_rows(root / "t.csv", columns={"image": "filepath", "text": ["title", "alt"]})[0]
    assert row["text"] == ["first", "second"] and row["image"].endswith("a.png")
    assert open_rows(root / "h.csv", header=["image", "text"])[0]["text"] == "first"
    with pytest.raises(InputError, match="occurs 2 times"):
        open_rows(files(d_DOT_csv="text,text\na,b\n") / "d.csv")


def test_missing_files_urls_and_wrong_types_raise(files):
    lines = [
        {"image": "none.png"},
        {"image": "http://x.org/a.png"},
        {"text": 5},
        {"text": []},
        ["a"],
        {"text": "ok"},
    ]
    root = files(t_DOT_jsonl="\n".join(map(json.dumps, lines)) + "\n{bad\n")
    for number, message in enumerate(("no file", "Download it first", "is 5", "found", "a list"), 1):
        one = files(one_DOT_jsonl=json.dumps(lines[number - 1])) / "one.jsonl"
        with pytest.raises(InputError, match=rf"line 1: .*{message}"):
            open_rows(one)
    rows = open_rows(root / "t.jsonl", on_error="skip")
    assert len(rows) == 1 and rows[0]["id"] == "6" and len(rows.skipped) == 6
    assert len(open_rows(root / "t.jsonl", on_error="skip", check=False)) == 2


def test_several_captions_and_lines_for_one_image(files):
    root = files(
        t_DOT_jsonl='{"image": "a.png", "text": ["one", "two"], "more": 1}\n',
        t_DOT_csv="image,text\na.png,one\nb.png,x\na.png,two\na.png,one\n",
    )
    assert open_rows(root / "t.jsonl")[0]["text"] == ["one", "two"]
    assert [row["text"] for row in open_rows(root / "t.csv", merge="image")] == [["one", "two"], "x"]
    splits = [{row["image"] for row in _split(root / "t.csv", split)} for split in ("train", "test")]
    assert not splits[0] & splits[1] and len(splits[0] | splits[1]) == 2


def _split(path, split):
    return open_rows(path).split(split, {"train": 0.5, "test": 0.5})


def test_empty_cells_are_missing_columns(files):
    rows = open_rows(files(t_DOT_csv="image,text,note\na.png,,x\n,only text,\n") / "t.csv")
    assert "text" not in rows[0] and "image" not in rows[1]
    with pytest.raises(InputError, match="no usable row"):
        open_rows(files(t_DOT_csv="image,text\n") / "t.csv")


def test_a_metadata_file_describes_its_folder(files):
    root = files(metadata_DOT_csv="file_name,text\na.png,listed\n")
    rows = open_rows(root)
    assert len(rows) == 1 and rows[0]["image"].endswith("a.png") and rows[0]["text"] == "listed"


def test_names_and_paths():
    assert len(open_rows("emoji", split="test", languages=("fr",))) == 390
    with pytest.raises(InputError, match="no such file or folder"):
        open_rows("no/such/thing")
    with pytest.raises(InputError, match="named set"):
        open_rows("emoji", columns={"image": "x"})
    with pytest.raises(InputError, match="expected one of raise, skip"):
        open_rows(__file__, on_error="ignore")
    with pytest.raises(InputError, match=r"expected a folder, \.csv"):
        open_rows(__file__)


def test_a_written_folder_is_read_back(tmp_path):
    rows = open_rows("emoji", split="validation")[:12]
    paths = write_folder(rows, tmp_path / "out")
    again = {row["id"]: row for row in open_rows(tmp_path / "out")}
    for row, path in zip(rows, paths, strict=True):
        assert path.read_bytes() == row["image"]
        assert again[path.name]["text"] == (row["text"] if len(row["text"]) > 1 else row["text"][0])


def test_columns_of_a_custom_front_end(files):
    """They are listed in columns=; without it the error says how."""
    root = files(t_DOT_jsonl='{"row": {"age": 31}}\n', t_DOT_csv="notes,tempo\nc d e,120\n")
    assert open_rows(root / "t.jsonl", columns={"row": "row"})[0]["row"] == {"age": 31}
    assert open_rows(root / "t.jsonl", columns={"person": "row"})[0]["person"] == {"age": 31}
    row = open_rows(root / "t.csv", columns={"midi": "notes"})[0]
    assert (row["midi"], row["tempo"]) == ("c d e", "120")
    for name, column in (("t.jsonl", "row"), ("t.csv", "notes")):
        with pytest.raises(InputError, match="front-end of your own") as error:
            open_rows(root / name)
        assert f'columns={{"{column}": "{column}"}}' in str(error.value)
