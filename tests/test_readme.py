"""The README's Python runs as it stands, from top to bottom, as a newcomer would paste it."""

import re
from pathlib import Path

import pytest

import worldtokens as wt

README = (Path(wt.__file__).parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http|#)([^)#]+)\)", README))
def test_links_lead_somewhere(link):
    assert (Path(wt.__file__).parent / link).exists(), link
