"""Random token masking for any front-end, and its inverse: MAE (He et al. 2022), FLIP (Li et al. 2023).

Notable: the number of kept tokens follows from lengths alone, which `Layout` holds on the CPU. So shapes are static,
and tokens with a layout need no device synchronisation. Padding never affects the result.

Shapes: B rows, N tokens per row before and M after, D width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.layout import Layout
from worldtokens.tokens import Tokens

FIELDS = ("x", "valid", "pos", "segment", "block", "modality", "ids")


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMask:
    """Which tokens `mask_tokens` kept, and the indices to undo it.

    Args:
        indices: (B, M) int64, index of each kept token in its original row; arbitrary at padding.
        restore: (B, N) int64, index of each kept token in the new row (MAE's `ids_restore`); arbitrary for masked ones.
        kept: (B, N) bool, True = kept.
        original: the tokens before masking, without their embeddings (width 0).
    """

    indices: Tensor
    restore: Tensor
    kept: Tensor
    original: Tokens

    @property
    def masked(self) -> Tensor:
        """(B, N) bool, True = a real token that is masked: where a masked autoencoder has its loss."""
        return self.original.valid & ~self.kept

    def unmask(self, tokens: Tokens, fill: Tensor) -> Tokens:
        """Kept tokens at their original indices, `fill` at the masked ones.

        Args:
            tokens: (B, M, D), the kept tokens, with any embeddings and any width.
            fill: (D,) or (B, N, D), the embedding of masked tokens, such as a learned mask token.

        Returns:
            (B, N, D) with all other fields as before masking; zeros at padding.
        """
        x = fill.to(tokens.x.dtype).expand(*self.kept.shape, tokens.dim)
        if tokens.shape[1]:
            back = tokens.x.gather(1, self.restore[..., None].expand(-1, -1, tokens.dim))
            x = torch.where(self.kept[..., None], back, x)
        return self.original.replace(x=x.masked_fill(~self.original.valid[..., None], 0))


def mask_tokens(
    tokens: Tokens,
    keep: float = 0.25,
    generator: torch.Generator | None = None,
    protect: int = 0,
    noise: Tensor | None = None,
) -> tuple[Tokens, TokenMask]:
    """Drop tokens at random, the same ratio in every sample. Kept tokens keep their order and their fields.

    Block numbers are kept too, so causal tokens stay causal, with gaps in the numbers.

    Args:
        tokens: (B, N, D). Without a layout it is inferred first, which synchronises with the device once.
        keep: ratio of a sample's valid tokens to keep, above 0 and at most 1; rounded to the nearest count, at least
            one token per sample.
        generator: random number generator, on any device. Default: torch's own.
        protect: number of leading tokens of each sample that are always kept and not counted (class token, registers).
        noise: (B, N) numbers used in place of random ones: the tokens with the smallest noise are kept.

    Returns:
        The kept tokens (B, M, D), where M is the largest number kept in a row, and the mask that undoes it.

    Raises:
        InputError: `keep`, `protect` or the shape of `noise` is out of range.
    """
    check_ratio(keep, protect)
    b, n, _ = tokens.shape
    if noise is None:
        device = generator.device if generator is not None else tokens.device
        noise = torch.rand(b, n, generator=generator, device=device)
    elif noise.shape != (b, n):
        raise InputError(f"noise is {tuple(noise.shape)}, expected {(b, n)}: one number for each token")
    noise = noise.to(tokens.device)
    original = without_embeddings(tokens)
    tokens, moved = with_layout(tokens)
    noise = noise if moved is None else noise.gather(1, moved)

    def kept_of(count: int) -> int:
        return kept_count(count, keep, protect)

    layout = tokens.layout
    if layout.full(n):
        noise = noise.masked_fill(torch.arange(n, device=noise.device) < protect, -torch.inf)
        indices = noise.argsort(dim=1, stable=True)[:, : kept_of(n)].sort(1).values
        lengths = tuple((kept_of(n),) for _ in range(b))
    else:
        indices, lengths = _kept_indices(noise, layout, kept_of, protect)
    counts = [sum(row) for row in lengths]
    chosen = gather(tokens, indices, prefix_mask(counts, indices.shape[1], indices.device))
    chosen = chosen.replace(layout=Layout(lengths, layout.order, layout.origin))
    # a sum, because padding of the new rows holds indices too
    hits = torch.zeros(b, n, dtype=torch.long, device=tokens.device)
    kept = hits.scatter_add(1, indices, chosen.valid.long()) > 0
    restore = (kept.cumsum(1) - 1).clamp(min=0)
    if moved is not None:
        indices = moved.gather(1, indices)
        kept, restore = kept.scatter(1, moved, kept), restore.scatter(1, moved, restore)
    return chosen, TokenMask(indices, restore, kept, original)


def _kept_indices(
    noise: Tensor, layout: Layout, kept_of: Callable[[int], int], protect: int
) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
    """Packed or padded rows -> (B, M) indices to keep in ascending order, and the new lengths."""
    b, n = noise.shape
    # per token: number of its sample, whether it is protected; per kept token: its index in the sorted row
    sample, first, rank = [], [], []
    for row in layout.lengths:
        at, wanted = 0, []
        for count in row:
            wanted += range(at, at + kept_of(count))
            at += count
        rank.append(wanted)
        sample.append([s for s, count in enumerate(row) for _ in range(count)] + [len(row)] * (n - at))
        first.append([i < protect for count in row for i in range(count)] + [False] * (n - at))
    m = max(map(len, rank), default=0)
    where = torch.tensor([r + [n] * (m - len(r)) for r in rank], dtype=torch.long).view(b, m).to(noise.device)
    noise = noise.masked_fill(torch.tensor(first, dtype=torch.bool).view(b, n).to(noise.device), -torch.inf)
    # sorted by noise and then, stably, by sample: each sample begins with its smallest noise, at an index known here
    by_noise = noise.argsort(dim=1, stable=True)
    number = torch.tensor(sample, dtype=torch.long).view(b, n).to(noise.device)
    order = by_noise.gather(1, number.gather(1, by_noise).argsort(dim=1, stable=True))
    end = order.new_full((b, 1), n)  # padding of the new rows: sorts to the right
    indices = torch.cat([order, end], 1).gather(1, where).sort(1).values.clamp(max=max(0, n - 1))
    return indices, tuple(tuple(kept_of(count) for count in row) for row in layout.lengths)


# ---- shared with merging ---------------------------------------------------------------------------------------


def check_ratio(keep: float, protect: int) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise InputError(f"keep={keep!r}, expected a ratio above 0 and at most 1")
    if type(protect) is not int or protect < 0:
        raise InputError(f"protect={protect!r}, expected an integer >= 0")


def kept_count(count: int, keep: float, protect: int) -> int:
    """Number of tokens that a sample of `count` keeps: `protect` and a ratio of the others, at least one in all."""
    safe = min(protect, count)
    return max(1, safe + math.floor((count - safe) * keep + 0.5))


def with_layout(tokens: Tokens) -> tuple[Tokens, Tensor | None]:
    """Tokens with a layout. Rows whose samples interleave or have gaps are sorted first; (B, N) are then the indices."""
    if tokens.layout is not None:
        return tokens, None
    measured = tokens.infer_layout()
    if measured.layout is not None:
        return measured, None
    by_segment = tokens.segment.argsort(dim=1, stable=True)
    moved = by_segment.gather(
        1, (~tokens.valid).to(torch.uint8).gather(1, by_segment).argsort(dim=1, stable=True)
    )
    return gather(tokens, moved, tokens.valid.gather(1, moved)).infer_layout(), moved


def gather(tokens: Tokens, indices: Tensor, valid: Tensor) -> Tokens:
    """Tokens at (B, M) indices of their rows, without a layout."""
    out = {}
    for name in FIELDS:
        v = getattr(tokens, name)
        if v is not None:
            index = indices if v.ndim == 2 else indices[..., None].expand(-1, -1, v.shape[-1])
            v = v.gather(1, index)
        out[name] = v
    return Tokens(**(out | {"valid": valid}))


def prefix_mask(counts: Sequence[int], m: int, device: torch.device) -> Tensor:
    """(B, M) bool, True at the first `counts[row]` of each row."""
    if all(count == m for count in counts):
        return torch.ones(len(counts), m, dtype=torch.bool, device=device)
    return torch.arange(m, device=device) < torch.tensor(counts, device=device)[:, None]


def without_embeddings(tokens: Tokens) -> Tokens:
    """All fields but the embeddings (width 0), so that `TokenMask` and `TokenMerge` do not keep them in memory."""
    return tokens.replace(x=tokens.x.new_zeros(*tokens.shape[:2], 0))
