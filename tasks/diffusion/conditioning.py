"""Conditioning of image generators: tokens of the source columns, or one learned null embedding in their place.

Shapes: B rows, K tokens of a condition, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.layout import Layout
from worldtokens.tasks.seq2seq.context import concat_tokens
from worldtokens.tokenizers.base import Tokenizer
from worldtokens.tokens import Tokens


def null_tokens(null: Tensor, mask: Sequence[bool]) -> Tokens:
    """The null embedding (1, 1, D) as tokens (B, 1, D), valid in the rows where `mask` is True."""
    valid = torch.tensor(mask, device=null.device).view(-1, 1)
    layout = Layout.simple(map(int, mask), "bidirectional")
    return Tokens(null.expand(len(mask), 1, -1), valid=valid, layout=layout)


def fill_nulls(context: Tokens, null: Tensor, dropped: Sequence[bool] | None = None) -> Tokens:
    """Replaces empty and dropped conditions by the null embedding.

    Args:
        context: (B, K, D), one sample per row, padded on the right.
        null: (1, 1, D).
        dropped: for each row, whether its condition is dropped.
    """
    context = context.infer_layout() if context.layout is None else context
    lengths = [sum(row) for row in context.layout.lengths]
    if dropped is not None:
        lengths = [0 if drop else n for n, drop in zip(lengths, dropped, strict=True)]
    if all(lengths):
        return context
    valid = torch.arange(context.shape[1]) < torch.tensor(lengths)[:, None]
    layout = Layout.simple(lengths, context.layout.order)
    remaining = context.replace(valid=valid.to(context.device), layout=layout)
    return concat_tokens([remaining, null_tokens(null, [n == 0 for n in lengths])])


def read_conditions(
    conditions: Sequence[Any] | Mapping[str, Sequence[Any]] | int | str, tokenizers: Mapping[str, Tokenizer]
) -> list[dict[str, Any]]:
    """Reads the conditions of a sampling call into rows of raw tensors, an empty row for no condition.

    Args:
        conditions: a list for the one source column, with None for no condition; lists by column; or a number of rows
            without condition.
        tokenizers: tokenizers of the source columns.

    Raises:
        InputError: a condition cannot be read, or columns are unknown or differ in length.
    """
    columns = list(tokenizers)
    if isinstance(conditions, int):
        return [{} for _ in range(conditions)]
    if isinstance(conditions, str | bytes):
        conditions = [conditions]
    if not isinstance(conditions, Mapping):
        if len(columns) != 1:
            raise InputError(
                f"this model has the source columns {columns}: give lists by column, or a number of images"
            )
        conditions = {columns[0]: conditions}
    if extra := set(conditions) - set(columns):
        raise InputError(f"unknown source columns {sorted(extra)}, this model has {columns}")
    if len({len(v) for v in conditions.values()}) > 1:
        counts = {c: len(v) for c, v in conditions.items()}
        raise InputError(f"columns of unequal length: {counts}; give None where an image lacks a condition")
    return [
        {c: tokenizers[c].read(v) for c, v in zip(conditions, row, strict=True) if v is not None}
        for row in zip(*conditions.values(), strict=True)
    ]
