"""Text for encoders like BERT: one text or a pair in a row of ids, with token type embeddings.

The token type of an id follows from the number of end tokens before it, so `collate` needs only ids.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch
from worldtokens.tokenizers.text.batching import flatten
from worldtokens.tokenizers.text.tokenizer import TextTokenizer


class PairTokenizer(TextTokenizer):
    """A text or a pair of texts, as in BERT (Devlin et al. 2018) and RoBERTa (Liu et al. 2019).

    `read` takes a str, or a tuple of two: ``[CLS] first [SEP] second [SEP]``, with two end tokens between them under
    ``pair="roberta"``. Attention is bidirectional.

    Args:
        vocabulary, dim, start, end, pad: as in `TextTokenizer`.
        context: maximum number of ids of a text or a pair; of a pair that is too long the longer text is truncated.
        max_positions: rows of `pos_embed`, `context` or more. None: `context`.
        token_types: rows of the token type embedding, 0 for none.
        pair: ``"bert"``: the second text has token type 1; ``"roberta"``: all ids have token type 0.
        num_embeddings: rows of the embedding. None: the size of the vocabulary; a published model may have more.

    Raises:
        InputError: a setting is out of range, or as in `TextTokenizer`.
    """

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer | str | os.PathLike,
        dim: int,
        context: int = 512,
        max_positions: int | None = None,
        start: str | None = None,
        end: str | None = None,
        pad: str | None = None,
        token_types: int = 2,
        pair: Literal["bert", "roberta"] = "bert",
        num_embeddings: int | None = None,
    ) -> None:
        super().__init__(vocabulary, dim, context, causal=False, start=start, end=end, pad=pad)
        max_positions = context if max_positions is None else max_positions
        if max_positions < context:
            raise InputError(f"max_positions={max_positions} is less than context={context}")
        if pair not in ("bert", "roberta"):
            raise InputError(f"pair is {pair!r}, expected 'bert' or 'roberta'")
        if num_embeddings is not None and num_embeddings < self.vocab_size:
            raise InputError(
                f"num_embeddings={num_embeddings}, but the vocabulary has {self.vocab_size} tokens"
            )
        self.pair, self.has_pad = pair, pad is not None
        if num_embeddings is not None and num_embeddings > self.vocab_size:
            self.vocab_size = num_embeddings
            self.embedding = nn.Embedding(num_embeddings, dim)
            nn.init.normal_(self.embedding.weight, std=0.02)
        if max_positions > context:
            self.pos_embed = nn.Parameter(torch.empty(max_positions, dim))
            nn.init.normal_(self.pos_embed, std=0.01)
        self.type_embedding = nn.Embedding(token_types, dim) if token_types else None
        if self.type_embedding is not None:
            nn.init.normal_(self.type_embedding.weight, std=0.02)

    def read(self, source: str | tuple[str, str], *, special: bool = False, end: bool = True) -> Tensor:
        """One text or a tuple of two -> ids (N,) int64; see `TextTokenizer.read`."""
        return super().read(source, special=special, end=end)  # type: ignore[arg-type]

    def embed(self, ids: Tensor, offset: int = 0) -> Tensor:
        x = super().embed(ids, offset)
        if self.type_embedding is None:
            return x
        if self.pair == "roberta" or self.end_id is None:
            return x + self.type_embedding.weight[0]
        ends = (ids == self.end_id).long()
        types = (ends.cumsum(1) - ends).clamp(max=self.type_embedding.num_embeddings - 1)
        return x + self.type_embedding(types)

    def _encode(
        self, texts: Sequence[Any], context: int | None, special: bool, end: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(texts, str | bytes) or not any(isinstance(t, tuple) for t in texts):
            return super()._encode(texts, context, special, end)
        rows = [
            self._encode_pair(t, context, special, i)
            if isinstance(t, tuple)
            else super(PairTokenizer, self)._encode([t], context, special, end)[0].tolist()
            for i, t in enumerate(texts)
        ]
        return flatten(rows)

    def _encode_pair(
        self, texts: tuple[str, str], context: int | None, special: bool, index: int
    ) -> list[int]:
        if len(texts) != 2 or not all(isinstance(t, str) for t in texts):
            raise InputError(f"text {index} of the batch is {texts!r:.80}, expected a str or a tuple of two")
        if self.end_id is None:
            raise InputError("a pair is separated by the end token, and this tokenizer has none: give end=")
        encoder = self.encoder
        parts = [encoder.with_special(t) for t in texts] if special else encoder.plain(list(texts))
        between = [self.end_id] * (2 if self.pair == "roberta" else 1)
        head = [self.start_id] if self.start_id is not None else []
        limit = (self.context or 0) if context is None else context
        room = limit - len(head) - len(between) - 1
        if room < 2:
            raise InputError(f"context={limit} leaves no room for two texts")
        total = sum(map(len, parts))
        if total > room:
            self._warn_truncated(total + limit - room, limit)
            parts = _truncate_pair(parts, room)
        return [*head, *parts[0], *between, *parts[1], self.end_id]

    def _from_padded(self, ids: Tensor) -> Batch:
        batch = super()._from_padded(ids)
        if not ids.shape[1]:
            return batch
        # a row ends at its last end token; without end tokens, at the last id that is not padding
        if self.end_id is not None:
            real = batch["ids"].cpu() == self.end_id
        elif self.has_pad:
            real = batch["ids"].cpu() != self.pad_id
        else:
            return batch
        trailing = real.int().flip(1).argmax(1).masked_fill(~real.any(1), ids.shape[1])
        batch["lengths"] = tuple((ids.shape[1] - trailing).tolist())
        return batch


def _truncate_pair(parts: list[list[int]], room: int) -> list[list[int]]:
    """Truncate the longer text first, then both, to `room` ids, as `tokenizers`' longest_first does."""
    short, long = sorted(map(len, parts))
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    sizes = (short, long) if len(parts[0]) <= len(parts[1]) else (long, short)
    return [p[:n] for p, n in zip(parts, sizes, strict=True)]
