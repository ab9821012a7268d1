"""Rows of ids: truncation to the context, right padding, and the lengths of rows that were padded elsewhere.

Ids of a batch are kept as one flat array and the length of each row, so that no list per text is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from worldtokens.errors import InputError


def flatten(rows: Sequence[Sequence[int] | Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids -> all ids as one int64 array, and the length of each row."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    tensors = [r for r in rows if isinstance(r, Tensor)]
    if tensors and len(tensors) == len(rows):
        return torch.cat(tensors).numpy(), lengths
    return np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum()), lengths


def truncate(
    flat: np.ndarray, lengths: np.ndarray, limit: int, end_id: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Cut every row to `limit` ids; the last id of a cut row becomes `end_id` unless that is None."""
    starts = np.cumsum(lengths) - lengths
    index = np.arange(len(flat)) - np.repeat(starts, lengths)
    if end_id is not None:
        flat[starts[lengths > limit] + limit - 1] = end_id
    return flat[index < limit], np.minimum(lengths, limit)


def pad(flat: np.ndarray, lengths: np.ndarray, width: int, pad_id: int) -> Tensor:
    """Flat ids and B lengths -> (B, width) int64, padded on the right."""
    ids = np.full((len(lengths), width), pad_id, np.int64)
    ids[np.arange(width) < lengths[:, None]] = flat
    return torch.from_numpy(ids)


def check_ids(low: int, high: int, vocab_size: int) -> None:
    """Raise if ids from `low` to `high` are outside the vocabulary.

    Raises:
        InputError: names the range of the ids and the size of the vocabulary.
    """
    if not 0 <= low <= high < vocab_size:
        raise InputError(
            f"ids run from {low} to {high}, the vocabulary has {vocab_size} tokens: do they come from another tokenizer?"
        )


def padded_lengths(ids: Tensor, end_id: int) -> tuple[int, ...]:
    """Length of each row of (B, N) ids, up to and including its first end token.

    The end token is found by equality: its id need not be the largest, so argmax over ids would be wrong for
    vocabularies with tokens added later.

    Raises:
        InputError: a row has no end token.
    """
    ends = ids == end_id
    found = ends.any(1)
    if not bool(found.all()):
        raise InputError(
            f"row {int((~found).nonzero()[0])} of the ids has no end token ({end_id}): truncated texts keep it as "
            "their last id; give ids from read() and collate()"
        )
    # argmax of 0/1 is the index of the first 1
    return tuple((ends.int().argmax(1) + 1).tolist())
