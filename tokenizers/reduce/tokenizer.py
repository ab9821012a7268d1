"""Token reduction for any front-end: random masking, or merging of similar tokens.

kept, mask = mask_tokens(tokens, keep=0.25)
whole = mask.unmask(trunk(kept), fill=mask_token)

merged, merge = merge_tokens(tokens, keep=0.5)
whole = merge.unmerge(trunk(merged))

front_end = TokenReducer(ImageTokenizer(384), keep=0.5)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.reduce.masking import TokenMask, check_ratio, mask_tokens
from worldtokens.tokenizers.reduce.merging import TokenMerge, merge_tokens
from worldtokens.tokens import Tokens

__all__ = ["TokenMask", "TokenMerge", "TokenReducer", "mask_tokens", "merge_tokens"]


class TokenReducer(Tokenizer):
    """A front-end with fewer tokens: ``wt.TokenReducer(wt.ImageTokenizer(384), keep=0.5)``.

    Random masking is active in training mode only, as in FLIP; merging always.

    Args:
        tokenizer: any front-end.
        keep: ratio of each sample's tokens to keep, above 0 and at most 1.
        method: ``"random"`` (`mask_tokens`) or ``"merge"`` (`merge_tokens`).
        protect: number of leading tokens of each sample that are always kept. None: the front-end's class token and
            registers (its `prefix`).

    Raises:
        InputError: `tokenizer` is no front-end, or a setting is out of its range.
    """

    def __init__(
        self, tokenizer: Tokenizer, keep: float = 0.5, method: str = "random", protect: int | None = None
    ) -> None:
        super().__init__()
        if not isinstance(tokenizer, Tokenizer):
            raise InputError(
                f"tokenizer is a {type(tokenizer).__name__}, expected a front-end: wt.TokenReducer(front_end)"
            )
        if method not in ("random", "merge"):
            raise InputError(f"method is {method!r}, expected 'random' or 'merge'")
        if protect is None:
            protect = getattr(tokenizer, "prefix", 0)
        check_ratio(keep, protect)
        self.tokenizer, self.keep, self.method, self.protect = tokenizer, keep, method, protect
        self.modality, self.dim = tokenizer.modality, tokenizer.dim
        # pooling depends on these
        self.prefix, self.causal = getattr(tokenizer, "prefix", 0), getattr(tokenizer, "causal", False)

    @property
    def class_token(self) -> Tensor | None:
        """The class token of the wrapped front-end, or None."""
        return getattr(self.tokenizer, "class_token", None)

    def read(self, source) -> Tensor:
        """`read` of the wrapped front-end."""
        return self.tokenizer.read(source)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """`collate` of the wrapped front-end."""
        return self.tokenizer.collate(raws)

    def forward(self, batch: Batch) -> Tokens:
        """A batch on the model's device -> the reduced tokens, (B, M, D)."""
        tokens = self.tokenizer(batch)
        if self.method == "random" and not self.training:
            return tokens
        return self.reduce(tokens)[0]

    def reduce(
        self, tokens: Tokens, generator: torch.Generator | None = None
    ) -> tuple[Tokens, TokenMask | TokenMerge]:
        """Mask or merge in train and eval mode; also returns the mask or merge that undoes it, for masked autoencoders."""
        if self.method == "random":
            return mask_tokens(tokens, self.keep, generator, self.protect)
        return merge_tokens(tokens, keep=self.keep, protect=self.protect, one_modality=True)
