"""Every example runs from top to bottom, with few steps, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGINS = {"row_plugin"}  # a class without a script; tests/test_new_modality.py uses it


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(p.stem for p in (ROOT / "examples").glob("*.py") if p.stem not in PLUGINS)
)
def test_example(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--steps", "2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=800, env=os.environ | {"MPLBACKEND": "agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
