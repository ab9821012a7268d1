"""`worldtokens demo`: train a CLIP on the included images, then search the held-out images by text.

The recipe is the shipped `clip_emoji`; all printed figures are measured in this run on the held-out split.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worldtokens.apps.console import pick_device
from worldtokens.errors import InputError

RECIPE, MARK = "clip_emoji", "demo.json"
SHOWN = 8  # results per query on the sheet

# Free-text queries, each with the concept of the held-out split that answers it (an id without gender and skin tone).
# Neither the query nor the concept's images are in the training split.
QUERIES = {
    "a cat with black fur": "1F408-2B1B",
    "a blue book to read": "1F4D8",
    "riding a bike in the mountains": "1F6B5",
    "a purple dot": "1F7E3",
    "birthday cake with candles": "1F382",
    "a sick face with a fever": "1F912",
}

_HELP = """example:
  worldtokens demo --out /tmp/demo

Writes OUT/model (the trained model), OUT/images (the held-out images and their index), OUT/sheet.png,
OUT/sheet.html (results of the queries) and OUT/demo.json (all figures).
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="worldtokens demo",
        description="Train a small CLIP on the included images, evaluate it on held-out images, and search them by text.\n"
        "Takes a few minutes on two CPU cores.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--out", default="worldtokens-demo", metavar="DIR", help="output folder (default %(default)s)"
    )
    length = p.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="training steps (default: the recipe's)")
    length.add_argument(
        "--minutes", type=float, metavar="M", help="train as many steps as fit into M minutes on this machine"
    )
    length.add_argument("--reuse", action="store_true", help="use the model in OUT instead of training")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Raises:
        InputError: an argument is invalid.
    """
    args = parser().parse_args(argv)
    demo(args.out, steps=args.steps, minutes=args.minutes, reuse=args.reuse)
    return 0


def demo(
    out: str | Path, steps: int | None = None, minutes: float | None = None, reuse: bool = False
) -> dict[str, Any]:
    """Train, evaluate, index and search; print the figures and commands to try next.

    Args:
        out: output folder; the folder of an earlier demo is overwritten.
        steps: training steps. Default: the recipe's.
        minutes: training time in minutes, instead of `steps`.
        reuse: use the model in `out` instead of training.

    Returns:
        The figures, as stored in `demo.json`.

    Raises:
        InputError: `out` holds other files, or no model to reuse.
    """
    start, out = time.monotonic(), Path(out)
    if out.exists() and not (out / MARK).exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"{out} is not empty and was not written by the demo: choose another folder with --out"
        )
    if (steps is not None and steps < 1) or (minutes is not None and minutes <= 0):
        raise InputError("--steps and --minutes must be above 0")
    if reuse and not (out / "model").is_dir():
        raise InputError(
            f"{out / 'model'} does not exist, so --reuse has no model: run `worldtokens demo` without --reuse first"
        )
    from worldtokens.apps.index.index import lancedb_or_error

    lancedb_or_error()  # fails now, not after minutes of training
    out.mkdir(parents=True, exist_ok=True)
    figures = json.loads((out / MARK).read_text()) if reuse else {}
    if not reuse:
        (out / MARK).write_text("{}\n")
        figures["training"] = _train(out / "model", steps, minutes)

    from worldtokens.data import samples
    from worldtokens.parts import load

    saved = next((p for p in (out / "model" / "best", out / "model" / "last") if p.is_dir()), None)
    if saved is None:
        raise InputError(f"{out / 'model'} has no trained model: run `worldtokens demo` without --reuse")
    model = load(saved, pick_device(None))
    rows = samples.open("emoji", split="test")
    log(f"\nEvaluation on {len(rows)} held-out images")
    figures["held_out"] = model.evaluate(rows)
    print_retrieval(figures["held_out"], rows)

    log("\nSearch in the held-out images (without skin-tone variants)")
    folder, row_of = write_images(samples.open("emoji", split="test", skin_tones=False), out / "images")
    figures["queries"] = search_all(model, saved, folder, row_of, out)
    figures["seconds"] = round(time.monotonic() - start, 1)
    figures["peak_memory_gb"] = peak_memory_gb()
    (out / MARK).write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print_next_steps(out, saved, folder, figures)
    return figures


def log(line: str = "") -> None:
    """Print a line and flush, since a pipe is block-buffered."""
    print(line, flush=True)


# ---- training --------------------------------------------------------------------------------------------


def _train(out: Path, steps: int | None, minutes: float | None) -> dict[str, Any]:
    from worldtokens.training.recipe import Recipe

    recipe = Recipe.read(RECIPE)
    if minutes is not None:
        steps = _steps_in(minutes, recipe.train.batch_size)
    steps = steps or recipe.train.steps
    recipe = Recipe.read(
        RECIPE,
        ["--train.out", json.dumps(str(out)), "--train.overwrite", "true", "--train.steps", str(steps)],
    )
    log(f"Training on image-caption pairs: {steps} steps, batch size {recipe.train.batch_size}")
    try:
        _, report = recipe.run()
    except (KeyboardInterrupt, SystemExit):
        command = shlex.join(["worldtokens", "demo", "--reuse", "--out", str(out.parent)])
        log(f"To search with the last checkpoint: {command}")
        raise
    return {
        "recipe": RECIPE,
        "steps": report.steps,
        "batch_size": recipe.train.batch_size,
        "seconds": round(report.seconds, 1),
        "samples_per_second": round(report.samples_per_second, 1),
        "best_step": report.best_step,
    }


def _steps_in(minutes: float, batch_size: int, probe: int = 12) -> int:
    """Number of steps that this machine trains in `minutes`, estimated from `probe` steps."""
    from worldtokens.training.recipe import Recipe

    log(f"Measuring the training speed with {probe} steps")
    with tempfile.TemporaryDirectory() as folder:
        short = ["--train.out", json.dumps(folder + "/probe"), "--train.steps", str(probe)]
        _, report = Recipe.read(RECIPE, [*short, "--train.tensorboard", "false"]).run()
    return max(1, round(minutes * 60 * report.samples_per_second / batch_size))


# ---- figures ---------------------------------------------------------------------------------------------


def median_rank_by_chance(candidates: int, correct: Sequence[int]) -> int:
    """Median rank (1 = first) of a query's first correct candidate in a random order.

    Args:
        candidates: number of candidates.
        correct: number of correct candidates of every query.
    """
    from collections import Counter

    from worldtokens.tasks.metrics.retrieval import chance

    counts = Counter(correct)
    low, high = 1, candidates
    while low < high:  # the first rank within which half of the queries have a correct candidate
        middle = (low + high) // 2
        share = sum(n * chance(candidates, c, middle) for c, n in counts.items()) / len(correct)
        low, high = (low, middle) if share >= 0.5 else (middle + 1, high)
    return low


def print_retrieval(figures: dict[str, float], rows: Sequence[dict]) -> None:
    """Print R@1, R@5, R@10 and median rank in both directions, each with its chance level."""
    captions = [len(row["text"]) for row in rows]
    lines = [("", "R@1", "R@5", "R@10", "median rank")]
    for heading, key, correct in (
        ("text-to-image", "text_to_image", [1] * sum(captions)),
        ("image-to-text", "image_to_text", captions),
    ):
        count = int(figures[f"{key}/candidates"])
        by_chance = median_rank_by_chance(count, correct)
        lines.append(
            (heading, *_percent(figures, key, "R"), f"{figures[f'{key}/median_rank']:,.0f} of {count:,}")
        )
        lines.append(("  chance", *_percent(figures, key, "chance"), f"{by_chance:,} of {count:,}"))
    print_table(lines)
    ratio = figures["text_to_image/R@10"] / figures["text_to_image/chance@10"]
    log(f"text-to-image R@10 is {ratio:.1f} times the chance level")


def _percent(figures: dict[str, float], key: str, name: str) -> list[str]:
    return [f"{100 * figures[f'{key}/{name}@{k}']:.1f}%" for k in (1, 5, 10)]


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns, the first one left-aligned, the others right-aligned."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for first, *rest in lines:
        right = "  ".join(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        log(f"  {first.ljust(widths[0])}  {right}".rstrip())


def peak_memory_gb() -> float | None:
    """Peak resident memory of this process in GB (10^9 bytes); None where the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak * (1 if sys.platform == "darwin" else 1024) / 1e9, 2)


