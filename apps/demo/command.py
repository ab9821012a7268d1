"""`worldtokens demo`: train on the embedded images, then search images that training never saw, by words.

The recipe is the shipped `clip_emoji`; whatever is printed was measured in this run on the held-out split.
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
SHOWN = 8  # answers to a query on the sheet

# A person's words for things in the held-out split, and the concepts that answer them (ids without gender and
# skin tone). Neither the words nor the images were in training.
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

It writes OUT/model (the trained model), OUT/images (the held-out images and their index), OUT/sheet.png,
OUT/sheet.html and OUT/demo.json (the figures).
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="worldtokens demo",
        description="Train a small CLIP on the embedded image set, measure it on held-out images, and search them\n"
        "by words. A few minutes on two CPU cores.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--out", default="worldtokens-demo", metavar="DIR", help="where to write (default %(default)s)"
    )
    length = p.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="training steps (default: the recipe's)")
    length.add_argument(
        "--minutes", type=float, metavar="M", help="as many steps as this machine makes in M minutes"
    )
    length.add_argument(
        "--reuse", action="store_true", help="search with the model that OUT holds, train nothing"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Raises:
        InputError: something given cannot be used.
    """
    args = parser().parse_args(argv)
    demo(args.out, steps=args.steps, minutes=args.minutes, reuse=args.reuse)
    return 0


def demo(
    out: str | Path, steps: int | None = None, minutes: float | None = None, reuse: bool = False
) -> dict[str, Any]:
    """Train, measure, index, search, and say what to do next.

    Args:
        out: folder to write; one from an earlier demo is written anew.
        steps: training steps. Default: the recipe's.
        minutes: give this instead for as many steps as fit.
        reuse: take the model that `out` holds.

    Returns:
        The figures, as written to `demo.json`.

    Raises:
        InputError: `out` holds something else, or there is nothing to reuse.
    """
    start, out = time.monotonic(), Path(out)
    if out.exists() and not (out / MARK).exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} holds something that is not a demo's: name another folder with --out")
    if (steps is not None and steps < 1) or (minutes is not None and minutes <= 0):
        raise InputError("--steps and --minutes must be more than 0")
    if reuse and not (out / "model").is_dir():
        raise InputError(
            f"{out / 'model'} is not there to be reused: run `worldtokens demo` without --reuse first"
        )
    from worldtokens.apps.index.index import lancedb_or_error

    lancedb_or_error()  # now, not after minutes of training
    out.mkdir(parents=True, exist_ok=True)
    figures = json.loads((out / MARK).read_text()) if reuse else {}
    if not reuse:
        (out / MARK).write_text("{}\n")
        figures["training"] = _train(out / "model", steps, minutes)

    from worldtokens.data import samples
    from worldtokens.parts import load

    saved = next((p for p in (out / "model" / "best", out / "model" / "last") if p.is_dir()), None)
    if saved is None:
        raise InputError(f"{out / 'model'} holds no trained model: run `worldtokens demo` without --reuse")
    model = load(saved, pick_device(None))
    rows = samples.open("emoji", split="test")
    say("\nHow well it finds what it has never seen")
    figures["held_out"] = model.evaluate(rows)
    print_figures(figures["held_out"], rows)

    say("\nSearching the held-out images, one of each without its skin-tone twins")
    folder, row_of = write_pictures(samples.open("emoji", split="test", skin_tones=False), out / "images")
    figures["queries"] = search_all(model, saved, folder, row_of, out)
    figures["seconds"] = round(time.monotonic() - start, 1)
    figures["peak_memory_gb"] = peak_memory_gb()
    (out / MARK).write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    say_next(out, saved, folder, figures)
    return figures


def say(line: str = "") -> None:
    """A line on stdout at once: a pipe would hold it back."""
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
    where = "" if sys.stdout.isatty() else "; no terminal here, so progress comes as lines"
    say(f"Training on images and captions: {steps} steps of {recipe.train.batch_size} pairs{where}")
    try:
        _, report = recipe.run()
    except (KeyboardInterrupt, SystemExit):
        say(
            f"To search with what is learned so far: {shlex.join(['worldtokens', 'demo', '--reuse', '--out', str(out.parent)])}"
        )
        raise
    say(f"Trained in {report.seconds:,.0f} s, {report.samples_per_second:,.0f} samples/s")
    return {
        "recipe": RECIPE,
        "steps": report.steps,
        "batch_size": recipe.train.batch_size,
        "seconds": round(report.seconds, 1),
        "samples_per_second": round(report.samples_per_second, 1),
        "best_step": report.best_step,
    }


def _steps_in(minutes: float, batch_size: int, probe: int = 12) -> int:
    """How many steps this machine makes in some minutes, told by a few that it makes now."""
    from worldtokens.training.recipe import Recipe

    say(f"Measuring this machine's speed with {probe} steps")
    with tempfile.TemporaryDirectory() as folder:
        short = ["--train.out", json.dumps(folder + "/probe"), "--train.steps", str(probe)]
        _, report = Recipe.read(RECIPE, [*short, "--train.tensorboard", "false"]).run()
    return max(1, round(minutes * 60 * report.samples_per_second / batch_size))


