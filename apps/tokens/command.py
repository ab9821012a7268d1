"""`worldtokens tokens FILE...`: what each file becomes, with no model needed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from worldtokens.apps.tokens.inspect import KINDS, Failed, Piece, Seen, look
from worldtokens.errors import InputError

_EXAMPLE = """examples:
  worldtokens tokens cat.jpg song.mp3 clip.mp4 chair.obj --text "a photo of a cat"
  worldtokens tokens *.jpg --size native --show tokens.png     own aspect, patches drawn over the images
  worldtokens tokens talk.wav --preset ast --show tokens.png   other front-end, its patches on the spectrogram

A scene is a folder with cameras.json or transforms.json. In a pipe the answers are lines with tabs between; --json
for programs. Status 1: something could not be read, the rest is shown.
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="worldtokens tokens",
        description="What files become: how many tokens, their grid and positions, and what a batch of them wastes.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "files", nargs="*", metavar="FILE", help="images, sounds, clips, meshes, scenes, tables, .txt"
    )
    p.add_argument(
        "--text", action="append", default=[], metavar="WORDS", help="a text itself; may be repeated"
    )
    p.add_argument("--show", metavar="OUT.png", help="draw what the tokens are into an image")
    p.add_argument("--patch", type=int, default=16, help="side of a patch in pixels (default 16)")
    p.add_argument(
        "--size", default="224", help="side that images and clips are brought to (default 224), or 'native'"
    )
    p.add_argument("--frames", type=int, default=16, help="frames of a clip, at most (default 16)")
    p.add_argument("--fps", type=float, help="take a clip's frames at this rate instead of spread over it")
    p.add_argument("--preset", default="whisper", help="sounds: whisper (default), ast or waveform")
    p.add_argument("--vocabulary", metavar="FILE", help="texts: a tokenizer.json (default: CLIP's pieces)")
    p.add_argument("--time", metavar="COLUMN", help="tables: the column of time stamps")
    p.add_argument(
        "--as", dest="kind", choices=KINDS, help="read all FILEs as this, whatever they are called"
    )
    p.add_argument("--json", action="store_true", help="one JSON object a file on stdout instead of a table")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if something could not be read.

    Raises:
        InputError: nothing to look at, or a setting that cannot be used.
    """
    args = parser().parse_intermixed_args(argv)
    if not args.files and not args.text:
        raise InputError('nothing to look at: name files, or give --text "some words"')
    if args.size != "native" and not args.size.isdigit():
        raise InputError(f"--size {args.size}: expected a number of pixels, or native")
    if args.show and not args.show.lower().endswith(".png"):
        raise InputError(f"--show {args.show}: the image is a PNG, name it .png")
    made = {}
    found = [look(file, args, args.kind, made=made) for file in args.files]
    found += [look(text, args, given=True, made=made) for text in args.text]
    seen = [f for f in found if isinstance(f, Seen)]
    shares = padding(seen)
    if args.json:
        for f in found:
            print(json.dumps(as_dict(f, shares), ensure_ascii=False))
    else:
        print_table(found, shares)
    if seen and args.show:
        from worldtokens.apps.tokens.figure import MOST_PANELS, save_picture

        some = f" (the first {MOST_PANELS} of {len(seen)})" if len(seen) > MOST_PANELS else ""
        print(f"image: {save_picture(seen, args.show)}{some}", file=sys.stderr)
    return 0 if len(seen) == len(found) else 1


def padding(seen: Sequence[Seen]) -> dict[int, float]:
    """By id() of a Seen the share of its row that is padding when all are stacked in one batch."""
    from worldtokens.tokens import Tokens

    if not seen:
        return {}
    valid = Tokens.stack([s.tokens for s in seen]).valid
    return {id(s): 1 - float(row.float().mean()) for s, row in zip(seen, valid, strict=True)}


def batch_line(seen: Sequence[Seen]) -> str:
    """One sentence about a batch of all: padded, and packed."""
    from worldtokens.tokens import Tokens, pack

    parts = [s.tokens for s in seen]
    batch, packed = Tokens.stack(parts), pack(parts, max(s.count for s in seen))

    def tell(t: Tokens) -> str:
        rows = f"{len(t)} row{'s' * (len(t) != 1)} of {t.shape[1]:,}"
        return f"{rows}, {100 * (1 - float(t.valid.float().mean())):.0f}% padding"

    return f"one batch: {tell(batch)}; packed: {tell(packed)}"


def as_dict(f: Seen | Failed, shares: dict[int, float]) -> dict[str, Any]:
    """What `--json` prints of a source."""
    if isinstance(f, Failed):
        return {"file": f.name, "modality": f.modality, "error": f.reason}
    out = {"file": f.name, "modality": f.modality, "source": f.source, "tokens": f.count, "grid": list(f.grid),
           "positions": {k: [round(v, 4) for v in ends] for k, ends in f.positions.items()},
           "seconds_per_token": f.seconds, "padding": round(shares[id(f)], 4)}  # fmt: skip
    return out | ({"pieces": [p.text for p in f.pieces], "ids": [p.id for p in f.pieces]} if f.pieces else {})


def spelled(pieces: Sequence[Piece]) -> str:
    """Pieces on one line: words apart by bars, pieces of a word by dots."""
    out = ""
    for p in pieces:
        text = p.text.strip(" ") or p.text
        out += (text if text.isprintable() else repr(text)[1:-1]) + (" | " if p.ends else "·")
    return out.removesuffix(" | ").removesuffix("·")


def cells(f: Seen, share: float) -> list[str]:
    """A row of the table."""
    places = ", ".join(f"{axis} {a:.4g}..{b:.4g}" for axis, (a, b) in f.positions.items())
    seconds = "" if f.seconds is None else f"{f.seconds:.3g}"
    return [
        f.name,
        f.modality,
        f.source,
        f"{f.count:,}",
        " x ".join(map(str, f.grid)),
        places or "0",
        seconds,
        f"{100 * share:.1f}%",
    ]


HEAD = ["file", "kind", "read as", "tokens", "grid", "positions", "s/token", "padding"]
RIGHT = {3, 6, 7}


def print_table(found: Sequence[Seen | Failed], shares: dict[int, float]) -> None:
    """Columns in a terminal, lines with tabs elsewhere; a source that cannot be read is one line of its own."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    seen = [f for f in found if isinstance(f, Seen)]
    rows = {id(f): cells(f, shares[id(f)]) for f in seen}
    console = Console()
    if not console.is_terminal:
        print("\t".join([*HEAD, "pieces"]))
        for f in found:
            if isinstance(f, Failed):
                print(f"{f.name}\t{f.modality or ''}\terror: {f.reason}")
            else:
                print("\t".join([*rows[id(f)], spelled(f.pieces)]))
        if len(seen) > 1:
            print(batch_line(seen), file=sys.stderr)
        return
    names = [*([f.name] for f in found), *rows.values(), HEAD]
    wide = [max((cell_len(r[i]) for r in names if len(r) > i), default=0) for i in range(len(HEAD))]

    def line(row: Sequence[str]) -> str:
        gaps = [" " * (w - cell_len(c)) for c, w in zip(row, wide, strict=True)]
        return "  ".join(
            g + c if i in RIGHT else c + g for i, (c, g) in enumerate(zip(row, gaps, strict=True))
        )

    def out(text: str, style: str = "") -> None:
        console.print(Text(text.rstrip(), style), soft_wrap=True)

    out(line(HEAD), "bold")
    for f in found:
        if isinstance(f, Failed):
            space = " " * (wide[0] - cell_len(f.name) + 2)
            out(f"{f.name}{space}{f.reason}", "red")
        else:
            out(line(rows[id(f)]))
    for f in seen:
        if f.pieces:
            out(f"\n{f.name}\n  {spelled(f.pieces)}")
    if len(seen) > 1:
        out(f"\n{batch_line(seen)}", "dim")
