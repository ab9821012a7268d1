"""Fewer tokens, as an option of any front-end: drop some at random, or merge those that are alike.

kept, dropped = mask_tokens(tokens, keep=0.25)
whole = dropped.put_back(trunk(kept), fill=mask_token)

fewer, merge = merge_tokens(tokens, keep=0.5)
whole = merge.unmerge(trunk(fewer))

front_end = TokenReducer(ImageTokenizer(384), keep=0.5)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.reduce.masking import Dropped, check_share, mask_tokens
from worldtokens.tokenizers.reduce.merging import Merge, merge_tokens
from worldtokens.tokens import Tokens

__all__ = ["Dropped", "Merge", "TokenReducer", "mask_tokens", "merge_tokens"]


class TokenReducer(Tokenizer):
    """A front-end whose tokens are made fewer: ``wt.TokenReducer(wt.ImageTokenizer(384), keep=0.5)``.

    Dropping at random happens in training mode only, as in FLIP; merging always.

    Args:
        tokenizer: any front-end.
        keep: share of each sample's tokens to keep, above 0 and at most 1.
        how: ``"random"`` (`mask_tokens`) or ``"merge"`` (`merge_tokens`).
        protect: the first so many tokens of each sample are never touched. None: the class token of a
            front-end that has one.
    """

    def __init__(
        self, tokenizer: Tokenizer, keep: float = 0.5, how: str = "random", protect: int | None = None
    ) -> None:
        super().__init__()
        if not isinstance(tokenizer, Tokenizer):
            raise InputError(
                f"tokenizer is a {type(tokenizer).__name__}, expected a front-end: wt.TokenReducer(front_end)"
            )
        if how not in ("random", "merge"):
            raise InputError(f"how is {how!r}, expected 'random' or 'merge'")
        if protect is None:
            protect = getattr(tokenizer, "prefix", 0)
        check_share(keep, protect)
        self.tokenizer, self.keep, self.how, self.protect = tokenizer, keep, how, protect
        self.modality, self.dim = tokenizer.modality, tokenizer.dim
        # what decides how tokens are pooled
        self.prefix, self.causal = getattr(tokenizer, "prefix", 0), getattr(tokenizer, "causal", False)

    @property
    def class_token(self) -> Tensor | None:
        """The front-end's own, where it has one."""
        return getattr(self.tokenizer, "class_token", None)

    def read(self, source) -> Tensor:
        """As the front-end reads."""
        return self.tokenizer.read(source)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """As the front-end collates."""
        return self.tokenizer.collate(raws)

    def forward(self, batch: Batch) -> Tokens:
        """A batch on the device -> fewer tokens, (B, M, dim)."""
        tokens = self.tokenizer(batch)
        if self.how == "random" and not self.training:
            return tokens
        return self.reduce(tokens)[0]

    def reduce(
        self, tokens: Tokens, generator: torch.Generator | None = None
    ) -> tuple[Tokens, Dropped | Merge]:
        """Drop or merge in any mode, and hand over what undoes it: for masked autoencoders."""
        if self.how == "random":
            return mask_tokens(tokens, self.keep, generator, self.protect)
        return merge_tokens(tokens, keep=self.keep, protect=self.protect, one_modality=True)
