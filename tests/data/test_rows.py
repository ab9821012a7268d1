"""`Rows`: sequence access, deterministic splits, connected groups."""

import pickle

import pytest

from worldtokens.data.rows import Rows, connected_groups, split_of
from worldtokens.errors import InputError


def test_the_split_depends_on_the_key_only():
    rows = Rows([{"id": str(i), "text": str(i)} for i in range(2000)], name="numbers")
    splits = {split: rows.split(split) for split in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == 2000
    assert abs(len(splits["train"]) / 2000 - 0.8) < 0.03 and abs(len(splits["test"]) / 2000 - 0.12) < 0.03
    longer = Rows([{"id": str(i), "text": str(i)} for i in reversed(range(3000))], name="more")
    assert set(splits["test"].column("id")) <= set(longer.split("test").column("id"))
    assert split_of("x", {"a": 0.0, "b": 1.0}) == "b"
    with pytest.raises(InputError, match="add up to 1"):
        rows.split("train", {"train": 0.8})
    with pytest.raises(InputError, match="no split 'val'"):
        rows.split("val")


def test_rows_behave_as_a_sequence():
    rows = Rows([{"text": ["a", "b"]}, {"text": "c"}, {"other": 1}], name="three")
    assert rows[-1] == {"other": 1} and len(rows[1:]) == 2 and rows[:2].texts() == ["a", "b", "c"]
    assert rows.select([2, 0, 0]).column("text") == [None, ["a", "b"], ["a", "b"]]
    assert list(pickle.loads(pickle.dumps(rows))) == list(rows)
    with pytest.raises(IndexError):
        rows[3]
    with pytest.raises(InputError, match="columns are text, other"):
        rows.column("image")


def test_groups_are_transitive_and_independent_of_the_order():
    items = [("a", "x"), ("b",), ("c", "y"), ("x", "y"), ("d", "b")]
    assert connected_groups(items) == ["a", "b", "a", "a", "b"]
    assert connected_groups(items[::-1]) == connected_groups(items)[::-1]