# ---- search ----------------------------------------------------------------------------------------------


def write_images(rows: Sequence[dict], folder: Path) -> tuple[Path, dict[str, dict]]:
    """Write each row's image to a file named after its label.

    Returns:
        The folder, and a dict from file name to row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    row_of: dict[str, dict] = {}
    for row in rows:
        stem = " ".join(re.sub(r"[^\w&' -]+", " ", row["labels"]["en"].replace("’", "'")).split())
        name = f"{stem}.png" if f"{stem}.png" not in row_of else f"{stem} {row['id']}.png"
        row_of[name] = row
        data = bytes(row["image"])
        if not (folder / name).is_file() or (folder / name).read_bytes() != data:
            (folder / name).write_bytes(data)
    return folder, row_of


def search_all(model: Any, saved: Path, folder: Path, row_of: dict[str, dict], out: Path) -> list[dict]:
    """Index the images, search for `QUERIES`, print the rank of each correct image, and draw the sheet."""
    from worldtokens.apps.index.index import Index
    from worldtokens.apps.search.command import query_vector
    from worldtokens.figures.sheet import Cell, Row, save_sheet

    index = Index(Index.default(folder))
    report = index.update(folder, model, model_folder=saved, rebuild=True)
    log(
        f"{report.total} images indexed in {report.seconds:.1f} s ({report.total / report.seconds:,.0f} images/s)"
    )
    sheet, results, lines = [], [], [("query", "first result", "rank of the correct image")]
    for query, concept in QUERIES.items():
        hits = index.search(query_vector(model, query).numpy(), k=len(index))
        concepts = [row_of.get(Path(h.path).name, {}).get("concept") for h in hits]
        rank = concepts.index(concept) + 1
        labels = [row_of[n]["labels"]["en"] if (n := Path(h.path).name) in row_of else n for h in hits]
        lines.append((query, labels[0], f"{rank} of {len(hits)}"))
        results.append({"query": query, "first": labels[0], "rank": rank, "of": len(hits)})
        cells = [Cell(h.path, h.score, labels[i], concepts[i] == concept) for i, h in enumerate(hits[:SHOWN])]
        sheet.append(Row(query, cells))
    print_table(lines)
    note = "top results among held-out images with their cosine similarity; green: the correct image"
    save_sheet(sheet, out / "sheet", f"Text search in {report.total} held-out images", note)
    return results


def print_next_steps(out: Path, saved: Path, folder: Path, figures: dict[str, Any]) -> None:
    """Print the paths of the sheet, and commands that work without changes."""
    memory = f", peak memory {figures['peak_memory_gb']} GB" if figures["peak_memory_gb"] else ""
    log(
        f"\nDone in {figures['seconds']:,.0f} s{memory}. Results: {out / 'sheet.png'} and {out / 'sheet.html'}"
    )
    image = next(iter(sorted(folder.glob("penguin.png")) or sorted(folder.glob("*.png"))))
    commands = [
        ["worldtokens", "search", "a red book", "a yellow face", "--db", str(folder)],
        ["worldtokens", "search", "--image", str(image), "--db", str(folder)],
        ["worldtokens", "index", "YOUR_FOLDER", "--model", str(saved)],
        ["worldtokens", "train", RECIPE, "--train.steps", "3000", "--train.out", "runs/longer"],
    ]
    log("\nNext steps:")
    for command in commands:
        log("  " + shlex.join(command))
