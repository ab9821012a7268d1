"""`worldtokens tokens FILE...`: the tokens of each file; needs no model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from worldtokens.apps.tokens.inspect import KINDS, Failed, Inspected, TextToken, inspect_source
from worldtokens.errors import InputError

_EXAMPLE = """examples:
  worldtokens tokens cat.jpg song.mp3 clip.mp4 chair.obj --text "a photo of a cat"
  worldtokens tokens *.jpg --size native --show tokens.png     native aspect ratio, patches drawn over the images
  worldtokens tokens talk.wav --preset ast --show tokens.png   another front-end, its patches on the spectrogram

A scene is a folder with cameras.json or transforms.json. In a pipe the rows are separated by tabs; --json for programs.
Exit status 1: some files could not be read, the others are shown.
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="worldtokens tokens",
        description="Show how files are tokenised: number of tokens, grid, positions, and padding in a batch of them.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("files", nargs="*", metavar="FILE", help="image, audio, video, mesh, scene, table or .txt")
    p.add_argument("--text", action="append", default=[], metavar="TEXT", help="a text; may be repeated")
    p.add_argument("--show", metavar="OUT.png", help="draw the tokens into a PNG")
    p.add_argument("--patch", type=int, default=16, help="patch size in pixels (default 16)")
    p.add_argument(
        "--size", default="224", help="size that images and videos are resized to (default 224), or 'native'"
    )
    p.add_argument("--frames", type=int, default=16, help="maximum number of frames of a video (default 16)")
    p.add_argument("--fps", type=float, help="sample frames at this rate instead of evenly")
    p.add_argument("--preset", default="whisper", help="audio front-end: whisper (default), ast or waveform")
    p.add_argument("--vocabulary", metavar="FILE", help="tokenizer.json for texts (default: CLIP's)")
    p.add_argument("--time", metavar="COLUMN", help="column of time stamps in tables")
    p.add_argument(
        "--as",
        dest="kind",
        choices=KINDS,
        help="read all FILEs as this modality, regardless of their extensions",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object per file instead of a table")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a source could not be read.

    Raises:
        InputError: no source, or an invalid setting.
    """
    args = parser().parse_intermixed_args(argv)
    if not args.files and not args.text:
        raise InputError('no source: name files, or give --text "a text"')
    if args.size != "native" and not args.size.isdigit():
        raise InputError(f"--size {args.size}: expected a number of pixels, or native")
    if args.show and not args.show.lower().endswith(".png"):
        raise InputError(f"--show {args.show}: the extension must be .png")
    front_ends = {}
    found = [inspect_source(file, args, args.kind, front_ends=front_ends) for file in args.files]
    found += [inspect_source(text, args, is_text=True, front_ends=front_ends) for text in args.text]
    readable = [f for f in found if isinstance(f, Inspected)]
    shares = padding(readable)
    if args.json:
        for f in found:
            print(json.dumps(as_dict(f, shares), ensure_ascii=False))
    else:
        print_table(found, shares)
    if readable and args.show:
        from worldtokens.apps.tokens.figure import MOST_PANELS, save_figure

        some = f" (first {MOST_PANELS} of {len(readable)})" if len(readable) > MOST_PANELS else ""
        print(f"figure: {save_figure(readable, args.show)}{some}", file=sys.stderr)
    return 0 if len(readable) == len(found) else 1


def padding(sources: Sequence[Inspected]) -> dict[int, float]:
    """Share of padding of each source in one padded batch of all, by `id` of the `Inspected`."""
    from worldtokens.tokens import Tokens

    if not sources:
        return {}
    valid = Tokens.stack([s.tokens for s in sources]).valid
    return {id(s): 1 - float(row.float().mean()) for s, row in zip(sources, valid, strict=True)}


def batch_line(sources: Sequence[Inspected]) -> str:
    """Shape and share of padding of a batch of all sources, padded and packed."""
    from worldtokens.tokens import Tokens, pack

    parts = [s.tokens for s in sources]
    batch, packed = Tokens.stack(parts), pack(parts, max(s.count for s in sources))

    def describe(t: Tokens) -> str:
        rows = f"{len(t)} row{'s' * (len(t) != 1)} of {t.shape[1]:,}"
        return f"{rows}, {100 * (1 - float(t.valid.float().mean())):.0f}% padding"

    return f"one batch: {describe(batch)}; packed: {describe(packed)}"


def as_dict(f: Inspected | Failed, shares: dict[int, float]) -> dict[str, Any]:
    """JSON object of a source."""
    if isinstance(f, Failed):
        return {"file": f.name, "modality": f.modality, "error": f.reason}
    out = {"file": f.name, "modality": f.modality, "source": f.source, "tokens": f.count, "grid": list(f.grid),
           "positions": {k: [round(v, 4) for v in ends] for k, ends in f.positions.items()},
           "seconds_per_token": f.seconds, "padding": round(shares[id(f)], 4)}  # fmt: skip
    return out | (
        {"texts": [t.text for t in f.text_tokens], "ids": [t.id for t in f.text_tokens]}
        if f.text_tokens
        else {}
    )


def joined(tokens: Sequence[TextToken]) -> str:
    """Tokens on one line: bars between words, dots between the tokens of a word."""
    out = ""
    for t in tokens:
        text = t.text.strip(" ") or t.text
        out += (text if text.isprintable() else repr(text)[1:-1]) + (" | " if t.ends_word else "·")
    return out.removesuffix(" | ").removesuffix("·")


def cells(f: Inspected, share: float) -> list[str]:
    """A row of the table."""
    positions = ", ".join(f"{axis} {a:.4g}..{b:.4g}" for axis, (a, b) in f.positions.items())
    seconds = "" if f.seconds is None else f"{f.seconds:.3g}"
    return [
        f.name,
        f.modality,
        f.source,
        f"{f.count:,}",
        " x ".join(map(str, f.grid)),
        positions or "0",
        seconds,
        f"{100 * share:.1f}%",
    ]


HEAD = ["file", "modality", "source", "tokens", "grid", "positions", "s/token", "padding"]
RIGHT = {3, 6, 7}


def print_table(found: Sequence[Inspected | Failed], shares: dict[int, float]) -> None:
    """Print aligned columns in a terminal, tab-separated lines elsewhere; an unreadable source has a line with its error."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    readable = [f for f in found if isinstance(f, Inspected)]
    rows = {id(f): cells(f, shares[id(f)]) for f in readable}
    console = Console()
    if not console.is_terminal:
        print("\t".join([*HEAD, "text tokens"]))
        for f in found:
            if isinstance(f, Failed):
                print(f"{f.name}\t{f.modality or ''}\terror: {f.reason}")
            else:
                print("\t".join([*rows[id(f)], joined(f.text_tokens)]))
        if len(readable) > 1:
            print(batch_line(readable), file=sys.stderr)
        return
    names = [*([f.name] for f in found), *rows.values(), HEAD]
    widths = [max((cell_len(r[i]) for r in names if len(r) > i), default=0) for i in range(len(HEAD))]

    def line(row: Sequence[str]) -> str:
        gaps = [" " * (w - cell_len(c)) for c, w in zip(row, widths, strict=True)]
        return "  ".join(
            g + c if i in RIGHT else c + g for i, (c, g) in enumerate(zip(row, gaps, strict=True))
        )

    def out(text: str, style: str = "") -> None:
        console.print(Text(text.rstrip(), style), soft_wrap=True)

    out(line(HEAD), "bold")
    for f in found:
        if isinstance(f, Failed):
            space = " " * (widths[0] - cell_len(f.name) + 2)
            out(f"{f.name}{space}{f.reason}", "red")
        else:
            out(line(rows[id(f)]))
    for f in readable:
        if f.text_tokens:
            out(f"\n{f.name}\n  {joined(f.text_tokens)}")
    if len(readable) > 1:
        out(f"\n{batch_line(readable)}", "dim")