# ---- figures ---------------------------------------------------------------------------------------------


def median_by_chance(candidates: int, true: Sequence[int]) -> int:
    """The median place, 1 = first, of a query's first true candidate in random orders.

    Args:
        candidates: how many there are.
        true: for every query, how many of them are true.
    """
    from collections import Counter

    from worldtokens.tasks.metrics.retrieval import chance

    counts = Counter(true)
    low, high = 1, candidates
    while low < high:  # the first place within which half of the queries are expected to be answered
        middle = (low + high) // 2
        share = sum(n * chance(candidates, t, middle) for t, n in counts.items()) / len(true)
        low, high = (low, middle) if share >= 0.5 else (middle + 1, high)
    return low


def print_figures(figures: dict[str, float], rows: Sequence[dict]) -> None:
    """R@1, 5 and 10 and the median place, both ways, each above what a random order gives."""
    captions = [len(row["text"]) for row in rows]
    lines = [("", "R@1", "R@5", "R@10", "median place")]
    for heading, key, true in (
        ("words to image", "text_to_image", [1] * sum(captions)),
        ("image to words", "image_to_text", captions),
    ):
        found = int(figures[f"{key}/candidates"])
        by_chance = median_by_chance(found, true)
        lines.append(
            (heading, *_percent(figures, key, "R"), f"{figures[f'{key}/median_rank']:,.0f} of {found:,}")
        )
        lines.append(("  by chance", *_percent(figures, key, "chance"), f"{by_chance:,} of {found:,}"))
    print_table(lines)
    times = figures["text_to_image/R@10"] / figures["text_to_image/chance@10"]
    say(f"Words find their image among the first ten {times:.1f} times as often as chance.")


def _percent(figures: dict[str, float], key: str, name: str) -> list[str]:
    return [f"{100 * figures[f'{key}/{name}@{k}']:.1f}%" for k in (1, 5, 10)]


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Lines of words in columns, the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for first, *rest in lines:
        right = "  ".join(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        say(f"  {first.ljust(widths[0])}  {right}".rstrip())


def peak_memory_gb() -> float | None:
    """The most memory that this process has held, in 10^9 bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak * (1 if sys.platform == "darwin" else 1024) / 1e9, 2)


# ---- search ----------------------------------------------------------------------------------------------


def write_pictures(rows: Sequence[dict], folder: Path) -> tuple[Path, dict[str, dict]]:
    """Write each row's image under its label's name.

    Returns:
        The folder, and the row of each file name.
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
    """Index the images, ask `QUERIES`, print where each right answer stands, and draw the sheet."""
    from worldtokens.apps.index.index import Index
    from worldtokens.apps.search.command import query_vector
    from worldtokens.figures.sheet import Cell, Row, save_sheet

    index = Index(Index.default(folder))
    report = index.update(folder, model, model_folder=saved, rebuild=True)
    say(
        f"{report.total} images indexed in {report.seconds:.1f} s ({report.total / report.seconds:,.0f} a second)"
    )
    sheet, asked, lines = [], [], [("words", "first answer", "the right one comes")]
    for words, concept in QUERIES.items():
        hits = index.search(query_vector(model, words).numpy(), k=len(index))
        concepts = [row_of.get(Path(h.path).name, {}).get("concept") for h in hits]
        place = concepts.index(concept) + 1
        labels = [row_of[n]["labels"]["en"] if (n := Path(h.path).name) in row_of else n for h in hits]
        lines.append((words, labels[0], f"{place} of {len(hits)}"))
        asked.append({"words": words, "first": labels[0], "place": place, "of": len(hits)})
        cells = [Cell(h.path, h.score, labels[i], concepts[i] == concept) for i, h in enumerate(hits[:SHOWN])]
        sheet.append(Row(words, cells))
    print_table(lines)
    note = "The first answers among held-out images, best first, with their cosine; green: the one that was meant."
    save_sheet(sheet, out / "sheet", f"{report.total} images never seen in training, found by words", note)
    return asked


def say_next(out: Path, saved: Path, folder: Path, figures: dict[str, Any]) -> None:
    """Where the sheet lies, and commands that work as they stand."""
    memory = f", {figures['peak_memory_gb']} GB of memory at most" if figures["peak_memory_gb"] else ""
    say(
        f"\nDone in {figures['seconds']:,.0f} s{memory}. Look at {out / 'sheet.png'}, or open {out / 'sheet.html'}"
    )
    picture = next(iter(sorted(folder.glob("penguin.png")) or sorted(folder.glob("*.png"))))
    commands = [
        ["worldtokens", "search", "a red book", "a yellow face", "--db", str(folder)],
        ["worldtokens", "search", "--image", str(picture), "--db", str(folder)],
        ["worldtokens", "index", "YOUR_FOLDER", "--model", str(saved)],
        ["worldtokens", "train", RECIPE, "--train.steps", "3000", "--train.out", "runs/longer"],
    ]
    say("\nWhat to type next:")
    for command in commands:
        say("  " + shlex.join(command))
