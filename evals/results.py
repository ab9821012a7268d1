"""`worldtokens results`: runs evaluations, stores their figures as JSON and writes docs/results.md from those files.

An evaluation (a module of `evals/`) trains our model and its baseline on real data in one run. Its figures are stored in
`docs/results/<name>.json`; `docs/results.md` is generated from those files alone (`evals/tables.py`).
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
  worldtokens results                    write the tables from the stored results
  worldtokens results classify_digits    run one evaluation, store its results, write the tables
  worldtokens results --all              run all evaluations: hours on two cores
  worldtokens results classify_digits --scale 0.01    a trial of seconds; its figures are not stored
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="worldtokens results",
        description="Evaluate tasks against their baselines on real data, and write the tables of all results.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "evaluations", nargs="*", metavar="EVALUATION", help="which to run; none: only write the tables"
    )
    p.add_argument("--all", action="store_true", help="run every evaluation")
    p.add_argument("--list", action="store_true", help="list the evaluations")
    p.add_argument("--scale", type=float, default=1.0, help="fraction of the training steps (default 1)")
    p.add_argument("--docs", metavar="DIR", help="folder of results.md and results/ (default: docs)")
    p.add_argument("--out", metavar="DIR", default="runs/evals", help="folder of the checkpoints")
    return p


def names() -> list[str]:
    """Names of the evaluations: the modules of `evals/` that define `evaluate`."""
    return sorted(_modules())


def _modules() -> dict[str, str]:
    """Name -> dotted module of every evaluation in `evals/<head>/`."""
    files = [p for p in (ROOT / "evals").glob("*/*.py") if "\ndef evaluate(" in p.read_text(encoding="utf-8")]
    return {p.stem: f"worldtokens.evals.{p.parent.name}.{p.stem}" for p in files}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Raises:
        InputError: an unknown evaluation, or a scale that is not above 0.
    """
    from worldtokens.evals.tables import stored, write_tables

    args = parser().parse_args(argv)
    known = names()
    if unknown := [n for n in args.evaluations if n not in known]:
        raise InputError(f"no evaluation {unknown[0]!r}; the evaluations are {', '.join(known)}")
    if not args.scale > 0:
        raise InputError(f"--scale is {args.scale}, expected above 0")
    if args.list:
        for name in known:
            print(f"{name:<22} {_module(name).ABOUT}")
        return 0
    docs = Path(args.docs) if args.docs else _docs()
    for name in known if args.all else args.evaluations:
        run(name, docs, Path(args.out) / name, args.scale)
    if args.scale == 1 or not (args.evaluations or args.all):
        path = write_tables(docs)
        print(f"{path}: {len(stored(docs))} evaluations")
    return 0


def _docs() -> Path:
    """`docs` of the checkout of this package, or of the working directory."""
    return ROOT / "docs" if (ROOT / "pyproject.toml").is_file() else Path("docs")


def _module(name: str):
    return importlib.import_module(_modules()[name])


def run(name: str, docs: Path, out: Path, scale: float = 1.0) -> None:
    """Run one evaluation, print its figures, and store them if `scale` is 1."""
    from rich.console import Console

    from worldtokens.evals.base import save
    from worldtokens.evals.tables import number

    console, module = Console(), _module(name)
    console.print(f"[bold]{name}[/]: {module.ABOUT}")
    start = time.monotonic()
    results = module.evaluate(out, scale)
    minutes = (time.monotonic() - start) / 60
    for r in results:
        chance = "" if r.chance is None else f", chance {number(r.chance)}"
        console.print(
            f"  {r.task}: {r.label} {number(r.value)}, baseline {number(r.baseline_value)} ({r.baseline}){chance}",
            highlight=False,
        )
    if scale == 1:
        save(
            docs / "results" / f"{name}.json",
            results,
            about=module.ABOUT,
            command=f"worldtokens results {name}",
            date=time.strftime("%Y-%m-%d"),
            machine=machine(),
            minutes=f"{minutes:.0f}",
        )


def machine() -> str:
    """Threads, architecture and version of torch: what a figure's time depends on, and nothing that identifies a host."""
    import torch

    threads = torch.get_num_threads()
    version = torch.__version__.partition("+")[0]
    return f"{threads} thread{'s' if threads > 1 else ''}, {platform.machine()}, torch {version}"
