"""`worldtokens results`: every task's figure beside its baseline, measured and written, never typed.

A check (a module of `evals/`) trains ours and its baseline on real data in one run. What it found is kept in
`docs/results/<name>.json`; the table in `docs/results.md` is made from those files alone.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import time
from collections.abc import Sequence
from pathlib import Path

from worldtokens.errors import InputError

ROOT = Path(__file__).resolve().parent.parent

_EXAMPLE = """examples:
  worldtokens results                    write the table from what is kept
  worldtokens results digits             train and measure one check, keep what it found, write the table
  worldtokens results --all              all of them: hours on two cores
  worldtokens results digits --scale 0.01    a trial of seconds; its figures are not kept
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="worldtokens results",
        description="Measure tasks against their baselines on real data, and write the table of all results.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("checks", nargs="*", metavar="CHECK", help="which to run; none: only write the table")
    p.add_argument("--all", action="store_true", help="run every check")
    p.add_argument("--list", action="store_true", help="say which checks there are")
    p.add_argument("--scale", type=float, default=1.0, help="share of the training to do (default 1)")
    p.add_argument("--docs", metavar="DIR", help="where results.md and results/ lie (default: docs)")
    p.add_argument("--out", metavar="DIR", default="runs/evals", help="where checkpoints go")
    return p


def names() -> list[str]:
    """The checks there are: the modules of `evals/` that have a `check`."""
    return sorted(_modules())


def _modules() -> dict[str, str]:
    """Name -> dotted module of every check in `evals/<task>/`."""
    files = [p for p in (ROOT / "evals").glob("*/*.py") if "\ndef check(" in p.read_text(encoding="utf-8")]
    return {p.stem: f"worldtokens.evals.{p.parent.name}.{p.stem}" for p in files}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Raises:
        InputError: no such check, or a scale that is not above 0.
    """
    args = parser().parse_args(argv)
    known = names()
    if unknown := [n for n in args.checks if n not in known]:
        raise InputError(f"no check {unknown[0]!r}; the checks are {', '.join(known)}")
    if not args.scale > 0:
        raise InputError(f"--scale is {args.scale}, expected above 0")
    if args.list:
        for name in known:
            print(f"{name:<18} {_module(name).ABOUT}")
        return 0
    docs = Path(args.docs) if args.docs else _docs()
    for name in known if args.all else args.checks:
        run(name, docs, Path(args.out) / name, args.scale)
    if args.scale == 1 or not (args.checks or args.all):
        path = write_table(docs)
        print(f"{path}: {len(kept(docs))} checks")
    return 0


def _docs() -> Path:
    """`docs` of the checkout that this is, or of the folder one stands in."""
    return ROOT / "docs" if (ROOT / "pyproject.toml").is_file() else Path("docs")


def _module(name: str):
    return importlib.import_module(_modules()[name])


def run(name: str, docs: Path, out: Path, scale: float = 1.0) -> None:
    """Run one check, say what it found, and keep it (with `scale` 1)."""
    from rich.console import Console

    from worldtokens.evals.base import save

    console = Console()
    console.print(f"[bold]{name}[/]: {_module(name).ABOUT}")
    began = time.monotonic()
    results = _module(name).check(out, scale)
    minutes = (time.monotonic() - began) / 60
    for r in results:
        chance = "" if r.chance is None else f", chance {_figure(r.chance)}"
        console.print(
            f"  {r.task}: {r.metric} {_figure(r.value)} against {_figure(r.baseline_value)} ({r.baseline}){chance}",
            highlight=False,
        )
    if scale == 1:
        save(
            docs / "results" / f"{name}.json",
            results,
            command=f"worldtokens results {name}",
            date=time.strftime("%Y-%m-%d"),
            machine=f"{_threads()} threads, {platform.machine()}, torch {_torch_version()}",
            minutes=f"{minutes:.0f}",
        )


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _torch_version() -> str:
    import torch

    return torch.__version__.partition("+")[0]


def kept(docs: Path) -> dict[str, tuple[list, dict[str, str]]]:
    """What has been measured: check -> (results, facts of the run)."""
    from worldtokens.evals.base import load

    return {p.stem: load(p) for p in sorted((docs / "results").glob("*.json"))}


def write_table(docs: Path) -> Path:
    """Write `results.md` from the kept results; gives its path."""
    lines = [
        "# Results",
        "",
        "Real data, held-out rows, each beside a baseline trained or computed in the same run. Written by "
        "`worldtokens results`; each line's command measures it anew.",
        "",
        "| task | data | model | parameters | steps | minutes | metric | ours | baseline | chance |",
        "|---|---|---|---:|---:|---:|---|---:|---|---:|",
    ]
    notes, runs = [], []
    for results, facts in kept(docs).values():
        for r in results:
            mark = ""
            if r.note:
                notes.append(r.note)
                mark = f" [{len(notes)}]"
            ours = f"**{_figure(r.value)}**" if r.ahead else _figure(r.value)
            chance = "" if r.chance is None else _figure(r.chance)
            arrow = "" if r.better == "higher" else " (lower is better)"
            lines.append(
                f"| {r.task}{mark} | {r.data} | {r.size} | {r.parameters / 1e6:.2f} M | {r.steps:,} | {r.minutes:.1f} | "
                f"{r.metric}{arrow} | {ours} | {_figure(r.baseline_value)}: {r.baseline} | {chance} |"
            )
        runs.append(
            f"- `{facts['command']}`: {facts['date']}, {facts['machine']}, {facts['minutes']} minutes in all"
        )
    if notes:
        lines += ["", *(f"[{i}] {note}\n" for i, note in enumerate(notes, 1))]
    lines += ["", "Bold: ahead of its baseline. Minutes: training ours.", "", *runs, ""]
    docs.mkdir(parents=True, exist_ok=True)
    path = docs / "results.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _figure(value: float) -> str:
    """Three to four digits that mean something: 98.4, 0.123, 1.87."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
