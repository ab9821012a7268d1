"""`worldtokens results`: what is measured is kept, and the table says what was kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worldtokens.errors import InputError
from worldtokens.evals import results
from worldtokens.evals.base import Result, load, save

DOCS = Path(results.__file__).parent.parent / "docs"

ROW = Result(
    task="Classifier: x", data="x, 10 / 5", size="8 wide", parameters=1_500_000, steps=20, minutes=0.5,
    metric="top-1 %", value=91.25, baseline="linear", baseline_value=60, chance=10, note="small",
)  # fmt: skip


def test_a_result_survives_the_file(tmp_path):
    save(tmp_path / "a.json", [ROW], command="c", date="2026-01-01", machine="m", minutes="1")
    found, facts = load(tmp_path / "a.json")
    assert found == [ROW]
    assert facts == {"command": "c", "date": "2026-01-01", "machine": "m", "minutes": "1"}


@pytest.mark.parametrize("text", ["", "{}", '{"results": [{"task": 1}]}', "[1]"])
def test_a_foreign_file_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"a\.json"):
        load(tmp_path / "a.json")


def test_ahead_follows_the_sense():
    assert ROW.ahead
    lower = Result(**(ROW.__dict__ | {"better": "lower"}))
    assert not lower.ahead
    with pytest.raises(ValueError, match="better"):
        Result(**(ROW.__dict__ | {"better": "more"}))


def test_the_table_tells_figure_baseline_note_and_command(tmp_path):
    save(
        tmp_path / "results" / "a.json",
        [ROW],
        command="worldtokens results a",
        date="2026-01-01",
        machine="m",
        minutes="1",
    )
    text = results.write_table(tmp_path).read_text()
    assert (
        "| Classifier: x [1] | x, 10 / 5 | 8 wide | 1.50 M | 20 | 0.5 | top-1 % | **91.2** | 60: linear | 10 |"
        in text
    )
    assert "[1] small" in text and "`worldtokens results a`: 2026-01-01, m, 1 minutes in all" in text


def test_a_check_is_run_and_kept_only_whole(tmp_path, monkeypatch, capsys):
    class Fake:
        ABOUT = "a fake"

        @staticmethod
        def check(out, scale):
            return [ROW]

    monkeypatch.setattr(results, "names", lambda: ["fake"])
    monkeypatch.setattr(results, "_module", lambda name: Fake)
    assert results.main(["fake", "--docs", str(tmp_path), "--scale", "0.1"]) == 0
    assert not (tmp_path / "results").exists()
    assert results.main(["fake", "--docs", str(tmp_path)]) == 0
    assert (
        json.loads((tmp_path / "results" / "fake.json").read_text())["command"] == "worldtokens results fake"
    )
    assert "91.2" in (tmp_path / "results.md").read_text() and "91.2" in capsys.readouterr().out
    with pytest.raises(InputError, match="the checks are fake"):
        results.main(["other"])
    with pytest.raises(InputError, match="scale"):
        results.main(["fake", "--scale", "0"])


def test_every_check_says_what_it_is_about_and_the_shipped_table_is_current(tmp_path):
    for name in results.names():
        assert results._module(name).ABOUT and callable(results._module(name).check)
    kept = {p.stem for p in (DOCS / "results").glob("*.json")}
    assert kept <= set(results.names())
    if kept:
        for p in (DOCS / "results").glob("*.json"):
            (tmp_path / "results").mkdir(exist_ok=True)
            (tmp_path / "results" / p.name).write_bytes(p.read_bytes())
        assert results.write_table(tmp_path).read_text() == (DOCS / "results.md").read_text()
