"""`worldtokens search TEXT... [--image FILE]`: search an index by text, by an image, or by both."""

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
  worldtokens search "red apple"                            the index in or above the working directory
  worldtokens search "red apple" "a boat at night" -k 8     two queries, a row each on the sheet
  worldtokens search --image cat.jpg --db ~/Images          similar images
  worldtokens search "in snow" --image cat.jpg --out cats   text and image combined; writes cats.png and cats.html

In a pipe the results are lines of query, rank, score and path, separated by tabs; --json for programs.
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="worldtokens search",
        description="Search the files that `worldtokens index` has embedded.\n"
        "Prints a table and writes an image sheet (PNG and HTML).",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "queries", nargs="*", metavar="TEXT", help="a text query, in quotes; several are searched one by one"
    )
    p.add_argument("--image", metavar="FILE", help="query image (or any other file that the model can embed)")
    p.add_argument(
        "--db",
        metavar="DIR",
        help="index, or folder that is indexed (default: the nearest one in or above the working directory)",
    )
    p.add_argument(
        "--model", metavar="M", help="folder of the model (default: the one that the index was built with)"
    )
    p.add_argument("-k", type=int, default=12, help="results per query (default 12)")
    p.add_argument(
        "--modality", metavar="MODALITY", help="search only files of this modality: image, audio, video ..."
    )
    p.add_argument(
        "--out",
        metavar="NAME",
        help="write NAME.png and NAME.html (default: last-search in the index folder)",
    )
    p.add_argument("--no-sheet", action="store_true", help="write no image sheet")
    p.add_argument("--json", action="store_true", help="print one JSON object per query instead of a table")
    p.add_argument("--device", metavar="DEV", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Raises:
        InputError: an argument is invalid.
    """
    args = parser().parse_intermixed_args(argv)
    from worldtokens.apps.index.fingerprint import model_identity
    from worldtokens.apps.index.index import Index
    from worldtokens.data.files import printable
    from worldtokens.errors import InputError
    from worldtokens.parts import load

    index = Index.find(args.db)
    folder = args.model or index.model["folder"]
    if not args.model and not os.path.isdir(folder):
        raise InputError(
            f"the model of the index {printable(index.db)} is no longer at {folder}: pass it with --model FOLDER"
        )
    model = load(folder, pick_device(args.device))
    index.check_model(model_identity(model), folder)
    vectors = [(text, query_vector(model, text, args.image)) for text in args.queries or [None]]
    results = [
        (title(text, args.image), text, index.search(vector.numpy(), args.k, args.modality))
        for text, vector in vectors
    ]
    for heading, text, hits in results:
        if args.json:
            found = [{"path": h.path, "score": round(h.score, 6), "modality": h.modality} for h in hits]
            print(json.dumps({"text": text, "image": args.image, "hits": found}))
        else:
            print_hits(index, heading, hits)
    if not args.no_sheet:
        from worldtokens.figures.sheet import Cell, Row, save_sheet

        rows = [
            Row(heading, [Cell(h.path, h.score) for h in hits], args.image) for heading, _, hits in results
        ]
        note = f"{len(index)} files in {printable(index.root)}"
        for path in save_sheet(rows, args.out or index.db / "last-search", note=note):
            print(f"sheet: {printable(path)}", file=sys.stderr)
    return 0


def query_vector(model: Any, text: str | None = None, file: str | None = None):
    """Unit vector of a text, of a file, or of both (the normalised sum of their vectors).

    Returns:
        (dim,) float tensor on the CPU.

    Raises:
        InputError: the query is empty, or the model cannot embed it.
    """
    import torch.nn.functional as F

    from worldtokens.apps.index.embed import columns_by_modality
    from worldtokens.data.files import modality_of, printable
    from worldtokens.errors import InputError

    columns, found = columns_by_modality(model), []
    if text is not None:
        if not text.strip():
            raise InputError("the query is empty: give a text")
        if "text" not in columns:
            raise InputError(
                f"this model embeds no text, only {', '.join(columns)}: search with --image FILE"
            )
        found.append(model.embed(columns["text"], [text]))
    if file is not None:
        kind = modality_of(file) or "image"  # an image may have no extension; its reader raises if it is none
        if kind not in columns:
            raise InputError(
                f"{printable(file)} is of modality {kind}, this model embeds {', '.join(columns)}"
            )
        if not os.path.isfile(file):
            raise InputError(f"{printable(file)} is not a file")
        if kind == "text":
            raise InputError(f"{printable(file)} is a text file: give the text itself as the query")
        found.append(model.embed(columns[kind], [file]))
    if not found:
        raise InputError(
            'no query: give a text in quotes, --image FILE, or both (`worldtokens search "red apple"`)'
        )
    return F.normalize(sum(F.normalize(v.float(), dim=-1) for v in found), dim=-1)[0].cpu()


def title(text: str | None, file: str | None) -> str:
    """Heading of a query."""
    from worldtokens.data.files import printable

    name = printable(os.path.basename(file)) if file else ""
    return f"{text}  +  {name}" if text and file else text or f"similar to {name}"


def print_hits(index: Index, heading: str, hits: Sequence[Hit]) -> None:
    """Print a table in a terminal; elsewhere tab-separated lines with absolute paths."""
    from pathlib import Path

    from rich.console import Console
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    from worldtokens.data.files import printable

    console = Console()
    if not console.is_terminal:
        for rank, hit in enumerate(hits, 1):
            print(f"{printable(heading)}\t{rank}\t{hit.score:.4f}\t{printable(hit.path)}")
        return
    table = Table(
        title=Text(printable(heading), style="bold"), title_justify="left", box=None, pad_edge=False
    )
    table.add_column("rank", justify="right", style="dim")
    table.add_column("score", justify="right")
    table.add_column("file", overflow="fold")
    for rank, hit in enumerate(hits, 1):
        name = printable(os.path.relpath(hit.path, index.root))
        table.add_row(str(rank), f"{hit.score:.3f}", Text(name, style=Style(link=Path(hit.path).as_uri())))
    console.print(table)
    console.print()
