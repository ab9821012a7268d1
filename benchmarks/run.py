"""Every benchmark of this folder, one after another: `make bench`, or `python benchmarks/run.py text image`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
APART = {"run", "gpu"}


def main() -> int:
    there = sorted(p.stem for p in HERE.glob("*.py") if p.stem not in APART)
    wanted = sys.argv[1:] or there
    if unknown := set(wanted) - set(there):
        print(
            f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(there)}", file=sys.stderr
        )
        return 2
    failed = []
    for name in wanted:
        start = time.monotonic()
        print(f"\n==== {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode:
            failed.append(name)
        print(f"---- {name}: {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
