"""Named sets that are fetched: parsing, on small folders made here; the real packages behind `-m network`."""

import pytest

from worldtokens.data import fetch, samples
from worldtokens.data.stamps import open_stamps
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


def test_stamps_of_one_caption_or_series_stay_together(stamps):
    assert len(set(open_stamps(folder=stamps).column("split"))) == 1


def test_a_wrong_folder_and_a_missing_tool_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="found no captioned picture"):
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


@pytest.mark.network
def test_stamps_from_the_real_package():
    rows = samples.open("stamps", drawings=True)
    assert len(rows) == 950 and len(samples.open("stamps")) == 785
    assert sum(len(speech) for speech in rows.column("speech")) > 7000
    assert all(texts[0] for texts in rows.column("text"))
