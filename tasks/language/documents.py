"""Documents of any length -> rows of a language model: long ones are split into windows, short ones are packed.

Every token of a document except the first is predicted exactly once, wherever it is split: labels are the inputs shifted
by one, so the last input of a window predicts the first token of the next.

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
    """Inputs (n,) of one window and their next tokens (n,), IGNORE where no loss is taken."""

    ids: Tensor
    labels: Tensor


def split_windows(
    ids: Tensor, context: int | None, overlap: int = 0, first: int | None = None
) -> list[Window]:
    """Split a document into windows.

    Args:
        ids: (n,) int64, including start and end token if there are any.
        context: the most inputs of a window; None: one window.
        overlap: inputs that a window repeats from the previous one as context, without loss.
        first: inputs of the first window, 1 to `context`. Training draws it, so that windows differ between epochs.

    Returns:
        Windows; none for a document of fewer than two tokens.

    Raises:
        ValueError: `overlap` is not below `context`.
    """
    total = len(ids) - 1
    if total < 1:
        return []
    if context is None or total <= context:
        return [Window(ids[:-1], ids[1:])]
    if not 0 <= overlap < context:
        raise ValueError(f"overlap={overlap}, expected 0 to below context={context}")
    windows, done = [], 0  # targets 1..done are predicted
    end = first or context
    while done < total:
        start = max(0, end - context) if done and overlap else done
        labels = ids[start + 1 : end + 1]
        if start < done:
            labels = labels.clone()
            labels[: done - start] = IGNORE
        windows.append(Window(ids[start:end], labels))
        done, end = end, min(total, end + context - overlap)
    return windows


def pack_windows(windows: Sequence[Window], max_len: int | None, pad: int = 0) -> Batch:
    """Pack windows into rows of at most `max_len` tokens, by first-fit decreasing.

    Args:
        windows: windows of 1 to `max_len` tokens.
        max_len: the most tokens of a row; None: the length of the longest window.
        pad: the padding id.

    Returns:
        `ids` and `labels` (R, N) int64, `positions` (R, N) int64 of a token in its window, `segment` (R, N) int32 of the
        window in its row, and `lengths`, the windows' lengths for each row. A front-end reads it as it reads its own.
    """
    max_len = max_len or max(len(p.ids) for p in windows)
    rows, room = [], []
    for window in sorted(windows, key=lambda p: -len(p.ids)):
        n = len(window.ids)
        row = next((r for r, left in enumerate(room) if left >= n), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(max_len)
        rows[row].append(window)
        room[row] -= n
    width = max_len - min(room)
    shape = len(rows), width
    ids, labels = torch.full(shape, pad), torch.full(shape, IGNORE)
    positions, segment = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int32)
    for r, row in enumerate(rows):
        at = 0
        for k, window in enumerate(row):
            end = at + len(window.ids)
            ids[r, at:end], labels[r, at:end] = window.ids, window.labels
            positions[r, at:end], segment[r, at:end] = torch.arange(end - at), k
            at = end
    lengths = tuple(tuple(len(p.ids) for p in row) for row in rows)
    return Batch(ids=ids, labels=labels, positions=positions, segment=segment, lengths=lengths)
