"""Imports of the modules in this folder, which the worker process imports by plain name too."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def load():
    """A function that imports a module of this folder by name."""

    def module(name: str):
        sys.path.insert(0, str(Path(__file__).parent))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(Path(__file__).parent))

    return module
