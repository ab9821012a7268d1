"""`worldtokens train RECIPE [--section.key VALUE ...]`: train the model of a recipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from worldtokens.apps.train.help import describe, usage
from worldtokens.errors import InputError
from worldtokens.training.recipe import Recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run `worldtokens train`; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if argv[0].startswith("-"):
        raise InputError(
            f"worldtokens train: the recipe comes first, found {argv[0]}; see worldtokens train --help"
        )
    flags = {"-h", "--help", "--print_config"}
    overrides = ["--train.resume" if a == "--resume" else a for a in argv[1:] if a not in flags]
    recipe = Recipe.read(argv[0], overrides)
    if {"-h", "--help"} & set(argv):
        print(describe(recipe))
        return 0
    if "--print_config" in argv:
        print(recipe, end="")
        return 0
    recipe.run()
    from accelerate import PartialState

    PartialState().destroy_process_group()
    return 0
