"""`worldtokens train RECIPE [--section.key value ...]`: train what a recipe describes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from worldtokens.errors import InputError
from worldtokens.training.recipe import Recipe, recipe_parser, shipped

USAGE = """usage: worldtokens train RECIPE [--section.key value ...] [--resume] [--print_config]

RECIPE is a path or a shipped name: {shipped}.
Any value of the recipe can be changed: --optim.lr 1e-3 --model.dim 128 --train.out runs/mine
--resume goes on from the run in train.out; --print_config prints the whole recipe, itself a recipe, and ends.
Several processes: torchrun --nproc-per-node 2 -m worldtokens train RECIPE
"""


def main(argv: Sequence[str] | None = None) -> int:
    """`worldtokens train`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(shipped=", ".join(shipped())))
        print(recipe_parser(validation=True, model=False).format_help().partition("\n\n")[2])
        return 0
    if argv[0].startswith("-"):
        raise InputError(
            f"worldtokens train: the recipe comes first, found {argv[0]}; see worldtokens train --help"
        )
    show = "--print_config" in argv
    rest = ["--train.resume" if a == "--resume" else a for a in argv[1:] if a != "--print_config"]
    recipe = Recipe.read(argv[0], rest)
    if show:
        print(recipe, end="")
        return 0
    _, report = recipe.run()
    from accelerate import PartialState

    if PartialState().is_main_process:
        out = Path(recipe.train.out)
        best = f"; best at step {report.best_step}: {out / 'best'}" if report.best_step else ""
        print(
            f"trained {report.steps} steps at {report.samples_per_second:,.0f} samples/s; last: {out / 'last'}{best}"
        )
    PartialState().destroy_process_group()
    return 0
