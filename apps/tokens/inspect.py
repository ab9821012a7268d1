"""Tokenisation of one source, for `worldtokens tokens`.

The front-ends have untrained weights: number of tokens, positions and padding do not depend on weights or dim.
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

DIM = 48  # divisible by the axes of all sin-cos position embeddings
KINDS = ("text", "image", "audio", "video", "points", "views", "series")
# names of the axes of `pos`, by modality
AXES = {"points": "zyx", "views": ("view", "y", "x"), "series": ("patch", "channel", "")}


@dataclasses.dataclass(frozen=True)
class TextToken:
    """A token of a text: its text, its id, and whether a word ends after it.

    `partial` tokens hold only some bytes of a character; their `text` is these bytes: ``<F0 9F>``.
    """

    text: str
    id: int
    ends_word: bool
    special: bool = False
    partial: bool = False


@dataclasses.dataclass(frozen=True)
class Inspected:
    """A source and its tokens.

    Args:
        name: printable path, or the text in quotes.
        modality: modality of the front-end.
        tokenizer: the front-end.
        raw: result of `read`.
        batch: result of `collate` on this source alone.
        tokens: (1, N, D).
        source: size of the source, e.g. "230 x 100 px".
        grid: number of tokens along each axis; for points, number of patches and points per patch.
        seconds: time from one token to the next; None without a time axis.
        text_tokens: tokens of a text.
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
    text_tokens: tuple[TextToken, ...] = ()

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.tokens.shape[1]

    @property
    def positions(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest coordinate of each axis in use."""
        low, high = self.tokens.pos[0].amin(0).tolist(), self.tokens.pos[0].amax(0).tolist()
        axes = zip(AXES.get(self.modality, "tyx"), low, high, strict=True)
        return {name: (a, b) for name, a, b in axes if name and (a or b)}


@dataclasses.dataclass(frozen=True)
class Failed:
    """A source that cannot be read, and the reason."""

    name: str
    modality: str | None
    reason: str


def inspect_source(
    source: str,
    args: argparse.Namespace,
    kind: str | None = None,
    is_text: bool = False,
    front_ends: dict[str, Tokenizer] | None = None,
) -> Inspected | Failed:
    """Tokenise one file, or one text with `is_text`.

    Args:
        source: a path, or the text itself.
        args: the command's settings.
        kind: modality of the file; None: by its extension.
        is_text: `source` is a text, not a path.
        front_ends: cache of front-ends by modality; new ones are added.

    Raises:
        InputError: a setting is out of range. Errors of the file itself are returned as `Failed`.
    """
    import torch

    from worldtokens.data.files import printable

    path = source
    front_ends = {} if front_ends is None else front_ends
    name = printable(source if not is_text else f'"{source}"' if len(source) <= 40 else f'"{source[:39]}…"')
    try:
        kind = "text" if is_text else kind or kind_of(source)
    except InputError as e:
        return Failed(name, None, str(e))
    if kind not in front_ends and kind != "series":  # the front-end of a table depends on its columns
        front_ends[kind] = front_end(kind, args)
    try:
        tokenizer = front_end(kind, args, source) if kind == "series" else front_ends[kind]
        if kind == "text" and not is_text:
            source = read_text(source)
        raw = text_ids(tokenizer, source) if kind == "text" else tokenizer.read(source)
        batch = tokenizer.collate([raw])
        with torch.no_grad():
            tokens = tokenizer(batch)
    except InputError as e:
        reason = (
            str(e) if is_text else str(e).removeprefix(path).lstrip(":, ")
        )  # the row starts with the name
        return Failed(name, kind, " ".join(reason.split()))
    found = Inspected(
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
        return dataclasses.replace(found, text_tokens=text_tokens(tokenizer, raw.tolist()))
    if kind == "audio":
        return dataclasses.replace(found, seconds=tokenizer.token_seconds)
    if kind == "video" and found.grid[0] > 1:
        times = batch["micros"][0] / 1e6
        return dataclasses.replace(found, seconds=float(times[-1] - times[0]) / (found.grid[0] - 1))
    return found


def kind_of(path: str) -> str:
    """Modality of a file by its extension.

    Raises:
        InputError: the extension is unknown.
    """
    from worldtokens.data.files import modality_of

    if os.path.isdir(path):
        return "views"
    extension = os.path.splitext(path)[1].lower()
    kind = "views" if extension == ".json" else modality_of(path)
    if kind is None:
        raise InputError(f"unknown extension {extension!r}: name the modality with --as {'|'.join(KINDS)}")
    return kind


def front_end(kind: str, args: argparse.Namespace, source: str = "") -> Tokenizer:
    """Front-end of a modality with the command's settings.

    Raises:
        InputError: a setting is out of range, or a table has no valid header.
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
    """Content of a text file.

    Raises:
        InputError: the file cannot be opened, is empty, or is not UTF-8.
    """
    from worldtokens.tokenizers.files import read_bytes

    _, data, _ = read_bytes(path, (os.path.splitext(path)[1][1:].lower(),))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(
            f"{path}: byte 0x{data[e.start]:02X} at {e.start} is not UTF-8; save the file as UTF-8"
        ) from e


def text_ids(tokenizer: Any, text: str) -> Tensor:
    """Token ids of a text, truncated to the context without a warning, since the table shows it."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tokenizer.read(text)


def text_tokens(tokenizer: Any, ids: Sequence[int]) -> tuple[TextToken, ...]:
    """Tokens of a sequence of ids."""
    texts = [tokenizer.decode([i], special=True) for i in ids]
    out = []
    for k, (i, text) in enumerate(zip(ids, texts, strict=True)):
        last = k + 1 == len(ids)
        both = "" if last else tokenizer.decode([i, ids[k + 1]], special=True)
        ends = (
            last
            or texts[k + 1][:1].isspace()
            or (both != text + texts[k + 1] and both.startswith(text + " "))
        )
        raw = tokenizer.token_bytes(i)
        partial = "\ufffd" in text and raw.decode("utf-8", "ignore").encode() != raw
        if partial:
            text = f"<{raw.hex(' ').upper()}>"
        special = not tokenizer.decode([i])
        out.append(TextToken(text, i, ends or special, special, partial))
    return tuple(out)


def _source(kind: str, raw: Tensor, source: str, t: Any) -> str:
    """Size of a source, e.g. "230 x 100 px"."""
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
    cut = f", truncated from {whole:,} tokens" if whole > len(raw) else ""
    return f"{len(source):,} characters{cut}"


def _grid(kind: str, tokens: Tokens, t: Any, raw: Tensor) -> tuple[int, ...]:
    if kind == "points":
        return tokens.shape[1], min(t.neighbours, len(raw))
    sides = tuple(int(v) + 1 for v in tokens.pos[0].amax(0))
    used = {"image": (1, 2), "text": (0,), "audio": (0,) if sides[1] == 1 else (0, 1), "series": (0, 1)}
    return tuple(sides[axis] for axis in used.get(kind, (0, 1, 2)))
