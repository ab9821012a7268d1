"""Every benchmark of this folder, one after another, and one table of what they measured.

    make bench                            all: about an hour on two cores
    python benchmarks/run.py vit text     some
    make bench ARGS="vit clip_b32 --out docs/benchmarks.md"

A ratio is how many times faster ours is than its peer in the same run: the median over rounds, the lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from turns import KEPT

HERE = Path(__file__).parent
APART = {"run", "gpu", "turns"}


def table(lines: list[dict[str, str]]) -> str:
    """The measured lines as Markdown."""
    rows = ["| what | ours | peer | ratio | |", "|---|---|---|---|---|"]
    rows += [f"| {x['what']} | {x['ours']} | {x['peer']} | {x['ratio']} | {x['note']} |" for x in lines]
    return "\n".join(rows)


def main() -> int:
    there = sorted(p.stem for p in HERE.glob("*.py") if p.stem not in APART and not p.stem.startswith("_"))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", choices=[*there, []], metavar="NAME", help=", ".join(there))
    p.add_argument("--out", type=Path, help="write the table to this file too")
    args = p.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "lines.jsonl"
        for name in args.names or there:
            start = time.monotonic()
            print(f"\n==== {name}", flush=True)
            done = subprocess.run(
                [sys.executable, str(HERE / f"{name}.py")], check=False, env=os.environ | {KEPT: str(kept)}
            )
            if done.returncode:
                failed.append(name)
            print(f"---- {name}: {time.monotonic() - start:.0f} s", flush=True)
        lines = [json.loads(x) for x in kept.read_text().splitlines()] if kept.exists() else []
    import torch

    facts = f"{time.strftime('%Y-%m-%d')}, {torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}"
    text = f"{table(lines)}\n\n{facts}\n"
    print(f"\n{text}")
    if args.out:
        head = "# Benchmarks\n\nWritten by `make bench`; ratio: times faster than the peer, same process, in turns.\n\n"
        args.out.write_text(head + text)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
