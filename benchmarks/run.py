"""Run the benchmarks of this folder one after another, and print one table of their results.

    make bench                                         all: about an hour on two cores
    python benchmarks/run.py vit text                  some
    make bench ARGS="--write docs/benchmarks.md"       all, and write the page
    python benchmarks/run.py vit --write docs/benchmarks.md    one, and write the page with it and what was stored

A ratio is the speed of ours divided by the speed of the peer in the same round: median over rounds, with the range.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from timing import RESULTS_FILE

HERE = Path(__file__).parent
NOT_RUN = {"run", "gpu", "timing"}
WIDTH = 118
_INTRODUCTION = (
    "Speed of worldtokens and of the library it replaces (the peer), on the same inputs in the same process. Timings are "
    "interleaved: in every round each contender runs once, so that load of the machine affects all alike. Ratio: speed of "
    "ours divided by speed of the peer, median over rounds (range); above 1 ours is faster."
)


def table(lines: list[dict[str, str]]) -> list[str]:
    """Recorded lines as a Markdown table."""
    rows = ["| what | ours | peer | ratio |", "|---|---:|---:|---:|"]
    return rows + [f"| {x['what']} | {x['ours']} | {x['peer']} | {x['ratio']} |" for x in lines]


def wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def summary(name: str) -> str:
    """First line of a benchmark's docstring."""
    return ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))).splitlines()[0]


def machine() -> str:
    """What timings depend on, and nothing that identifies a host."""
    import torch

    cores, threads = os.cpu_count(), torch.get_num_threads()
    version = torch.__version__.partition("+")[0]
    return f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {cores} cores, {threads} threads, torch {version}"


def store(folder: Path, name: str, lines: list[dict[str, str]]) -> None:
    """Keep the lines of one benchmark, with its date and machine, for the page."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "lines": lines}
    (folder / f"{name}.json").write_text(
        json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def page(folder: Path) -> str:
    """The stored results as a Markdown page: a section per benchmark with its command, table and notes."""
    lines = ["# Benchmarks", "", *wrapped(_INTRODUCTION), ""]
    lines += [
        "Written by `python benchmarks/run.py --write docs/benchmarks.md` from `docs/benchmarks/*.json`.",
        "",
    ]
    for path in sorted(folder.glob("*.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        command = f"`python benchmarks/{path.stem}.py`, {stored['machine']}."
        lines += [
            f"## {path.stem}",
            "",
            *wrapped(summary(path.stem)),
            "",
            command,
            "",
            *table(stored["lines"]),
            "",
        ]
        notes = [f"- {x['what']}: {x['note']}" for x in stored["lines"] if x["note"]]
        lines += [line for note in notes for line in wrapped(note, "  ")]
        lines += [""] if notes else []
    missing = [name for name in available() if not (folder / f"{name}.json").is_file()]
    if missing:
        text = (
            f"Not measured for this page: {', '.join(missing)}. Their latest figures are in [LOG.md](LOG.md)."
        )
        lines += ["## Others", "", *wrapped(text), ""]
    return "\n".join(lines)


def available() -> list[str]:
    """Names of the benchmarks."""
    names = (p.stem for p in HERE.glob("*.py"))
    return sorted(n for n in names if n not in NOT_RUN and not n.startswith("_"))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "names", nargs="*", choices=[*available(), []], metavar="NAME", help=", ".join(available())
    )
    p.add_argument("--write", type=Path, metavar="FILE", help="write the results as a Markdown page")
    args = p.parse_args()
    failed, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names or available():
            results = Path(folder) / f"{name}.jsonl"
            start = time.monotonic()
            print(f"\n==== {name}", flush=True)
            done = subprocess.run(
                [sys.executable, str(HERE / f"{name}.py")],
                check=False,
                env=os.environ | {RESULTS_FILE: str(results)},
            )
            if done.returncode:
                failed.append(name)
            print(f"---- {name}: {time.monotonic() - start:.0f} s", flush=True)
            if results.exists():
                found[name] = [json.loads(x) for x in results.read_text(encoding="utf-8").splitlines()]
                if args.write:  # at once, so that a later failure loses nothing
                    store(args.write.with_suffix(""), name, found[name])
                    args.write.write_text(page(args.write.with_suffix("")), encoding="utf-8")
    print("\n".join(["", *table([x for results in found.values() for x in results]), "", machine()]))
    if args.write:
        print(f"written: {args.write}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
