"""What a model that draws is told: tokens of the columns that are read, or one learned null in their place.

Shapes: B rows, K tokens of a condition, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.layout import Layout
from worldtokens.tasks.seq2seq.model import beside
from worldtokens.tokenizers.base import Tokenizer
from worldtokens.tokens import Tokens


def nulls(null: Tensor, where: Sequence[bool]) -> Tokens:
    """The null (1, 1, D) in the rows where it is wanted, nothing in the others: (B, 1, D)."""
    valid = torch.tensor(where, device=null.device).view(-1, 1)
    layout = Layout.simple(map(int, where), "bidirectional")
    return Tokens(null.expand(len(where), 1, -1), valid=valid, layout=layout)


def with_nulls(context: Tokens, null: Tensor, dropped: Sequence[bool] | None = None) -> Tokens:
    """A condition with the null in the rows that have none, or are to lose it.

    Args:
        context: (B, K, D), one sample a row, padded on the right.
        null: (1, 1, D).
        dropped: for each row whether its condition is taken away.
    """
    context = context.infer_layout() if context.layout is None else context
    lengths = [sum(row) for row in context.layout.lengths]
    if dropped is not None:
        lengths = [0 if gone else n for n, gone in zip(lengths, dropped, strict=True)]
    if all(lengths):
        return context
    valid = torch.arange(context.shape[1]) < torch.tensor(lengths)[:, None]
    left = Layout.simple(lengths, context.layout.order)
    kept = context.replace(valid=valid.to(context.device), layout=left)
    return beside([kept, nulls(null, [n == 0 for n in lengths])])


def asked(
    given: Sequence[Any] | Mapping[str, Sequence[Any]] | int | str, tokenizers: Mapping[str, Tokenizer]
) -> list[dict[str, Any]]:
    """What a person asks for -> rows of raw tensors, an empty one for no condition.

    Args:
        given: a list for the one column that is read, with None for no condition; lists by column; or a number of rows
            without condition.
        tokenizers: the front-ends of the columns that are read.

    Raises:
        InputError: a condition cannot be read, or columns that are not there or differ in length.
    """
    columns = list(tokenizers)
    if isinstance(given, int):
        return [{} for _ in range(given)]
    if isinstance(given, str | bytes):
        given = [given]
    if not isinstance(given, Mapping):
        if len(columns) != 1:
            raise InputError(
                f"this model reads {columns or 'no condition'}: give lists by column, or how many images"
            )
        given = {columns[0]: given}
    if extra := set(given) - set(columns):
        raise InputError(f"asked by {sorted(extra)}, this model reads {columns}")
    if len({len(v) for v in given.values()}) > 1:
        counts = {c: len(v) for c, v in given.items()}
        raise InputError(f"columns of unequal length: {counts}; give None where an image lacks one")
    return [
        {c: tokenizers[c].read(v) for c, v in zip(given, row, strict=True) if v is not None}
        for row in zip(*given.values(), strict=True)
    ]
