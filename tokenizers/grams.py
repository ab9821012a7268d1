"""Text tokens that know the pieces just before them: hashed n-gram embeddings beside the one of the piece itself.

What an n-gram model has by counting, the trunk gets by looking up: a table of vectors for pairs and triples of pieces,
found by a hash, costs no multiplication. It pays where text is scarce and training short (Huang et al. 2025, "Over-tokenized
Transformer"; Clark et al. 2022, CANINE, for hashing).
"""

from __future__ import annotations

import os
from typing import Literal

import tokenizers
import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tokenizers.text import TextTokenizer

_FACTOR = 1_000_003  # prime, so that neighbouring ids fall far apart


class GramTokenizer(TextTokenizer):
    """A `TextTokenizer` whose tokens also look up the n-grams that end with them.

    Reading is causal in itself: a token depends on its own id and on up to `grams` - 1 ids before it in the same text or
    window, never on later ones.

    Args:
        vocabulary, dim, context, causal, positions, start, end, pad, cleaning: as in `TextTokenizer`.
        grams: the longest n-gram, 2 or more.
        buckets: vectors in each of the `grams` - 1 tables; n-grams with one hash share one.
        width: of those vectors; one linear map without bias brings them to `dim`.
    """

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer | str | os.PathLike,
        dim: int = 512,
        context: int | None = 77,
        causal: bool = True,
        positions: Literal["learned", "none"] = "learned",
        start: str | None = None,
        end: str | None = None,
        pad: str | None = None,
        cleaning: Literal["clip", "whitespace", "canonicalize"] | None = None,
        grams: int = 3,
        buckets: int = 32768,
        width: int = 64,
    ) -> None:
        super().__init__(vocabulary, dim, context, causal, positions, start, end, pad, cleaning)
        if grams < 2 or buckets < 2 or width < 1:
            raise InputError(
                f"grams={grams}, buckets={buckets}, width={width}: expected 2, 2 and 1 at the least"
            )
        self.reach, self.buckets = grams, buckets
        self.tables = nn.ModuleList(nn.Embedding(buckets, width) for _ in range(grams - 1))
        self.lift = nn.Linear(width * (grams - 1), dim, bias=False)
        for table in self.tables:
            nn.init.zeros_(table.weight)  # what was never met adds nothing, then and later
        nn.init.normal_(self.lift.weight, std=(width * (grams - 1)) ** -0.5)

    def embed(self, ids: Tensor, offset: int | Tensor = 0) -> Tensor:
        """As `TextTokenizer.embed`; `ids` must begin with the `reach` - 1 ids before those that are wanted."""
        place = offset
        if not isinstance(offset, Tensor):
            place = torch.arange(offset, offset + ids.shape[1], device=ids.device).expand_as(ids)
        if ids.shape[1] < self.reach and ids.device.type == "cpu" and bool((place[:, :1] > 0).any()):
            raise InputError(
                f"{ids.shape[1]} ids of the middle of a text, and a token here is made of {self.reach}: give those before too"
            )
        x = super().embed(ids.clamp(min=0), offset if not isinstance(offset, Tensor) else offset.clamp(min=0))
        key, found = ids, []
        for k, table in enumerate(self.tables, 1):
            before = torch.zeros_like(ids)
            before[:, k:] = ids[:, :-k] + 1
            key = key * _FACTOR + before.masked_fill(place < k, 0)
            found.append(table(_mixed(key) % self.buckets))
        return x + self.lift(torch.cat(found, -1))


def _mixed(key: Tensor) -> Tensor:
    """Whole numbers with their high bits brought down, so that a remainder depends on all of them; 0 or more."""
    key = key ^ (key >> 17)
    key = key * 0x5851F42D4C957F2D
    return (key ^ (key >> 32)) & 0x7FFFFFFF
