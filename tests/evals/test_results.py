"""`worldtokens results`: results are stored as JSON, and docs/results.md is generated from the stored files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from worldtokens.errors import InputError
from worldtokens.evals import results, tables
from worldtokens.evals.base import Result, load, save

DOCS = Path(results.__file__).parent.parent / "docs"

ROW = Result(
    task="Classifier: x", data="x, 10 / 5", size="dim 8", parameters=1_500_000, steps=20, minutes=0.5,
    metric="top-1 %", value=91.25, baseline="linear", baseline_value=60, chance=10, note="small",
)  # fmt: skip


def test_a_result_round_trips_through_its_file(tmp_path):
    save(tmp_path / "a.json", [ROW], command="c", date="2026-01-01", machine="m", minutes="1")
    found, facts = load(tmp_path / "a.json")
    assert found == [ROW]
    assert facts == {"command": "c", "date": "2026-01-01", "machine": "m", "minutes": "1"}


@pytest.mark.parametrize("text", ["", "{}", '{"results": [{"task": 1}]}', "[1]"])
def test_an_invalid_file_is_named_in_the_error(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"a\.json"):
        load(tmp_path / "a.json")


def test_ahead_follows_better():
    assert ROW.ahead
    assert not Result(**(ROW.__dict__ | {"value": 60})).ahead
    lower = Result(**(ROW.__dict__ | {"better": "lower"}))
    assert not lower.ahead
    with pytest.raises(ValueError, match="better"):
        Result(**(ROW.__dict__ | {"better": "more"}))


def write(folder, name, *rows, minutes="1"):
    save(
        folder / "results" / f"{name}.json", rows, about=f"about {name}",
        command=f"worldtokens results {name}", date="2026-01-01", machine="m", minutes=minutes,
    )  # fmt: skip


def test_a_table_has_facts_figures_baseline_notes_and_command(tmp_path):
    write(tmp_path, "classify_a", ROW)
    text = tables.write_tables(tmp_path).read_text()
    assert "\n## Classification\n" in text and "\n### classify_a\n\nAbout classify_a.\n" in text
    assert "| [x](#classify_a) | top-1 % | **91.2** | 60 | 1 of 1 |\n" in text
    assert "`worldtokens results classify_a` on 2026-01-01: 1 min on m." in text
    assert (
        "**Classifier: x.** Data: x, 10 / 5. Model: dim 8; 1.50 M parameters; 20 steps, 0.5 min. Baseline: linear."
        in text
    )
    assert "| metric | ours | baseline | chance |" in text
    assert "| top-1 % | **91.2** | 60 | 10 |\n\n- small\n" in text


def test_figures_that_are_not_better_say_so_and_several_baselines_are_named(tmp_path):
    rows = [
        dataclasses.replace(ROW, value=50.0, subset="part", note=""),
        dataclasses.replace(ROW, baseline="majority", value=60, note="why"),
        dataclasses.replace(ROW, baseline="majority", better="lower", metric="loss", chance=None, note=""),
    ]
    write(tmp_path, "lm_a", *rows, minutes="0")
    text = tables.write_tables(tmp_path).read_text()
    assert "## Language modelling" in text and "with models trained in an earlier run" in text
    assert "| [x](#lm_a) | top-1 % | 50.0 | 60 | 0 of 3 |\n" in text
    assert "| top-1 %, part | 50.0 | 60, linear | 10 |" in text
    assert "| loss (lower is better) | 91.2 | 60, majority |  |" in text
    assert "- top-1 %: why\n" in text
    assert "- **Worse than the baseline**: top-1 %, part, 50.0 against 60; loss, 91.2 against 60\n" in text
    assert "- **Equal to the baseline**: top-1 %, 60 against 60\n" in text


def test_evaluations_are_grouped_by_head_and_none_is_left_out(tmp_path):
    for name in ("lm_b", "classify_b", "classify_a", "foreign"):
        write(tmp_path, name, ROW)
    lines = tables.write_tables(tmp_path).read_text().splitlines()
    assert [x for x in lines if x.startswith("#")][1:] == [
        "## Classification", "### classify_a", "### classify_b", "## Language modelling", "### lm_b",
        "## Other", "### foreign",
    ]  # fmt: skip


def test_one_model_on_two_data_sets_is_described_once(tmp_path):
    write(tmp_path, "clip_a", ROW, dataclasses.replace(ROW, data="y, 3 / 2"))
    text = tables.write_tables(tmp_path).read_text()
    assert text.count("1.50 M parameters") == 1 and "Data: y, 3 / 2. Same model. Baseline: linear." in text


def test_the_overview_names_the_variant_of_a_task(tmp_path):
    write(tmp_path, "translate_a", dataclasses.replace(ROW, task="Translator, GRU: English to Spanish"))
    text = tables.write_tables(tmp_path).read_text()
    assert "| [English to Spanish, GRU](#translate_a) | top-1 % | **91.2** | 60 | 1 of 1 |" in text


def test_figures_are_included_if_they_exist(tmp_path):
    write(tmp_path, "diffusion_emoji", ROW)
    (file,) = tables.FIGURES["diffusion_emoji"]
    assert f"]({file})" not in tables.write_tables(tmp_path).read_text()
    (tmp_path / file).touch()
    assert f"]({file})" in tables.write_tables(tmp_path).read_text()


def test_numbers_have_no_more_decimals_than_were_stored():
    figures = {
        98.4: "98.4",
        0.12345: "0.123",
        1.8725: "1.87",
        3.4: "3.4",
        98.0: "98.0",
        7: "7",
        110.04: "110.0",
    }
    assert {v: tables.number(v) for v in figures} == figures


def test_an_evaluation_is_run_and_stored_only_at_full_scale(tmp_path, monkeypatch, capsys):
    class Fake:
        ABOUT = "a fake"

        @staticmethod
        def evaluate(out, scale):
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
    with pytest.raises(InputError, match="the evaluations are fake"):
        results.main(["other"])
    with pytest.raises(InputError, match="scale"):
        results.main(["fake", "--scale", "0"])


def test_every_evaluation_has_a_description_that_its_stored_results_repeat():
    for name in results.names():
        assert results._module(name).ABOUT and callable(results._module(name).evaluate)
    for path in (DOCS / "results").glob("*.json"):
        facts = load(path)[1]
        assert path.stem in results.names()
        assert facts["command"] == f"worldtokens results {path.stem}"
        assert facts["about"] == results._module(path.stem).ABOUT
    assert {n.split("_")[0] for n in results.names()} <= {
        w for words in tables.HEADINGS.values() for w in words
    }


def test_the_shipped_tables_are_current_and_narrow(tmp_path):
    (tmp_path / "results").mkdir()
    for path in (DOCS / "results").glob("*.json"):
        (tmp_path / "results" / path.name).write_bytes(path.read_bytes())
    shipped = (DOCS / "results.md").read_text(encoding="utf-8")
    every = [*tables.FIGURES.values(), *tables.HEADING_FIGURES.values()]
    for name in {file for figures in every for file in figures}:
        if (DOCS / name).is_file():
            (tmp_path / name).touch()
    assert tables.write_tables(tmp_path).read_text(encoding="utf-8") == shipped
    assert max(map(len, shipped.splitlines())) <= 120
