"""docs/new_modality.md: its code runs, its example is the file, and its table names every check."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import worldtokens as wt
from worldtokens import testing
from worldtokens.errors import InputError
from worldtokens.testing import check_tokenizer

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs" / "new_modality.md").read_text(encoding="utf-8")
EXAMPLE = (ROOT / "examples" / "row_plugin.py").read_text(encoding="utf-8")
COLUMNS = {"age": (40.0, 15.0), "fare": (30.0, 50.0), "rooms": (4.0, 2.0)}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOC, re.MULTILINE | re.DOTALL)


@pytest.fixture
def plugin(monkeypatch):
    """The example as a module outside the package."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("row_plugin")
    sys.modules.pop("row_plugin", None)


@pytest.fixture
def namespace(plugin, tmp_path):
    """The namespace after running the page's code blocks in order."""
    names = {"__name__": "new_modality", "folder": tmp_path / "model"}
    for code in blocks("python")[1:]:
        exec(compile(code, "docs/new_modality.md", "exec"), names)
    return names


def test_the_page_shows_the_file_as_it_is():
    assert blocks("python")[0] == EXAMPLE
    assert len(EXAMPLE.splitlines()) <= 40


def test_the_page_runs_and_its_output_is_right(namespace):
    rows = re.findall(r"^\| `(check_\w+)` \| .* \|$", DOC, re.MULTILINE)
    assert rows == namespace["ran"]
    assert set(namespace["best"].tolist()) == {0, 1, 2, 3}
    assert all(p.grad is not None for p in namespace["rows"].parameters())
    number = re.compile(r"changes by \d\S*")
    assert number.sub("", blocks("text")[0]) == number.sub("", namespace["found"] + "\n")


def test_messages_begin_as_in_the_table():
    """Each row of the table begins as the messages of its check."""
    rows = re.findall(r"^\| `(check_\w+)` \| .* \| `+(.+?):.*`+ \|$", DOC, re.MULTILINE)
    assert len(rows) >= 13
    for check, start in rows:
        source = inspect.getsource(getattr(testing, check))
        assert f'"{start}"' in source or f'"{start}:' in source, (check, start)


def test_values_and_positions_by_hand(plugin):
    rows = plugin.RowTokenizer(8, COLUMNS)
    raw = rows.read({"rooms": 5, "age": 25, "fare": None})  # in another order than the columns
    assert raw.tolist() == [[0.0, -1.0], [2.0, 0.5]]
    tokens = rows(rows.collate([raw]))
    torch.testing.assert_close(tokens.x[0, 0], rows.bias[0] - rows.weight[0])
    torch.testing.assert_close(tokens.x[0, 1], rows.bias[2] + 0.5 * rows.weight[2])
    assert tokens.pos[0].tolist() == [[0, 0, 0], [2, 0, 0]]
    assert tokens.select("row").shape == (1, 2, 8)


@pytest.mark.parametrize(
    "row", [{"age": 10**400}, {"age": 1e300}, {"age": [1]}, {"age": float("inf")}, [], 3, {3: 3}]
)
def test_any_invalid_row_is_an_input_error(plugin, row):
    with pytest.raises(InputError, match="expected"):
        plugin.RowTokenizer(8, COLUMNS).read(row)


def test_a_saved_model_names_the_plugins_module(plugin, tmp_path):
    """The config names the module, which is imported on loading; a missing module is named in the error."""
    torch.manual_seed(0)
    rows = plugin.RowTokenizer(16, COLUMNS)
    assert "check_refused" in check_tokenizer(rows, [{"age": 3, "fare": 1}, {"rooms": 2}], bad=[{}])
    text = wt.TextTokenizer.train(["few rooms", "many rooms"] * 3, vocab_size=280, dim=16)
    model = wt.CLIP({"row": rows, "text": text}, wt.Transformer(16, 1, 2, rope=1), dim=8)
    model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    saved = config["args"]["tokenizers"]["row"]
    assert saved == {
        "class": "row_plugin.RowTokenizer",
        "args": {"dim": 16, "columns": {k: list(v) for k, v in COLUMNS.items()}},
    }
    sys.modules.pop("row_plugin")
    again = wt.load(tmp_path)
    row = {"age": 25, "rooms": 9}
    torch.testing.assert_close(again.embed("row", [row]), model.embed("row", [row]), atol=1e-6, rtol=0)
    sys.modules.pop("row_plugin")
    sys.path.remove(str(ROOT / "examples"))
    importlib.invalidate_caches()
    with pytest.raises(InputError, match=r"row_plugin.RowTokenizer.*install its package"):
        wt.load(tmp_path)
