"""Run mypy on every public module, and on the API examples in `tests/typing`.

    python scripts/check_types.py [mypy's options]

The repository root is the package but has another name, so mypy runs on a symbolic link named `worldtokens`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import worldtokens as wt

ROOT = Path(__file__).resolve().parent.parent


def main(options: list[str]) -> int:
    modules = sorted(
        {f"worldtokens.{home}" for home in wt._HOME.values()} | {"worldtokens", "worldtokens.testing"}
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.symlink(ROOT, Path(folder) / "worldtokens", target_is_directory=True)
        except OSError as e:  # Windows without permission to create links
            print(f"types: not checked, cannot create a link: {e}")
            return 0
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *options]
        command += ["--cache-dir", str(ROOT / ".mypy_cache")]
        command += [a for m in modules for a in ("-m", m)] + ["-m", "worldtokens.tests.typing.usage"]
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
