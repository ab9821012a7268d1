"""Questions about emoji: answers from the annotations, splits of the images, one correct image of two."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.data.sets.questions import COLOURS, KINDS

ROWS = samples.open("emoji_questions")
EMOJI = {r["id"]: r for r in samples.open("emoji")._records}


def answer(id: str) -> str:
    return next(r["messages"][1]["content"] for r in ROWS._records if r["id"] == id)


def test_answers_by_hand():
    assert answer("1F34E what") == "red apple" and answer("1F34E colour") == "red"
    assert answer("1F34E group") == "Food & Drink" and answer("1F1EB-1F1EF group") == "Flags"
    assert answer("1F91D-1F3FD tone") == "medium" and answer("1F647-1F3FF-200D-2642 tone") == "dark"
    count = Counter(r["id"].rpartition(" ")[0] for r in ROWS._records)
    assert count["1F91D-1F3FD"] == 1  # a skin-tone variant has only the question about the tone
    two = "1F469-1F3FB-200D-1F91D-200D-1F468-1F3FF"
    assert two not in EMOJI or count[two] == 0  # two people with two tones: no single answer


def test_every_answer_is_in_the_annotations():
    assert set(ROWS.column("kind")) == set(KINDS)
    for row in ROWS._records:
        emoji, given = EMOJI[row["id"].rpartition(" ")[0]], row["messages"][1]["content"]
        name = emoji["labels"]["en"]
        if row["kind"] in ("what", "group"):
            assert given == {"what": name, "group": emoji["group"]}[row["kind"]]
        elif row["kind"] == "colour":
            assert [c for c in COLOURS if c in re.split(r"\W+", name.lower())] == [given]
        elif row["kind"] == "tone":
            assert f"{given} skin tone" in name
        assert row["split"] == emoji["split"]


def test_which_of_two_has_one_correct_answer():
    by_image = {e["image"]: e for e in EMOJI.values()}
    rows = ROWS.filter(lambda r: r["kind"] == "which")._records
    for row in rows:
        question, *rest = row["messages"][0]["content"]
        groups = [by_image[p["image"]]["group"] for p in rest if not isinstance(p, str)]
        right = ["the first", "the second"].index(row["messages"][1]["content"])
        assert question == f"Which one is of the group {groups[right]}?" and groups[0] != groups[1]
        assert {by_image[p["image"]]["split"] for p in rest if not isinstance(p, str)} == {row["split"]}
    answers = Counter(r["messages"][1]["content"] for r in rows)
    assert abs(answers["the first"] - answers["the second"]) < 0.1 * len(rows)


def test_a_row_has_image_bytes_and_text():
    train, test = (samples.open("emoji_questions", split=s) for s in ("train", "test"))
    assert len(train) + len(test) + len(samples.open("emoji_questions", split="validation")) == len(ROWS)
    row = train[0]
    assert row["messages"][0]["content"][0]["image"][:4] == b"\x89PNG"
    row["messages"][0]["content"][0]["image"] = None
    assert train[0]["messages"][0]["content"][0]["image"] is not None  # the caller cannot modify the set
    assert {"Q: What is this?", "A: red apple"} <= set(ROWS.texts())
    only = samples.open("emoji_questions", split="test", kinds=["tone"])
    assert set(only.column("kind")) == {"tone"} and len(only)
    with pytest.raises(wt.InputError, match=r"kinds .*'why'"):
        samples.open("emoji_questions", kinds=["why"])
