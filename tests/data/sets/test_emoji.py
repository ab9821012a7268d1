"""The embedded emoji set: sizes, splits, captions, and reading from several processes."""

import hashlib
import io
import json
import multiprocessing
import operator
import pickle
import threading
import zipfile

import pytest
from PIL import Image

from worldtokens.data import samples
from worldtokens.data.sets.emoji import LANGUAGES, PACK, emoji_captions, emoji_concept, emoji_id, open_emoji
from worldtokens.errors import InputError

SPLITS = ("train", "validation", "test")


def test_counts_and_distinct_captions():
    rows = samples.open("emoji")
    assert len(rows) == 3786
    assert len(set(rows.column("id"))) == 3786
    assert len({texts[0] for texts in rows.column("text")}) == 3786
    assert len(set(rows.column("base"))) == len(samples.open("emoji", skin_tones=False)) == 1911
    splits = [len(samples.open("emoji", split=split)) for split in SPLITS]
    assert splits == [3050, 346, 390]


def test_every_image_is_a_64_pixel_png():
    for row in samples.open("emoji")[::50]:
        with Image.open(io.BytesIO(row["image"])) as image:
            image.load()
            assert (image.format, image.size) == ("PNG", (64, 64))


def test_splits_share_no_base_concept_or_image():
    for key in ("base", "concept", "image"):
        seen = [
            {hashlib.sha256(row[key]).digest() if key == "image" else row[key] for row in open_emoji(split)}
            for split in SPLITS
        ]
        assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2]), key


def test_skin_tones_and_genders_share_a_concept():
    rows = {row["id"]: row for row in open_emoji().filter(lambda row: "-1F692" in row["id"])}
    assert len(rows) == 18  # person, man, woman firefighter, each plain and in five tones
    assert len({row["concept"] for row in rows.values()}) == 1
    assert rows["1F469-1F3FD-200D-1F692"]["base"] == "1F469-200D-1F692"
    assert emoji_concept("1F46A") == emoji_concept("1F468-200D-1F469-200D-1F466")  # families
    assert emoji_concept("1F3C3-200D-2640-200D-27A1") == emoji_concept("1F3C3")  # woman running to the right
    assert emoji_concept("1F469-200D-1F692") != emoji_concept("1F469-200D-1F52C")  # firefighter, scientist


def test_captions_by_language():
    rows = open_emoji(languages=("en", "fr")).filter(lambda row: row["id"] == "1F600")
    texts = rows[0]["text"]
    assert texts[0] == "grinning face" and "visage rieur" in texts
    assert rows[0]["labels"] == {"en": "grinning face", "fr": "visage rieur"}
    assert open_emoji(languages=("ja", "en"))[0]["text"][0] == "にっこり笑う"
    for language in LANGUAGES:
        assert all(texts[0].strip() for texts in open_emoji(languages=(language,)).column("text"))
    with pytest.raises(InputError, match="en, fr, de, es, ru, ja"):
        open_emoji(languages=("it",))


def test_caption_rule():
    assert emoji_captions("cat", ["pet", "Cat", "animal"]) == ["cat", "cat: pet, animal", "pet, animal"]
    assert emoji_captions("flag: Fiji", ["FJ"]) == ["flag: Fiji", "flag: Fiji, FJ", "FJ"]
    assert emoji_captions("hand: dark skin tone", ["bye"], skin_tone=True)[1:] == [
        "hand: dark skin tone, bye"
    ]
    assert emoji_captions("cat", []) == ["cat"]
    assert emoji_id("1f3c3-200d-2640-fe0f") == "1F3C3-200D-2640"


def test_rows_are_deterministic_and_cannot_be_modified():
    one, two = open_emoji("test"), open_emoji("test")
    assert [one[i] for i in range(0, 390, 39)] == [two[i] for i in range(0, 390, 39)]
    row = one[0]
    row["text"].append("modified")
    row["labels"]["en"] = "modified"
    assert one[0] == two[0] != row


def test_images_are_lazy_and_pickles_are_small():
    rows = open_emoji("test")
    assert not any(isinstance(value, bytes) for value in rows.column("image"))
    data = pickle.dumps(rows)
    assert len(data) < 400_000
    assert pickle.loads(data)[7] == rows[7]


def test_spawned_process_and_threads_read_the_same_bytes():
    rows = open_emoji("test")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(operator.getitem, (rows, 5)) == rows[5]
    expected, wrong = [rows[i]["image"] for i in range(100)], []

    def read():
        wrong.extend(i for i in range(100) if rows[i]["image"] != expected[i])

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_pack_is_a_plain_zip_with_its_notice():
    with zipfile.ZipFile(PACK) as archive:
        assert archive.namelist() == ["README.txt", "pictures.bin", "index.jsonl"]
        assert "CC-BY-4.0" in archive.read("README.txt").decode()
        line = json.loads(archive.read("index.jsonl").splitlines()[3])
        with archive.open("pictures.bin") as images:
            images.seek(line["start"])
            assert images.read(line["size"]) == open_emoji()[3]["image"]
    assert "CC-BY-4.0" in PACK.with_name("EMOJI_LICENSE.md").read_text()
    assert PACK.stat().st_size < 11_000_000


def test_a_damaged_pack_raises_with_what_to_do(tmp_path, monkeypatch):
    broken = tmp_path / "emoji.zip"
    broken.write_bytes(PACK.read_bytes()[:5000])
    monkeypatch.setattr("worldtokens.data.sets.emoji.PACK", broken)
    with pytest.raises(InputError, match="Install worldtokens again"):
        open_emoji()


def test_unknown_names_list_the_known_ones():
    with pytest.raises(InputError, match="emoji, emoji_plain, stamps"):
        samples.open("imagenet")
    with pytest.raises(InputError, match="found test, train, validation"):
        samples.open("emoji", split="val")
    with pytest.raises(TypeError):
        samples.open("emoji", langages=("fr",))
    assert {name for name, *_ in samples.table()} == set(samples.SETS)


def test_emoji_plain_has_no_skin_tone_variants():
    plain = samples.open("emoji_plain")
    assert len(plain) == 1911 and all(row["id"] == row["base"] for row in plain)
    assert {row["id"] for row in plain} < {row["id"] for row in samples.open("emoji")}


@pytest.mark.network
def test_the_script_builds_the_committed_pack():
    import subprocess
    import sys
    from pathlib import Path

    script = Path(__file__).parents[3] / "scripts" / "pack_emoji.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
