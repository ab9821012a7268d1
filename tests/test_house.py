"""The layout: the root is the package, rooms shadow no installed package, imports run downward, siblings look alike."""

import ast
import graphlib
import importlib.metadata
import inspect
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools

import worldtokens as wt

ROOT = Path(wt.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OUTSIDE = {"tests", "benchmarks", "examples", "scripts", "docs"}
# what a module may import: everything below its own level. Modules at the root count by name, rooms by folder.
LEVELS = (
    ("errors",),
    ("layout", "adapters", "hub", "data"),
    ("packing",),
    ("tokens", "parts"),
    ("backbone",),
    ("tokenizers",),
    ("tasks",),
    ("pretrained", "training", "testing"),
    ("figures",),
    ("evals", "apps"),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def tracked(pattern: str) -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [f for f in done.stdout.split() if (ROOT / f).exists()]


MODULES = {
    f.removesuffix(".py").replace("/", "."): f
    for f in tracked("*.py")
    if f.split("/")[0] not in OUTSIDE and f not in ("setup.py", "__init__.py", "__main__.py")
}


def imports(module: str) -> set[str]:
    """The modules of this package that a module imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / MODULES[module]).read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        names = [n.removeprefix("worldtokens.") for n in names if n and n.startswith("worldtokens.")]
        found |= {n for n in names if n in MODULES}
    return found


GRAPH = {module: imports(module) for module in MODULES}


def run(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- the package -------------------------------------------------------------------------------------------------


def test_no_folder_below_the_root_holds_an_init():
    """A folder without __init__.py never shadows an installed package of its name."""
    assert {f for f in tracked("*.py") if f.endswith("__init__.py")} == {"__init__.py"}
    assert all((ROOT / room).is_dir() for room in ("tokenizers", "backbone", "tasks", "tests"))


def test_every_folder_with_code_is_packaged(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: given.update(kwargs))
    runpy.run_path(str(ROOT / "setup.py"))
    folders = {"worldtokens"} | {f"worldtokens.{m.rpartition('.')[0]}" for m in MODULES if "." in m}
    assert folders | {"worldtokens.recipes"} == set(given["packages"])


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


def test_the_face_lists_the_same_names_for_type_checkers():
    text = (ROOT / "__init__.py").read_text(encoding="utf-8")
    typed = set(re.findall(r"\w+", text.partition("if TYPE_CHECKING:")[2]))
    assert [n for n in wt._HOME if n not in typed] == []
    assert (ROOT / "py.typed").exists()


def test_version_is_one():
    assert PROJECT["project"]["version"] == wt.__version__ == importlib.metadata.version("worldtokens")


# ---- imports -----------------------------------------------------------------------------------------------------


def test_imports_run_downward():
    """errors < layout < tokens, parts < backbone < tokenizers < tasks < pretrained, training < figures < evals, apps < cli."""
    wrong = []
    for module, found in GRAPH.items():
        room = module.split(".")[0]
        for other in found:
            there = other.split(".")[0]
            if there != room and not LEVEL[there] < LEVEL[room]:
                wrong.append(f"{module} imports {other}")
    assert not wrong


def test_data_imports_no_model():
    outside = {other for m, found in GRAPH.items() if m.startswith("data.") for other in found}
    assert {other.split(".")[0] for other in outside} <= {"data", "errors"}


def test_front_ends_trunks_and_heads_import_no_data_set():
    users = {m.split(".")[0] for m, found in GRAPH.items() if any(o.startswith("data.") for o in found)}
    assert users <= {"data", "pretrained", "training", "figures", "evals", "apps"}


def test_no_module_imports_itself_by_a_detour():
    try:
        tuple(graphlib.TopologicalSorter(GRAPH).static_order())
    except graphlib.CycleError as e:
        pytest.fail(f"modules import each other: {' -> '.join(e.args[1])}")


# ---- folders -----------------------------------------------------------------------------------------------------


def folders(room: str) -> dict[str, set[str]]:
    """Folder of a room -> the names of its modules."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        parts = module.split(".")
        if parts[0] == room and len(parts) == 3:
            found.setdefault(parts[1], set()).add(parts[2])
    return found


def test_a_modality_folder_holds_a_tokenizer_and_its_reader():
    """`tokenizer.py` is the front-end, `read.py` the reader; a front-end without files of its own imports a sibling's reader."""
    found = folders("tokenizers")
    assert {"text", "image", "audio", "video", "points", "views", "latents", "series", "discrete"} <= set(
        found
    )
    for name, modules in found.items():
        assert "tokenizer" in modules, name
        if "read" not in modules and name != "reduce":  # `reduce` wraps another front-end, which reads
            used = {o for m in modules for o in GRAPH[f"tokenizers.{name}.{m}"]}
            assert [o for o in used if re.fullmatch(r"tokenizers\.\w+\.read", o)], (
                f"{name} has no read.py and uses none"
            )


def test_a_head_folder_holds_a_model():
    found = folders("tasks")
    assert {"contrastive", "classification", "language", "seq2seq", "multimodal", "diffusion"} <= set(found)
    assert [name for name, modules in found.items() if "model" not in modules] == ["metrics"]


def test_a_source_folder_holds_its_loader():
    found = folders("pretrained")
    assert {name for name, modules in found.items() if "load" in modules} == {
        "timm",
        "open_clip",
        "hf",
        "gguf",
    }
    assert set(found) - {"timm", "open_clip", "hf", "gguf"} == {"surgery"}


def test_a_command_folder_holds_its_command():
    from worldtokens.cli import COMMANDS

    found = folders("apps")
    assert [name for name, modules in found.items() if "command" not in modules] == []
    assert {n for n, (home, _) in COMMANDS.items() if home.startswith("worldtokens.apps.")} == set(found)


def test_tests_mirror_the_rooms():
    """tests/tokenizers/audio/test_mel.py tests tokenizers/audio; every folder of tests stands for a folder of code."""
    extra = {"tests", "tests/hostile", "tests/typing"}
    homes = {str(Path(f).parent) for f in tracked("tests/*.py")} - extra
    assert [h for h in sorted(homes) if not (ROOT / Path(h).relative_to("tests")).is_dir()] == []


def test_no_file_holds_two_ideas():
    lines = {f: len((ROOT / f).read_text(encoding="utf-8").splitlines()) for f in tracked("*.py")}
    assert {f: n for f, n in lines.items() if n > 420} == {}


def test_constructors_are_short():
    """What exists only for published weights lives in a config object, not in the constructor."""
    counts = {}
    for name in wt._HOME:
        value = getattr(wt, name)
        if inspect.isclass(value) and issubclass(value, wt.Part):
            counts[name] = len(inspect.signature(value).parameters)
    assert {n: c for n, c in counts.items() if c > 14} == {}


# ---- a newcomer's hunt -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("looked_for", "name", "home"),
    [
        ("Whisper's mel spectrogram", "mel", "tokenizers/audio"),
        ("the contrastive loss", "loss", "tasks/contrastive"),
        ("CLIP's BPE", "clip_bpe", "tokenizers/text"),
        ("rotary positions", "positions", "backbone"),
        ("the KV cache", "cache", "backbone"),
        ("beam search", "beam", "tasks/language"),
        ("R@10", "retrieval", "tasks/metrics"),
        ("loading a timm model", "load", "pretrained/timm"),
        ("ONNX export", "export", "pretrained"),
        ("the training loop", "loop", "training"),
    ],
)
def test_what_a_newcomer_looks_for_has_one_home(looked_for, name, home):
    """Each thing is found from the tree: its name stands in one folder of the room that one looks in."""
    room = home.split("/")[0]
    named = {str(Path(f).parent) for f in MODULES.values() if Path(f).stem == name and f.startswith(room)}
    assert home in named, looked_for
    if name not in ("loss", "load"):  # names that siblings share on purpose
        assert named == {home}, looked_for


def test_the_contributors_guide_says_where_things_go():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for title in ("Add a modality", "Add a head", "Add a published source"):
        assert title in guide
    for path in re.findall(
        r"`((?:tokenizers|tasks|pretrained|tests|docs|apps|evals|backbone|data|training)/[\w./]*)`", guide
    ):
        assert (ROOT / path).exists(), path
