"""The demo: queries and their images are held out, chance levels are correct, and the printed commands work."""

import itertools
import json
import shlex
from pathlib import Path

import pytest

from worldtokens import cli
from worldtokens.apps.demo import command as demo_module
from worldtokens.apps.demo.command import (
    QUERIES,
    demo,
    median_rank_by_chance,
    print_retrieval,
    write_images,
)
from worldtokens.data.sets.emoji import open_emoji
from worldtokens.errors import InputError


def test_queries_and_their_images_are_not_in_training():
    held_out = {row["concept"] for row in open_emoji("test", skin_tones=False)}
    seen = {row["concept"] for split in ("train", "validation") for row in open_emoji(split)}
    captions = {text for row in open_emoji() for text in row["text"]}
    assert len(QUERIES) == 6
    for query, concept in QUERIES.items():
        assert concept in held_out and concept not in seen
        assert query not in captions


def test_median_rank_by_chance_is_the_median_over_all_orders():
    for correct in ([1, 1, 1], [2, 2], [1, 2, 3], [5]):
        ranks = []
        for c in correct:
            # all sets of positions of c correct candidates among 5 are equally likely
            sets = [min(s) + 1 for s in itertools.combinations(range(5), c)]
            ranks += sets * (60 // len(sets))
        ranks.sort()
        assert median_rank_by_chance(5, correct) == ranks[(len(ranks) - 1) // 2]
    assert median_rank_by_chance(390, [1] * 10) == 195


def test_the_table_has_the_chance_level_of_each_figure(capsys):
    rows = [{"text": ["a", "b"]}, {"text": ["c", "d"]}]
    figures = {"text_to_image/candidates": 2.0, "image_to_text/candidates": 4.0}
    for key, median in (("text_to_image", 1.0), ("image_to_text", 2.0)):
        figures[f"{key}/median_rank"] = median
        for k in (1, 5, 10):
            figures |= {f"{key}/R@{k}": 0.75, f"{key}/chance@{k}": 0.5}
    print_retrieval(figures, rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["text-to-image", "75.0%", "75.0%", "75.0%", "1", "of", "2"]
    assert lines[2] == ["chance", "50.0%", "50.0%", "50.0%", "1", "of", "2"]
    # 2 correct of 4: one of them has rank 1 in half of the orders
    assert lines[4] == ["chance", "50.0%", "50.0%", "50.0%", "1", "of", "4"]
    assert "1.5 times the chance level" in " ".join(lines[5])


def test_every_held_out_image_is_written_under_a_valid_file_name(tmp_path):
    rows = open_emoji("test", skin_tones=False)
    folder, row_of = write_images(rows, tmp_path / "images")
    assert len(row_of) == len(rows) == len(list(folder.iterdir()))
    for name, row in row_of.items():
        assert (folder / name).read_bytes() == row["image"]
        assert not set(name) & set('<>:"/\\|?*') and name.isprintable()
    assert (folder / "black cat.png").is_file()
    before = {f.name: f.stat().st_mtime_ns for f in folder.iterdir()}
    write_images(rows, folder)
    assert before == {f.name: f.stat().st_mtime_ns for f in folder.iterdir()}  # not written again
    twins = [{"labels": {"en": "a: b"}, "id": i, "image": b"x"} for i in ("1", "2")]
    assert list(write_images(twins, tmp_path / "twins")[1]) == ["a b.png", "a b 2.png"]


def test_a_folder_with_other_files_is_not_overwritten(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match="was not written by the demo"):
        demo(tmp_path)
    with pytest.raises(InputError, match="has no model"):
        demo(tmp_path / "new", reuse=True)
    for wrong in ({"steps": 0}, {"minutes": 0}):
        with pytest.raises(InputError, match="above 0"):
            demo(tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_printed_commands_work(tmp_path, capsys, monkeypatch):
    out = tmp_path / "my demo"
    assert cli.run(["demo", "--out", str(out), "--steps", "2"]) == 0
    text = capsys.readouterr().out
    assert (
        "chance" in text and "text-to-image" in text and "samples/s" in text and (out / "sheet.png").is_file()
    )
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("  worldtokens ")]
    assert [c[1] for c in commands] == ["search", "search", "index", "train"]
    for command in commands[:3]:
        assert cli.run([str(out / "images") if word == "YOUR_FOLDER" else word for word in command[1:]]) == 0
    first = json.loads((out / "demo.json").read_text())
    assert first["training"]["steps"] == 2 and len(first["queries"]) == 6

    # --reuse does not train and gives the same results
    monkeypatch.setattr(demo_module, "_train", None)
    assert cli.run(["demo", "--out", str(out), "--reuse"]) == 0
    again = json.loads((out / "demo.json").read_text())
    assert again["held_out"] == first["held_out"] and again["queries"] == first["queries"]
    assert again["training"] == first["training"]
    assert Path(out / "images" / ".worldtokens").is_dir()
