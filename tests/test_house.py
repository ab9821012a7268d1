"""The house: the root is the package, rooms do not shadow installed packages, the face is lazy and whole."""

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import worldtokens as wt

ROOT = Path(wt.__file__).parent


def run(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_rooms_hold_no_init():
    """A folder without __init__.py never shadows an installed package of its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = [p.partition(".")[2] for p in project["tool"]["setuptools"]["packages"] if "." in p]
    assert {"tokenizers", "backbone", "tasks"} <= set(rooms)
    assert not [r for r in rooms if (ROOT / r / "__init__.py").exists()]


def test_every_room_with_code_is_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["setuptools"]["packages"])
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    outside = {"tests", "benchmarks", "examples", "scripts", "docs"}
    rooms = {"worldtokens." + f.rpartition("/")[0].replace("/", ".") for f in tracked if "/" in f}
    assert {r for r in rooms if r.split(".")[1] not in outside} <= packages


@pytest.mark.parametrize("folder", ["root", "elsewhere"])
def test_hugging_faces_tokenizers_and_ours(folder, tmp_path):
    code = (
        "import tokenizers, worldtokens.tokenizers.base as ours, json;"
        "print(json.dumps([hasattr(tokenizers, 'Tokenizer'), tokenizers.__file__, ours.__file__]))"
    )
    theirs, where, ours = json.loads(run(code, ROOT if folder == "root" else tmp_path))
    assert theirs and "site-packages" in where
    assert Path(ours) == ROOT / "tokenizers" / "base.py"


def test_the_face_is_lazy(tmp_path):
    code = "import sys, worldtokens; print('torch' in sys.modules, worldtokens.__version__)"
    assert run(code, tmp_path) == f"False {wt.__version__}"


def test_every_public_name_loads():
    for name in wt.__all__:
        assert getattr(wt, name) is not None, name
    assert set(wt.__all__) <= set(dir(wt))
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        wt.NoSuchName  # noqa: B018


def test_the_face_tells_type_checkers_the_same_names():
    text = (ROOT / "__init__.py").read_text()
    told = text.partition("if TYPE_CHECKING:")[2]
    assert [n for n in wt._HOME if n not in told.replace(",", " ").split()] == []
    assert (ROOT / "py.typed").exists()


def test_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == wt.__version__ == importlib.metadata.version("worldtokens")


def test_imports_run_downward_only():
    """apps -> training -> tasks -> backbone / tokenizers -> tokens; pretrained makes tasks; data knows no model."""
    below = {
        "tokenizers": {"tasks", "pretrained", "training", "apps"},
        "backbone": {"tokenizers", "tasks", "pretrained", "training", "apps", "data"},
        "tasks": {"pretrained", "training", "apps", "data"},
        "pretrained": {"training", "apps", "data"},
        "training": {"pretrained", "apps"},
        "data": {"tokenizers", "backbone", "tasks", "pretrained", "training", "apps"},
    }
    below = {room: forbidden | {"quality"} for room, forbidden in below.items()}
    wrong = []
    for room, forbidden in below.items():
        for file in sorted((ROOT / room).glob("*.py")):
            for line in file.read_text().splitlines():
                words = line.split()
                ours = words[:1] in (["from"], ["import"]) and words[1].startswith("worldtokens.")
                if ours and words[1].split(".")[1] in forbidden:
                    wrong.append(f"{room}/{file.name}: {line.strip()}")
    assert not wrong
