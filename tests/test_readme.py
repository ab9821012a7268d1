"""The Python of README.md and docs/architecture.md runs as it stands, from top to bottom."""

import re
from pathlib import Path

import pytest

import worldtokens as wt

ROOT = Path(wt.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


BLOCKS = python_of(README)
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]


def test_there_are_examples():
    assert len(BLOCKS) >= 2
    assert all(len([line for line in b.splitlines() if line.strip()]) <= 16 for b in BLOCKS)


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    said = re.findall(r"print\(.*\)\s*# (.*)", "\n".join(BLOCKS))
    printed = capsys.readouterr().out.strip().splitlines()
    told = iter(printed)  # training tells of its steps in between
    assert all(line in told for line in said), f"the README says {said}, printed was {printed}"


def test_the_walk_of_a_batch_runs():
    names: dict = {}
    for block in python_of((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")):
        exec(compile(block, "architecture.md", "exec"), names)
    assert names["pixels"].shape == (4, 16, 64) and names["vectors"].shape == (4, 64)
    assert names["trunk"].blocks[0].attn.qkv.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    found = re.findall(
        r"\]\((?!https?:|#|mailto:)([^)#\s]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8")
    )
    assert [link for link in found if not ((ROOT / page).parent / link).exists()] == []


def test_the_readme_is_one_screen_then_details():
    assert len(README) <= 9000
    assert all(len(line) <= 200 for line in README.splitlines() if not line.startswith(("![", "[![")))


def test_the_commands_of_the_readme_exist():
    from worldtokens.cli import COMMANDS
    from worldtokens.training.recipe import shipped_recipes

    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
    assert set(re.findall(r"^worldtokens (\w+)", shell, re.MULTILINE)) <= set(COMMANDS)
    assert set(re.findall(r"worldtokens train (\w+)(?![\w.])", shell)) <= set(shipped_recipes())
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+)", shell, re.MULTILINE)) <= set(targets)
