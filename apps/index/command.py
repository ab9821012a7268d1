"""`worldtokens index FOLDER --model M`: embed the files of a folder into a searchable index."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from worldtokens.apps.console import pick_device, progress

_EXAMPLE = """example:
  worldtokens index ~/Images --model runs/clip/best
  worldtokens search "red apple" --db ~/Images

Run it again after files were added, deleted or changed: only new content is embedded.
An interrupted run can be resumed: finished embeddings are stored.
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="worldtokens index",
        description="Embed the images of a folder (and audio, video ... if the model has these modalities) into an\n"
        "index on disk for `worldtokens search`. Hidden files and folders are skipped.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("folder", help="folder to index, with all folders below it")
    p.add_argument(
        "--model",
        metavar="M",
        help="folder of a saved model (default: the one that the index was built with)",
    )
    p.add_argument("--db", metavar="DIR", help="folder of the index (default: FOLDER/.worldtokens)")
    p.add_argument(
        "--modalities",
        nargs="+",
        metavar="MODALITY",
        help="modalities to index: image audio video points text (default: those of the last run; at first all that the "
        "model embeds except text)",
    )
    p.add_argument("--rebuild", action="store_true", help="delete the old index first, e.g. for a new model")
    p.add_argument("--follow-links", action="store_true", help="enter links to folders")
    p.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="files per forward pass (default 32)"
    )
    p.add_argument("--workers", type=int, default=2, metavar="N", help="threads that read files (default 2)")
    p.add_argument("--device", metavar="DEV", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Raises:
        InputError: an argument is invalid.
    """
    args = parser().parse_args(argv)
    from worldtokens.apps.index.index import Index
    from worldtokens.data.files import printable
    from worldtokens.errors import InputError
    from worldtokens.parts import load

    if args.batch_size < 1 or args.workers < 1:
        raise InputError("--batch-size and --workers must be at least 1")
    index = Index(args.db or Index.default(args.folder))
    folder = args.model or (index.model["folder"] if index.meta is not None else None)
    if folder is None:
        raise InputError(
            f"{index.db} is a new index: pass the model that embeds the files with --model FOLDER"
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
        print("\nstopped; finished embeddings are stored, run the command again to resume", file=sys.stderr)
        raise
    rate = f", {report.embedded / report.seconds:.1f} files/s embedded" if report.embedded else ""
    print(
        f"{report.total} files in {printable(index.db)}: {report.added} added, {report.changed} changed, "
        f"{report.reused} renamed or copied, {report.unchanged} unchanged, {report.removed} removed, "
        f"{len(report.skipped)} skipped ({report.seconds:.1f} s{rate})"
    )
    lines = [f"{printable(s.path)}: {printable(s.reason)}" for s in report.skipped]
    log = index.db / "skipped.txt"
    with contextlib.suppress(FileNotFoundError):
        log.unlink()
    if lines:
        log.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for line in lines[:20]:
            print(f"  skipped {line}", file=sys.stderr)
        if len(lines) > 20:
            print(f"  ... and {len(lines) - 20} more, all in {printable(log)}", file=sys.stderr)
    return 0
