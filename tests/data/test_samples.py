"""Named sets that are fetched: parsing, on small folders made here; the real packages behind `-m network`."""

import struct
import zlib

import pytest

from worldtokens.data import fetch, samples
from worldtokens.data.rows import kin
from worldtokens.data.sets.media import read_catalog
from worldtokens.data.sets.stamps import open_spoken, open_stamps
from worldtokens.data.sets.text import open_brown, plain_verse, read_ztext
from worldtokens.errors import InputError


@pytest.fixture
def stamps(tmp_path):
    for name, content in {
        "birds/owl.png": b"png",
        "birds/owl.txt": "An owl.\nfr.utf8=Une chouette.\nde.utf8=\npt_BR.utf8=Uma = coruja\n\n",
        "birds/owl_desc.ogg": b"en",
        "birds/owl_desc_fr.ogg": b"fr",
        "birds/owl_desc_da.ogg.ogg": b"da",
        "birds/owl.ogg": b"hoot",
        "birds/owl.dat": b"",
        "birds/owl_mirror.png": b"png",
        "birds/owl-2.png": b"png",
        "birds/owl-2.txt": "Another owl.",
        "things/owl.png": b"png",
        "things/owl.txt": "AN OWL.",
        "things/cup.svg": b"svg",
        "things/cup.txt": "A cup.\nfr.utf8=Une tasse.",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path


def test_stamps_are_read_with_captions_and_speech(stamps):
    rows = open_stamps(languages=("en", "fr"), folder=stamps)
    assert [row["id"] for row in rows] == ["birds/owl-2", "birds/owl", "things/owl"]
    owl = rows[1]
    assert owl["text"] == ["An owl.", "Une chouette."]
    assert owl["captions"] == {"en": "An owl.", "fr": "Une chouette.", "pt_BR": "Uma = coruja"}
    assert sorted(owl["speech"]) == ["da", "en", "fr"] and owl["speech"]["en"].endswith("owl_desc.ogg")
    assert owl["sound"].endswith("birds/owl.ogg") and owl["class"] == "birds"
    assert "sound" not in rows[0] and rows[0]["speech"] == {}


def test_stamps_options(stamps):
    spoken = open_stamps(audio="fr", folder=stamps)
    assert [row["id"] for row in spoken] == ["birds/owl"] and spoken[0]["audio"].endswith("_desc_fr.ogg")
    assert "svg" in open_stamps(drawings=True, folder=stamps)[2]
    with pytest.raises(InputError, match="expected some of da, en, fr"):
        open_stamps(audio="xx", folder=stamps)


def test_recordings_are_rows_with_their_own_words(stamps):
    """Words and recording are of one language; what nobody spoke or drew is lacking, not guessed."""
    rows = open_spoken(languages=("en", "fr"), folder=stamps)
    assert [row["id"] for row in rows] == [
        "birds/owl-2 en", "birds/owl en", "birds/owl fr", "things/cup en", "things/cup fr", "things/owl en",
    ]  # fmt: skip
    french = rows[2]
    assert french["text"] == "Une chouette." and french["audio"].endswith("owl_desc_fr.ogg")
    assert french["stamp"] == "birds/owl" and french["image"].endswith("birds/owl.png")
    assert "audio" not in rows[0] and "image" not in rows[3]
    whole = open_stamps(languages=("en", "fr"), folder=stamps)[1]
    assert [path.rpartition("/")[2] for path in whole["audio"]] == ["owl_desc.ogg", "owl_desc_fr.ogg"]
    with pytest.raises(InputError, match="languages: found 'xx'"):
        open_spoken(languages="xx", folder=stamps)


def test_stamps_of_one_caption_or_series_stay_together(stamps):
    assert len(set(open_stamps(folder=stamps).column("split"))) == 1


def test_a_wrong_folder_and_a_missing_tool_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="found no captioned image"):
        open_stamps(folder=tmp_path)
    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"needs the program 'apt-get'.*Debian"):
        samples.open("stamps")
    assert not list((tmp_path / "cache").iterdir())  # nothing half-made stays


def test_cache_is_filled_once_and_never_by_half(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path))
    calls = []

    def fill(folder):
        calls.append(folder)
        (folder / "x").write_text("x")
        if len(calls) == 1:
            raise InputError("the connection broke")

    with pytest.raises(InputError, match="connection broke"):
        fetch.cached("set", fill)
    assert not list(tmp_path.iterdir())
    assert fetch.cached("set", fill) == fetch.cached("set", fill) == tmp_path / "set"
    assert len(calls) == 2 and (tmp_path / "set/x").read_text() == "x"


