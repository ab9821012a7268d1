"""Everything imported is declared, everything declared is imported."""

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import worldtokens as wt

ROOT = Path(wt.__file__).parent
INSTALLED = importlib.metadata.packages_distributions()  # seconds a call
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OUTSIDE = ("tests", "benchmarks", "examples", "scripts", "docs")
# used without an import statement of our own
INDIRECT = {
    "tensorboard": "torch.utils.tensorboard imports it",
    "pytest-timeout": "a pytest plug-in",
    "pytest-xdist": "a pytest plug-in",
    "build": "make lint and .ci/run call it",
    "mypy": "make lint calls it",
    "pre-commit": "a contributor calls it",
    "ruff": "make lint calls it",
    "types-pyyaml": "mypy reads it",
    "wheel": "the build back-end",
    "onnxscript": "torch.onnx.export imports it",
}


def plain(name: str) -> str:
    """A distribution's name as PEP 503 compares it, without version and extras."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()


def declared(*extras: str) -> set[str]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return {plain(line) for line in lines} - {"worldtokens"}


@functools.cache
def imported(inside: bool) -> dict[str, set[str]]:
    """Top-level name -> the files that import it: of the package, or of what stands around it."""
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    local = {Path(f).stem for f in files.stdout.split()} | {"worldtokens"}
    found: dict[str, set[str]] = {}
    for file in files.stdout.split():
        if (file.split("/")[0] in OUTSIDE or file == "setup.py") is inside or not (ROOT / file).exists():
            continue
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in {n.partition(".")[0] for n in names} - sys.stdlib_module_names:
                installed = name in INSTALLED
                if installed or name not in local:
                    found.setdefault(name, set()).add(file)
    found.pop("worldtokens", None)
    return found


def distributions(name: str) -> set[str]:
    return {plain(d) for d in INSTALLED.get(name, [name])}


ALL = tuple(PROJECT["optional-dependencies"])


def test_everything_imported_by_the_package_is_declared():
    users = [e for e in ALL if e not in ("test", "dev")]
    allowed = declared(*users)
    missing = {n: sorted(fs)[:3] for n, fs in imported(inside=True).items() if not distributions(n) & allowed}
    assert missing == {}


def test_everything_imported_around_the_package_is_declared():
    allowed = declared(*ALL)
    missing = {
        n: sorted(fs)[:3] for n, fs in imported(inside=False).items() if not distributions(n) & allowed
    }
    assert missing == {}


def test_everything_declared_is_imported():
    used = {d for inside in (True, False) for n in imported(inside) for d in distributions(n)}
    assert declared(*ALL) - used - set(INDIRECT) == set()


def test_everything_declared_without_an_extra_is_imported_by_the_package():
    used = {d for n in imported(inside=True) for d in distributions(n)}
    assert declared() - used - set(INDIRECT) == set()
