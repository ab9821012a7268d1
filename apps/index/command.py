"""`worldtokens index FOLDER --model M`: make a folder's files searchable."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from worldtokens.apps.console import pick_device, progress

_EXAMPLE = """example:
  worldtokens index ~/Images --model runs/clip/best
  worldtokens search "red apple" --db ~/Images

Run it again after files have come, gone or changed: only what is new to it is embedded.
It can be stopped at any time; what is embedded is kept.
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="worldtokens index",
        description="Embed the images of a folder (and sounds, clips ... where the model reads them) into an\n"
        "index on disk that `worldtokens search` answers from. Hidden files and folders are passed over.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("folder", help="folder to index, with all folders below it")
    p.add_argument(
        "--model", metavar="M", help="folder of a saved model (default: the one that made the index)"
    )
    p.add_argument("--db", metavar="DIR", help="where the index lies (default: FOLDER/.worldtokens)")
    p.add_argument(
        "--modalities",
        nargs="+",
        metavar="KIND",
        help="kinds of files: image audio video points text (default: as before; at first all that the model reads, "
        "but text)",
    )
    p.add_argument(
        "--rebuild", action="store_true", help="throw the old index away first, e.g. for a new model"
    )
    p.add_argument("--follow-links", action="store_true", help="enter links to folders")
    p.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="files in one forward pass (default 32)"
    )
    p.add_argument("--workers", type=int, default=2, metavar="N", help="threads that read files (default 2)")
    p.add_argument("--device", metavar="DEV", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Raises:
        InputError: something given cannot be used.
    """
    args = parser().parse_args(argv)
    from worldtokens.apps.index.index import Index
    from worldtokens.data.files import shown
    from worldtokens.errors import InputError
    from worldtokens.parts import load

    if args.batch_size < 1 or args.workers < 1:
        raise InputError("--batch-size and --workers must be at least 1")
    index = Index(args.db or Index.default(args.folder))
    folder = args.model or (index.model["folder"] if index.meta is not None else None)
    if folder is None:
        raise InputError(
            f"{index.db} is a new index: name the model that shall read the files with --model FOLDER"
        )
    model = load(folder, pick_device(args.device))
    try:
        with progress("embedding") as report_progress:
            report = index.update(
                args.folder,
                model,
                model_folder=folder,
                modalities=args.modalities,
                batch_size=args.batch_size,
                workers=args.workers,
                rebuild=args.rebuild,
                follow_links=args.follow_links,
                progress=report_progress,
            )
    except KeyboardInterrupt:
        print("\nstopped; what was embedded is kept, run it again to go on", file=sys.stderr)
        raise
    rate = f", {report.embedded / report.seconds:.1f} embedded a second" if report.embedded else ""
    print(
        f"{report.total} files in {shown(index.db)}: {report.added} added, {report.changed} changed, "
        f"{report.reused} renamed or copied, {report.unchanged} unchanged, {report.removed} removed, "
        f"{len(report.skipped)} skipped ({report.seconds:.1f} s{rate})"
    )
    lines = [f"{shown(s.path)}: {shown(s.reason)}" for s in report.skipped]
    log = index.db / "skipped.txt"
    with contextlib.suppress(FileNotFoundError):
        log.unlink()
    if lines:
        log.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for line in lines[:20]:
            print(f"  skipped {line}", file=sys.stderr)
        if len(lines) > 20:
            print(f"  ... and {len(lines) - 20} more, all in {shown(log)}", file=sys.stderr)
    return 0
