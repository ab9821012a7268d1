"""Tux Paint's stamps: parsing of a small folder made here; the real package with `-m network`."""

import pytest

from worldtokens.data import samples
from worldtokens.data.sets.stamps import open_spoken, open_stamps
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


def test_stamps_have_captions_and_speech(stamps):
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


def test_spoken_captions_are_rows_with_their_own_text(stamps):
    """Text and recording are of one language; missing recordings and images are missing columns."""
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


def test_stamps_of_one_caption_or_series_are_in_one_split(stamps):
    assert len(set(open_stamps(folder=stamps).column("split"))) == 1


def test_a_folder_without_stamps_raises(tmp_path):
    with pytest.raises(InputError, match="found no captioned image"):
        open_stamps(folder=tmp_path)


@pytest.mark.network
def test_stamps_from_the_real_package():
    rows = samples.open("stamps", drawings=True)
    assert len(rows) == 950 and len(samples.open("stamps")) == 785
    assert sum(len(speech) for speech in rows.column("speech")) > 7000
    assert all(texts[0] for texts in rows.column("text"))
