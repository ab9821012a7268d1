"""The `worldtokens` command: a table of subcommands, each imported when it is called.

Nothing here imports torch, so `worldtokens --help` is fast.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from worldtokens.errors import InputError

# subcommand -> (module:function that takes argv, one line of help)
COMMANDS = {
    "demo": (
        "worldtokens.apps.demo.command:main",
        "train a small CLIP on the included images, then search them by text",
    ),
    "train": ("worldtokens.apps.train.command:main", "train a model from a recipe"),
    "index": ("worldtokens.apps.index.command:main", "embed the files of a folder into a searchable index"),
    "search": ("worldtokens.apps.search.command:main", "search an index by text, image or another file"),
    "tokens": (
        "worldtokens.apps.tokens.command:main",
        "show how files are tokenised: counts, grids, positions; --show draws them",
    ),
    "results": (
        "worldtokens.evals.results:main",
        "evaluate tasks against their baselines and write docs/results.md",
    ),
}


def usage() -> str:
    """Text of `worldtokens --help`."""
    lines = [
        "usage: worldtokens COMMAND [...]",
        "",
        "Turn the world into tokens, then learn the dependencies.",
        "",
    ]
    lines += [f"  {name:<8} {line}" for name, (_, line) in COMMANDS.items()]
    lines += ["", "worldtokens COMMAND --help shows its options; worldtokens --version prints the version."]
    lines += ["WORLDTOKENS_DEBUG=1 prints the traceback of an input error."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand and exit with its status.

    0: success; 2: an input error, with one line on stderr; 130: interrupted.
    """
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run a subcommand; returns its exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        from worldtokens import __version__

        print(f"worldtokens {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(COMMANDS)}"
        return _fail(f"no command {name!r}: {hint}")
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        return getattr(importlib.import_module(module), function)(rest) or 0
    except InputError as e:
        if os.environ.get("WORLDTOKENS_DEBUG", "") not in ("", "0"):
            raise
        return _fail(str(e))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # e.g. `worldtokens ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _fail(message: str) -> int:
    print(f"worldtokens: {message}", file=sys.stderr)
    return 2
