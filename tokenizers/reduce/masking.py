"""Leave out tokens at random, from any front-end, and put them back: MAE (He et al. 2022), FLIP (Li et al. 2023).

Notable: how many tokens are left follows from lengths alone, which `Layout` knows on the CPU side. So shapes are
static, and nothing here waits for the device where the tokens have a layout. What padding holds is never read.

Shapes: B rows, N tokens of a row before and M after, D width.
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
class Dropped:
    """What `mask_tokens` left out, and where what it kept came from.

    Args:
        places: (B, M) int64, the place that each kept token had in its row; any place where a row is padded.
        restore: (B, N) int64, the place in the new row of each token that was kept; any place for the others.
        kept: (B, N) bool, True = kept.
        original: the tokens before, without their embeddings (width 0).
    """

    places: Tensor
    restore: Tensor
    kept: Tensor
    original: Tokens

    @property
    def masked(self) -> Tensor:
        """(B, N) bool, True = a real token that was left out: where a masked autoencoder has its loss."""
        return self.original.valid & ~self.kept

    def put_back(self, tokens: Tokens, fill: Tensor) -> Tokens:
        """Kept tokens at their old places, `fill` at the others.

        Args:
            tokens: (B, M, D), the kept tokens, with any new embeddings and any width.
            fill: (D,), or (B, N, D), what stands where a token was left out: a learned mask token.

        Returns:
            (B, N, D) with all other fields as before dropping; zeros at padding.
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
) -> tuple[Tokens, Dropped]:
    """Leave out tokens at random, the same share of every sample; the rest keeps its order and its fields.

    Block numbers are kept too, so tokens read from left to right still are, with gaps in the numbers.

    Args:
        tokens: (B, N, D). Without a layout they are measured first, which waits for the device once.
        keep: share of a sample's valid tokens to keep, above 0 and at most 1; rounded to the nearest count, at least
            one token of each sample.
        generator: where chance comes from, on any device. Default: torch's own.
        protect: the first so many tokens of each sample are always kept and do not count in the share (class token).
        noise: (B, N) numbers to use in place of chance: a sample's tokens with the smallest are kept.

    Returns:
        The kept tokens, (B, M, D) with M the most that any row keeps, and what is needed to put them back.

    Raises:
        InputError: `keep`, `protect` or the shape of `noise` is out of range.
    """
    check_share(keep, protect)
    b, n, _ = tokens.shape
    if noise is None:
        device = generator.device if generator is not None else tokens.device
        noise = torch.rand(b, n, generator=generator, device=device)
    elif noise.shape != (b, n):
        raise InputError(f"noise is {tuple(noise.shape)}, expected {(b, n)}: one number for each token")
    noise = noise.to(tokens.device)
    original = bare(tokens)
    tokens, moved = arranged(tokens)
    noise = noise if moved is None else noise.gather(1, moved)

    def left(count: int) -> int:
        return left_of(count, keep, protect)

    layout = tokens.layout
    if layout.full(n):
        noise = noise.masked_fill(torch.arange(n, device=noise.device) < protect, -torch.inf)
        places = noise.argsort(dim=1, stable=True)[:, : left(n)].sort(1).values
        lengths = tuple((left(n),) for _ in range(b))
    else:
        places, lengths = _kept_places(noise, layout, left, protect)
    counts = [sum(row) for row in lengths]
    chosen = gather(tokens, places, front_mask(counts, places.shape[1], places.device))
    chosen = chosen.replace(layout=Layout(lengths, layout.order, layout.origin))
    # added up, because padding of the new rows points at places too
    kept = (
        torch.zeros(b, n, dtype=torch.long, device=tokens.device).scatter_add(1, places, chosen.valid.long())
        > 0
    )
    restore = (kept.cumsum(1) - 1).clamp(min=0)
    if moved is not None:
        places = moved.gather(1, places)
        kept, restore = kept.scatter(1, moved, kept), restore.scatter(1, moved, restore)
    return chosen, Dropped(places, restore, kept, original)


def _kept_places(
    noise: Tensor, layout: Layout, left: Callable[[int], int], protect: int
) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
    """Rows of several or short samples -> (B, M) places to keep in rising order, and the new lengths."""
    b, n = noise.shape
    sample, first, rank = (
        [],
        [],
        [],
    )  # per place: number of its sample, whether protected; per kept: where to look
    for row in layout.lengths:
        at, wanted = 0, []
        for count in row:
            wanted += range(at, at + left(count))
            at += count
        rank.append(wanted)
        sample.append([s for s, count in enumerate(row) for _ in range(count)] + [len(row)] * (n - at))
        first.append([i < protect for count in row for i in range(count)] + [False] * (n - at))
    m = max(map(len, rank), default=0)
    where = torch.tensor([r + [n] * (m - len(r)) for r in rank], dtype=torch.long).view(b, m).to(noise.device)
    noise = noise.masked_fill(torch.tensor(first, dtype=torch.bool).view(b, n).to(noise.device), -torch.inf)
    # sorted by noise and then, stably, by sample: a sample's smallest stand at its start, a place known beforehand
    by_noise = noise.argsort(dim=1, stable=True)
    number = torch.tensor(sample, dtype=torch.long).view(b, n).to(noise.device)
    order = by_noise.gather(1, number.gather(1, by_noise).argsort(dim=1, stable=True))
    behind = order.new_full((b, 1), n)  # padding of the new rows: sorts to the right
    places = torch.cat([order, behind], 1).gather(1, where).sort(1).values.clamp(max=max(0, n - 1))
    return places, tuple(tuple(left(count) for count in row) for row in layout.lengths)


# ---- shared with merging ---------------------------------------------------------------------------------------


def check_share(keep: float, protect: int) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise InputError(f"keep={keep!r}, expected a share above 0 and at most 1")
    if type(protect) is not int or protect < 0:
        raise InputError(f"protect={protect!r}, expected a whole number, 0 or more")


def left_of(count: int, keep: float, protect: int) -> int:
    """How many of a sample's tokens are left: a share of those not protected, at least one in all."""
    safe = min(protect, count)
    return max(1, safe + math.floor((count - safe) * keep + 0.5))


def arranged(tokens: Tokens) -> tuple[Tokens, Tensor | None]:
    """Tokens with a layout. Where samples have gaps or mix in a row, they are moved apart: (B, N) places."""
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


def gather(tokens: Tokens, places: Tensor, valid: Tensor) -> Tokens:
    """Tokens at (B, M) places of their rows, without a layout."""
    out = {}
    for name in FIELDS:
        v = getattr(tokens, name)
        if v is not None:
            index = places if v.ndim == 2 else places[..., None].expand(-1, -1, v.shape[-1])
            v = v.gather(1, index)
        out[name] = v
    return Tokens(**(out | {"valid": valid}))


def front_mask(counts: Sequence[int], m: int, device: torch.device) -> Tensor:
    """(B, M) bool, the first `counts[row]` places True."""
    if all(count == m for count in counts):
        return torch.ones(len(counts), m, dtype=torch.bool, device=device)
    return torch.arange(m, device=device) < torch.tensor(counts, device=device)[:, None]


def bare(tokens: Tokens) -> Tokens:
    """Everything but the embeddings, so that a trace does not hold on to them."""
    return tokens.replace(x=tokens.x.new_zeros(*tokens.shape[:2], 0))
