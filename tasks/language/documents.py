"""Documents of any length -> rows of a language model: long ones cut in windows, short ones packed side by side.

Every token but a document's first is predicted once, whatever the cuts: a window's inputs are its tokens, its labels the
same moved by one, so that the last input of one window predicts the first token of the next.

Shapes: R rows, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worldtokens.tasks.language.loss import IGNORE
from worldtokens.tokenizers.base import Batch


class Window(NamedTuple):
    """Inputs (n,) of one window and what follows each of them (n,), IGNORE where it is not to be predicted."""

    ids: Tensor
    labels: Tensor


def split_windows(
    ids: Tensor, context: int | None, overlap: int = 0, first: int | None = None
) -> list[Window]:
    """A document -> its windows.

    Args:
        ids: (n,) int64, start and end token included where there are any.
        context: the most inputs of a window; None: one window.
        overlap: inputs that a window repeats from the one before, to be read and not predicted again.
        first: inputs of the first window, 1 to `context`. Training draws it, so that cuts fall elsewhere in every epoch.

    Returns:
        Windows, none for a document of one token or fewer.
    """
    total = len(ids) - 1
    if total < 1:
        return []
    if context is None or total <= context:
        return [Window(ids[:-1], ids[1:])]
    if not 0 <= overlap < context:
        raise ValueError(f"overlap={overlap}, expected 0 to below context={context}")
    pieces, done = [], 0  # targets 1..done are predicted
    end = first or context
    while done < total:
        start = max(0, end - context) if done and overlap else done
        labels = ids[start + 1 : end + 1]
        if start < done:
            labels = labels.clone()
            labels[: done - start] = IGNORE
        pieces.append(Window(ids[start:end], labels))
        done, end = end, min(total, end + context - overlap)
    return pieces


def pack_windows(pieces: Sequence[Window], max_len: int | None, pad: int = 0) -> Batch:
    """Windows -> few rows of at most `max_len` tokens, the longest first, each where it fits first.

    Args:
        pieces: of one token or more each, none longer than `max_len`.
        max_len: None: as long as the longest window.
        pad: the id that fills rows up.

    Returns:
        `ids` and `labels` (R, N) int64, `positions` (R, N) int64 of a token in its window, `segment` (R, N) int32 of the
        window in its row, and `lengths`, the windows' lengths for each row. A front-end reads it as it reads its own.
    """
    max_len = max_len or max(len(p.ids) for p in pieces)
    rows, room = [], []
    for piece in sorted(pieces, key=lambda p: -len(p.ids)):
        n = len(piece.ids)
        row = next((r for r, left in enumerate(room) if left >= n), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(max_len)
        rows[row].append(piece)
        room[row] -= n
    width = max_len - min(room)
    shape = len(rows), width
    ids, labels = torch.full(shape, pad), torch.full(shape, IGNORE)
    positions, segment = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int32)
    for r, held in enumerate(rows):
        at = 0
        for k, piece in enumerate(held):
            end = at + len(piece.ids)
            ids[r, at:end], labels[r, at:end] = piece.ids, piece.labels
            positions[r, at:end], segment[r, at:end] = torch.arange(end - at), k
            at = end
    lengths = tuple(tuple(len(p.ids) for p in held) for held in rows)
    return Batch(ids=ids, labels=labels, positions=positions, segment=segment, lengths=lengths)
