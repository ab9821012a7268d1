"""Text for encoders of BERT's kind: one text or two in a row of ids, each part with its own learned vector.

Which part an id belongs to is told by the end tokens before it, so ids alone say everything and `collate` needs no
second list.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch
from worldtokens.tokenizers.text.tokenizer import TextTokenizer


class PairTokenizer(TextTokenizer):
    """Text, or two texts that are read together, as BERT (Devlin et al. 2018) and RoBERTa (Liu et al. 2019) take them.

    `read` takes a str, or a tuple of two: ``[CLS] first [SEP] second [SEP]``, with two end tokens between them under
    ``pair="roberta"``. All are read together, not left to right.

    Args:
        vocabulary, dim, start, end, pad: as in `TextTokenizer`.
        context: the most ids that a text or a pair may have; of a pair that is too long the longer text is cut.
        places: rows of the table of positions, `context` or more. None: `context`.
        types: rows of the table of parts, 0 for none.
        pair: ``"bert"``: the second text has the second row of that table; ``"roberta"``: all have the first.
        rows: ids that have an embedding. None: as many as the vocabulary; a published model may have more.

    Raises:
        InputError: a setting is out of range, or as `TextTokenizer` says.
    """

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer | str | os.PathLike,
        dim: int,
        context: int = 512,
        places: int | None = None,
        start: str | None = None,
        end: str | None = None,
        pad: str | None = None,
        types: int = 2,
        pair: Literal["bert", "roberta"] = "bert",
        rows: int | None = None,
    ) -> None:
        super().__init__(vocabulary, dim, context, causal=False, start=start, end=end, pad=pad)
        places = context if places is None else places
        if places < context:
            raise InputError(f"places={places} are too few for texts of context={context} ids")
        if pair not in ("bert", "roberta"):
            raise InputError(f"pair is {pair!r}, expected 'bert' or 'roberta'")
        if rows is not None and rows < self.vocab_size:
            raise InputError(f"rows={rows}, but the vocabulary has {self.vocab_size} tokens")
        self.pair, self.padded = pair, pad is not None
        if rows is not None and rows > self.vocab_size:
            self.vocab_size = rows
            self.embedding = nn.Embedding(rows, dim)
            nn.init.normal_(self.embedding.weight, std=0.02)
        if places > context:
            self.position = nn.Parameter(torch.empty(places, dim))
            nn.init.normal_(self.position, std=0.01)
        self.types = nn.Embedding(types, dim) if types else None
        if self.types is not None:
            nn.init.normal_(self.types.weight, std=0.02)

    def read(self, source: str | tuple[str, str], *, special: bool = False, end: bool = True) -> Tensor:
        """One text, or a tuple of two -> ids (N,) int64; see `TextTokenizer.read`."""
        return super().read(source, special=special, end=end)

    def embed(self, ids: Tensor, offset: int = 0) -> Tensor:
        x = super().embed(ids, offset)
        if self.types is None:
            return x
        if self.pair == "roberta" or self.end_id is None:
            return x + self.types.weight[0]
        ends = (ids == self.end_id).long()
        part = (ends.cumsum(1) - ends).clamp(max=self.types.num_embeddings - 1)
        return x + self.types(part)

    def _flat(
        self, texts: Sequence[Any], context: int | None, special: bool, end: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(texts, str | bytes) or not any(isinstance(t, tuple) for t in texts):
            return super()._flat(texts, context, special, end)
        rows = [
            self._pair(t, context, special, i)
            if isinstance(t, tuple)
            else super(PairTokenizer, self)._flat([t], context, special, end)[0].tolist()
            for i, t in enumerate(texts)
        ]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum()), lengths

    def _pair(self, texts: tuple[str, str], context: int | None, special: bool, place: int) -> list[int]:
        if len(texts) != 2 or not all(isinstance(t, str) for t in texts):
            raise InputError(f"text {place} of the batch is {texts!r:.80}, expected a str or a tuple of two")
        if self.end_id is None:
            raise InputError(
                "two texts are told apart by the end token, and this vocabulary has none: give end="
            )
        parts = [self._marked(t) for t in texts] if special else self._plain(list(texts))
        between = [self.end_id] * (2 if self.pair == "roberta" else 1)
        head = [self.start_id] if self.start_id is not None else []
        limit = self.context if context is None else context
        room = limit - len(head) - len(between) - 1
        if room < 2:
            raise InputError(f"context={limit} leaves no room for two texts")
        total = sum(map(len, parts))
        if total > room:
            self._tell(total + limit - room, limit)
            parts = _cut(parts, room)
        return [*head, *parts[0], *between, *parts[1], self.end_id]

    def _padded(self, ids: Tensor) -> Batch:
        batch = super()._padded(ids)
        if not ids.shape[1]:
            return batch
        # a row goes on to its last end token; where the vocabulary has none, to the last id that is not padding
        if self.end_id is not None:
            real = batch["ids"].cpu() == self.end_id
        elif self.padded:
            real = batch["ids"].cpu() != self.pad_id
        else:
            return batch
        behind = real.int().flip(1).argmax(1).masked_fill(~real.any(1), ids.shape[1])
        batch["lengths"] = tuple((ids.shape[1] - behind).tolist())
        return batch


def _cut(parts: list[list[int]], room: int) -> list[list[int]]:
    """The longer one is shortened first, then both, to `room` ids: as `tokenizers`' longest_first does."""
    short, long = sorted(map(len, parts))
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    sizes = (short, long) if len(parts[0]) <= len(parts[1]) else (long, short)
    return [p[:n] for p, n in zip(parts, sizes, strict=True)]
