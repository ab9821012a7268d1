"""A source through its front-end: what `worldtokens tokens` tells of it and draws.

The front-ends are the real ones with untrained weights: how many tokens, where they stand and what a batch of them
wastes does not depend on the weights nor on the width.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from worldtokens.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from worldtokens.tokenizers.base import Batch, Tokenizer
    from worldtokens.tokens import Tokens

DIM = 48  # width of the tokens; shares evenly over the axes of all sin-cos positions
KINDS = ("text", "image", "audio", "video", "points", "views", "series")
# what an axis of `pos` is called, by kind
AXES = {"points": "zyx", "views": ("view", "y", "x"), "series": ("patch", "channel", "")}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a text: what it spells, its id, and whether a word ends behind it.

    `part` says that it holds a part of a character, so that `text` are its bytes: ``<F0 9F>``.
    """

    text: str
    id: int
    ends: bool
    special: bool = False
    part: bool = False


@dataclasses.dataclass(frozen=True)
class Seen:
    """A source and what it became.

    Args:
        name: as a person knows it.
        modality: which front-end took it.
        tokenizer: that front-end.
        raw: what `read` gave.
        batch: what `collate` made of it alone.
        tokens: (1, N, D).
        source: what was read, in words.
        grid: tokens along each axis, or patches and the points of each.
        seconds: from one token to the next in time, where there is time.
        pieces: of a text.
    """

    name: str
    modality: str
    tokenizer: Tokenizer
    raw: Tensor
    batch: Batch
    tokens: Tokens
    source: str
    grid: tuple[int, ...]
    seconds: float | None = None
    pieces: tuple[Piece, ...] = ()

    @property
    def count(self) -> int:
        return self.tokens.shape[1]

    @property
    def positions(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest coordinate of each axis that is used."""
        low, high = self.tokens.pos[0].amin(0).tolist(), self.tokens.pos[0].amax(0).tolist()
        axes = zip(AXES.get(self.modality, "tyx"), low, high, strict=True)
        return {name: (a, b) for name, a, b in axes if name and (a or b)}


@dataclasses.dataclass(frozen=True)
class Failed:
    """A source that cannot be read, and why."""

    name: str
    modality: str | None
    reason: str


def look(
    source: str,
    args: argparse.Namespace,
    kind: str | None = None,
    given: bool = False,
    made: dict[str, Tokenizer] | None = None,
) -> Seen | Failed:
    """One file, or with `given` one text, through its front-end.

    Args:
        source: a path, or the text itself.
        args: the command's settings.
        kind: what the file is; None: told by its ending.
        given: `source` is a text.
        made: front-ends that were built already, by kind; new ones are added.

    Raises:
        InputError: a setting is out of its range. What is wrong with the file itself is in the `Failed`.
    """
    import torch

    from worldtokens.data.files import printable

    path = source
    made = {} if made is None else made
    name = printable(source if not given else f'"{source}"' if len(source) <= 40 else f'"{source[:39]}…"')
    try:
        kind = "text" if given else kind or kind_of(source)
    except InputError as e:
        return Failed(name, None, str(e))
    if kind not in made and kind != "series":  # a table's columns make its front-end
        made[kind] = front_end(kind, args)
    try:
        tokenizer = front_end(kind, args, source) if kind == "series" else made[kind]
        if kind == "text" and not given:
            source = read_text(source)
        raw = text_ids(tokenizer, source) if kind == "text" else tokenizer.read(source)
        batch = tokenizer.collate([raw])
        with torch.no_grad():
            tokens = tokenizer(batch)
    except InputError as e:
        reason = str(e) if given else str(e).removeprefix(path).lstrip(":, ")  # the row begins with the name
        return Failed(name, kind, " ".join(reason.split()))
    seen = Seen(
        name,
        kind,
        tokenizer,
        raw,
        batch,
        tokens,
        _source(kind, raw, source, tokenizer),
        _grid(kind, tokens, tokenizer, raw),
    )
    if kind == "text":
        return dataclasses.replace(seen, pieces=pieces_of(tokenizer, raw.tolist()))
    if kind == "audio":
        return dataclasses.replace(seen, seconds=tokenizer.token_seconds)
    if kind == "video" and seen.grid[0] > 1:
        times = batch["micros"][0] / 1e6
        return dataclasses.replace(seen, seconds=float(times[-1] - times[0]) / (seen.grid[0] - 1))
    return seen


def kind_of(path: str) -> str:
    """Which front-end a file is for, told by its ending.

    Raises:
        InputError: the ending is not known.
    """
    from worldtokens.data.files import modality_of

    if os.path.isdir(path):
        return "views"
    ending = os.path.splitext(path)[1].lower()
    kind = "views" if ending == ".json" else modality_of(path)
    if kind is None:
        raise InputError(f"the ending {ending!r} is not known; say what it is with --as {'|'.join(KINDS)}")
    return kind


def front_end(kind: str, args: argparse.Namespace, source: str = "") -> Tokenizer:
    """The front-end of a kind with the command's settings.

    Raises:
        InputError: a setting is out of its range; for a table also what its first line lacks.
    """
    import worldtokens as wt

    size = None if args.size == "native" else int(args.size)
    if kind == "image":
        return wt.ImageTokenizer(DIM, args.patch, size, positions="sincos")
    if kind == "audio":
        return wt.AudioTokenizer(DIM, args.preset, positions="sincos", config={"conv_dim": DIM})
    if kind == "video":
        tubelet = (2, args.patch, args.patch)
        return wt.VideoTokenizer(DIM, tubelet, args.frames, args.fps, size=size, positions="sincos")
    if kind == "points":
        return wt.PointTokenizer(DIM, hidden=(DIM, DIM, DIM))
    if kind == "views":
        return wt.ViewTokenizer(DIM, args.patch, 224 if size is None else size)
    if kind == "series":
        from worldtokens.tokenizers.series.read import read_series

        _, names = read_series(source, time=args.time)
        return wt.SeriesTokenizer(DIM, len(names), time=args.time)
    if args.vocabulary:
        return wt.TextTokenizer.from_file(args.vocabulary, DIM, 77)
    return wt.TextTokenizer.clip(DIM)


def read_text(path: str) -> str:
    """What is written in a file.

    Raises:
        InputError: it cannot be opened, is empty, or is not UTF-8.
    """
    from worldtokens.tokenizers.files import read_bytes

    _, data, _ = read_bytes(path, (os.path.splitext(path)[1][1:].lower(),))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(
            f"{path}: holds byte 0x{data[e.start]:02X} at {e.start}, which is not UTF-8; save it as UTF-8"
        ) from e


def text_ids(tokenizer: Any, text: str) -> Tensor:
    """A text's ids, cut to the context without the warning: the table tells."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tokenizer.read(text)


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> tuple[Piece, ...]:
    """Ids -> their pieces."""
    texts = [tokenizer.decode([i], special=True) for i in ids]
    out = []
    for at, (i, text) in enumerate(zip(ids, texts, strict=True)):
        last = at + 1 == len(ids)
        both = "" if last else tokenizer.decode([i, ids[at + 1]], special=True)
        ends = (
            last
            or texts[at + 1][:1].isspace()
            or (both != text + texts[at + 1] and both.startswith(text + " "))
        )
        raw = tokenizer.token_bytes(i)
        part = "\ufffd" in text and raw.decode("utf-8", "ignore").encode() != raw
        if part:
            text = f"<{raw.hex(' ').upper()}>"
        special = not tokenizer.decode([i])
        out.append(Piece(text, i, ends or special, special, part))
    return tuple(out)


def _source(kind: str, raw: Tensor, source: str, t: Any) -> str:
    if kind == "image":
        return f"{raw.shape[2]} x {raw.shape[1]} px"
    if kind == "audio":
        return f"{len(raw) / t.sample_rate:.2f} s at {t.sample_rate / 1000:g} kHz"
    if kind == "video":
        return f"{len(raw)} frames {raw.shape[3]} x {raw.shape[2]}"
    if kind == "points":
        return f"{len(raw):,} points"
    if kind == "views":
        return f"{len(raw)} view{'s' * (len(raw) != 1)} {t.size[1]} x {t.size[0]}"
    if kind == "series":
        return f"{raw.shape[1]:,} steps of {len(raw)}"
    whole = len(t.encode_batch([source], context=4 * len(source) + 8)[0])
    cut = f", cut from {whole:,} pieces" if whole > len(raw) else ""
    return f"{len(source):,} characters{cut}"


def _grid(kind: str, tokens: Tokens, t: Any, raw: Tensor) -> tuple[int, ...]:
    if kind == "points":
        return tokens.shape[1], min(t.neighbours, len(raw))
    sides = tuple(int(v) + 1 for v in tokens.pos[0].amax(0))
    used = {"image": (1, 2), "text": (0,), "audio": (0,) if sides[1] == 1 else (0, 1), "series": (0, 1)}
    return tuple(sides[axis] for axis in used.get(kind, (0, 1, 2)))