def test_kin_joins_through_others_whatever_the_order():
    items = [("a", "x"), ("b",), ("c", "y"), ("x", "y"), ("d", "b")]
    assert kin(items) == ["a", "b", "a", "a", "b"]
    assert kin(items[::-1]) == kin(items)[::-1]


def test_verses_lose_markup_and_notes_but_no_spaces():
    spanish = '<w lemma="H1">hay allí</w><transChange type="added">también</transChange><w lemma="H2">bdelio</w> <w>y</w>.'
    assert plain_verse(spanish) == "hay allí también bdelio y."
    english = (
        '<w>begat</w> <w>Serug</w>:<note placement="foot"><reference>11.20 </reference>Gr. Saruch</note> '
    )
    assert plain_verse(english) == "begat Serug:"
    psalm = '<title>Of an editor</title><title canonical="true">A <w>Psalm</w>.</title> <lg/><divineName><w>LORD</w></divineName>, how'
    assert plain_verse(psalm) == "A Psalm. LORD, how"


def test_ztext_entries_are_cut_from_their_blocks(tmp_path):
    texts = ["", "first", "zweite ü", "third"]
    blocks = [b"first" + "zweite ü".encode(), b"third"]
    packed = [zlib.compress(block) for block in blocks]
    (tmp_path / "nt.bzz").write_bytes(b"".join(packed))
    starts = [(0, len(packed[0]), len(blocks[0])), (len(packed[0]), len(packed[1]), 5)]
    (tmp_path / "nt.bzs").write_bytes(b"".join(struct.pack("<III", *start) for start in starts))
    entries = [(0, 0, 0), (0, 0, 5), (0, 5, 9), (1, 0, 5)]
    (tmp_path / "nt.bzv").write_bytes(b"".join(struct.pack("<IIH", *entry) for entry in entries))
    assert read_ztext(tmp_path, "nt") == texts
    with pytest.raises(InputError, match="zText"):
        read_ztext(tmp_path, "ot")


def test_catalog_of_java_properties(tmp_path):
    path = tmp_path / "c.properties"
    path.write_bytes(
        b"# name#9=no\nid=x\nname#1=Bill 10\\u20ac\nname#12 = Caf\xe9 table \r\ntags#12=Seat, Wood\n"
    )
    assert read_catalog(path) == {1: {"name": "Bill 10€"}, 12: {"name": "Café table", "tags": "Seat, Wood"}}


def test_brown_words_keep_their_slashes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLDTOKENS_CACHE", str(tmp_path))
    (tmp_path / "brown").mkdir()
    (tmp_path / "brown/cats.txt").write_text("ca01 news\n")
    (tmp_path / "brown/ca01").write_text(
        "\n\n\tThe/at 1/2/cd ``/`` cup/nn ''/'' ./.\n\n\tIt/pps is/bez ./.\n"
    )
    rows = open_brown(unit="sentence")
    assert rows.texts() == ["The 1/2 `` cup '' .", "It is ."] and rows.column("id") == ["ca01.1", "ca01.2"]
    assert open_brown()[0]["text"] == "The 1/2 `` cup '' .\nIt is ." and open_brown()[0]["class"] == "news"


@pytest.mark.network
def test_stamps_from_the_real_package():
    rows = samples.open("stamps", drawings=True)
    assert len(rows) == 950 and len(samples.open("stamps")) == 785
    assert sum(len(speech) for speech in rows.column("speech")) > 7000
    assert all(texts[0] for texts in rows.column("text"))


@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("digits", 5000),
        ("verses", 31084),
        ("brown", 500),
        ("furniture", 820),
        ("voice", 166),
        ("samples", 165),
        ("clips", 4),
    ],
)
def test_fetched_sets_have_their_counts(name, count):
    rows = samples.open(name)
    assert len(rows) == count == len(set(rows.column("id")))
    if "split" in rows.columns:
        assert sum(len(samples.open(name, split=side)) for side in ("train", "validation", "test")) == count
        assert all(len(samples.open(name, split=side)) for side in ("train", "validation", "test"))
    if name == "verses":
        for column in ("en", "es"):
            train, test = (set(rows.split(side).column(column)) for side in ("train", "test"))
            assert not train & test
