"""`worldtokens search "words" [--image FILE]`: ask an index in words, with an image, or both."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from worldtokens.apps.console import pick_device

if TYPE_CHECKING:
    from worldtokens.apps.index.index import Hit, Index

_EXAMPLE = """examples:
  worldtokens search "red apple"                              the index in or above this folder
  worldtokens search "red apple" "a boat at night" -k 8       two queries, one row each on the sheet
  worldtokens search --image cat.jpg --db ~/Images          what looks like this?
  worldtokens search "in snow" --image cat.jpg --out cats     both together; sheet in cats.png and cats.html

In a pipe the answers are lines of query, place, score and path, with tabs between; --json for programs.
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="worldtokens search",
        description="Search the files that `worldtokens index` has embedded.\n"
        "Answers come as a table and as an image sheet (PNG and HTML).",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("words", nargs="*", help="what to look for; put quotes around words that belong together")
    p.add_argument("--image", metavar="FILE", help="ask with an image (or any file that the model reads)")
    p.add_argument(
        "--db", metavar="DIR", help="the index or the folder it is of (default: in or above this folder)"
    )
    p.add_argument("--model", metavar="M", help="folder of the model (default: the one that made the index)")
    p.add_argument("-k", type=int, default=12, help="answers to a query (default 12)")
    p.add_argument("--modality", metavar="KIND", help="only files of this kind: image, audio, video ...")
    p.add_argument(
        "--out", metavar="NAME", help="write NAME.png and NAME.html (default: last-search in the index)"
    )
    p.add_argument("--no-sheet", action="store_true", help="no image sheet")
    p.add_argument("--json", action="store_true", help="one JSON object a query on stdout instead of a table")
    p.add_argument("--device", metavar="DEV", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Raises:
        InputError: something given cannot be used.
    """
    args = parser().parse_intermixed_args(argv)
    from worldtokens.apps.index.fingerprint import model_identity
    from worldtokens.apps.index.index import Index
    from worldtokens.data.files import shown
    from worldtokens.errors import InputError
    from worldtokens.parts import load

    index = Index.find(args.db)
    folder = args.model or index.model["folder"]
    if not args.model and not os.path.isdir(folder):
        raise InputError(
            f"the model that made {shown(index.db)} is no longer at {folder}: name it with --model FOLDER"
        )
    model = load(folder, pick_device(args.device))
    index.check_model(model_identity(model), folder)
    asked = [(words, query_vector(model, words, args.image)) for words in args.words]
    asked = asked or [(None, query_vector(model, None, args.image))]
    answers = [
        (title(words, args.image), words, index.search(vector.numpy(), args.k, args.modality))
        for words, vector in asked
    ]
    for heading, words, hits in answers:
        if args.json:
            found = [{"path": h.path, "score": round(h.score, 6), "modality": h.modality} for h in hits]
            print(json.dumps({"text": words, "image": args.image, "hits": found}))
        else:
            print_hits(index, heading, hits)
    if not args.no_sheet:
        from worldtokens.figures.sheet import Cell, Row, save_sheet

        rows = [
            Row(heading, [Cell(h.path, h.score) for h in hits], args.image) for heading, _, hits in answers
        ]
        note = f"{len(index)} files in {shown(index.root)}"
        for path in save_sheet(rows, args.out or index.db / "last-search", note=note):
            print(f"sheet: {shown(path)}", file=sys.stderr)
    return 0


def query_vector(model: Any, words: str | None = None, file: str | None = None):
    """One unit vector for words, for a file, or for both: the normalised sum of the two.

    Returns:
        (dim,) float tensor on the CPU.

    Raises:
        InputError: nothing was asked, or the model cannot read it.
    """
    import torch.nn.functional as F

    from worldtokens.apps.index.embed import columns_by_modality
    from worldtokens.data.files import modality_of, shown
    from worldtokens.errors import InputError

    columns, found = columns_by_modality(model), []
    if words is not None:
        if not words.strip():
            raise InputError("the query is empty: say in words what to look for")
        if "text" not in columns:
            raise InputError(f"this model reads no words, only {', '.join(columns)}: ask with --image FILE")
        found.append(model.embed(columns["text"], [words]))
    if file is not None:
        kind = modality_of(file) or "image"  # an image may well lack an extension; its reader will tell
        if kind not in columns:
            raise InputError(f"{shown(file)} holds {kind}, this model reads {', '.join(columns)}")
        if not os.path.isfile(file):
            raise InputError(f"{shown(file)} is not a file")
        if kind == "text":
            raise InputError(f"{shown(file)} holds text: give the words themselves")
        found.append(model.embed(columns[kind], [file]))
    if not found:
        raise InputError(
            'nothing to look for: give words in quotes, --image FILE, or both (`search "red apple"`)'
        )
    return F.normalize(sum(F.normalize(v.float(), dim=-1) for v in found), dim=-1)[0].cpu()


def title(words: str | None, file: str | None) -> str:
    """A query as a heading."""
    from worldtokens.data.files import shown

    name = shown(os.path.basename(file)) if file else ""
    return f"{words}  +  {name}" if words and file else words or f"like {name}"


def print_hits(index: Index, heading: str, hits: Sequence[Hit]) -> None:
    """A table in a terminal; lines with tabs elsewhere, whole paths on one line each."""
    from pathlib import Path

    from rich.console import Console
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    from worldtokens.data.files import shown

    console = Console()
    if not console.is_terminal:
        for place, hit in enumerate(hits, 1):
            print(f"{shown(heading)}\t{place}\t{hit.score:.4f}\t{shown(hit.path)}")
        return
    table = Table(title=Text(shown(heading), style="bold"), title_justify="left", box=None, pad_edge=False)
    table.add_column("", justify="right", style="dim")
    table.add_column("score", justify="right")
    table.add_column("file", overflow="fold")
    for place, hit in enumerate(hits, 1):
        name = shown(os.path.relpath(hit.path, index.root))
        table.add_row(str(place), f"{hit.score:.3f}", Text(name, style=Style(link=Path(hit.path).as_uri())))
    console.print(table)
    console.print()
