"""The list of packages, found in the tree: a new folder in a room needs no entry here. All else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

ROOMS = (
    "apps",
    "backbone",
    "data",
    "evals",
    "figures",
    "pretrained",
    "recipes",
    "tasks",
    "tokenizers",
    "training",
)


def packages(root: Path) -> list[str]:
    """`worldtokens` and every folder of a room that holds code or recipes, as dotted names."""
    files = [f for room in ROOMS for kind in ("*.py", "*.yaml") for f in (root / room).rglob(kind)]
    folders = {f.parent.relative_to(root) for f in files}
    return ["worldtokens", *sorted(".".join(("worldtokens", *folder.parts)) for folder in folders)]


setup(packages=packages(Path(__file__).parent))
