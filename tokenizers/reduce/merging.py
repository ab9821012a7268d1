"""Merge tokens that are alike, from any front-end, and take them apart again: ToMe (Bolya et al. 2023).

Notable: how many tokens are left follows from lengths alone, which `Layout` knows on the CPU side. So shapes are
static. Attention over merged tokens may want their sizes (ToMe adds log size to its scores); `Merge.sizes` has them.

Shapes: B rows, N tokens of a row before and M after, D width, G groups of n tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.layout import Layout
from worldtokens.tokenizers.reduce.masking import arranged, bare, check_share, front_mask, gather, left_of
from worldtokens.tokens import Tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Merge:
    """Which tokens `merge_tokens` put together.

    Args:
        places: (B, N) int64, the place of the merged token that holds each original one; any place at padding.
        sizes: (B, M) float32, how many original tokens each one holds; 0 at padding.
        original: the tokens before, without their embeddings (width 0).
    """

    places: Tensor
    sizes: Tensor
    original: Tokens

    def unmerge(self, tokens: Tokens) -> Tokens:
        """Every original place gets the embedding of the token that took it in: (B, M, D) -> (B, N, D).

        All other fields are as before merging; zeros at padding. After several merges undo the last one first.
        """
        if not tokens.shape[1]:
            x = tokens.x.new_zeros(*self.places.shape, tokens.dim)
        else:
            x = tokens.x.gather(1, self.places[..., None].expand(-1, -1, tokens.dim))
        return self.original.replace(x=x.masked_fill(~self.original.valid[..., None], 0))


def merge_tokens(
    tokens: Tokens,
    r: int | None = None,
    *,
    keep: float | None = None,
    protect: int = 0,
    sizes: Tensor | None = None,
    features: Tensor | None = None,
    one_modality: bool = False,
) -> tuple[Tokens, Merge]:
    """Merge the tokens that are most alike: bipartite soft matching as in ToMe (Bolya et al. 2023).

    A sample's tokens of one block number and one modality are a group. Every second token of a group looks for the
    most similar among the others (cosine), and the pairs most alike become one token: the average of `x` and `pos`,
    weighted by how many tokens each side holds. A pass at most halves a group; more passes follow where more is asked.
    The merged token stands at the place of the one that took the other in. `ids` that differ become -1.

    Args:
        tokens: (B, N, D).
        r: tokens that vanish from each group, 0 or more; a group keeps at least one. Give this or `keep`.
        keep: share of each group that is left, above 0 and at most 1, rounded to the nearest count.
        protect: the first so many tokens of each sample are left alone and do not count (class token).
        sizes: (B, N), how many tokens each one already holds: `Merge.sizes` of a merge before. Default: 1.
        features: (B, N, E), what similarity is measured on, e.g. attention keys. Default: `x`.
        one_modality: promise that no sample holds two modalities. Then tokens with a layout of order
            ``"bidirectional"`` are merged without waiting for the device; otherwise block and modality are looked at once.

    Returns:
        The merged tokens, (B, M, D), and what undoes it.

    Raises:
        InputError: `r`, `keep` or `protect` is out of range, or the tokens are read in causal order, where no two
            share a block number.
    """
    if (r is None) == (keep is None):
        raise InputError(f"r={r} and keep={keep}: give one of them")
    if r is not None and (type(r) is not int or r < 0):
        raise InputError(f"r={r!r}, expected a whole number, 0 or more")
    check_share(1.0 if keep is None else keep, protect)
    for name, value in (("sizes", sizes), ("features", features)):
        if value is not None and value.shape[:2] != tokens.shape[:2]:
            raise InputError(
                f"{name} is {tuple(value.shape)}, expected {tuple(tokens.shape[:2])} as the tokens have"
            )
    if tokens.layout is not None and tokens.layout.order == "causal":
        raise InputError(
            "tokens in causal order each have a block number of their own, so none can be merged: merge before "
            ".causal(), or drop some with mask_tokens"
        )
    original = bare(tokens)
    tokens, moved = arranged(tokens)
    if moved is not None:
        sizes = sizes if sizes is None else sizes.gather(1, moved)
        features = features if features is None else features.gather(1, moved[..., None].expand_as(features))
    b, n, _ = tokens.shape
    device = tokens.device
    weight = torch.ones(b, n, device=device) if sizes is None else sizes.to(device, torch.float32)
    weight = weight.masked_fill(~tokens.valid, 0)
    by = (tokens.x if features is None else features).detach().flatten(0, 1)

    def goal(count: int) -> int:
        return max(1, count - r) if r is not None else left_of(count, keep, 0)

    taken_by = torch.arange(b * n, device=device)  # flat place of the token that each one ends up in
    gone = ~tokens.valid.flatten()
    vanished: dict[tuple[int, int], int] = {}  # by (row, sample)
    for group, owners in _groups(tokens, protect, one_modality):
        count = group.shape[1]
        if goal(count) == count:
            continue
        into = _match(by[group], weight.flatten()[group], goal(count))  # (G, n): place in the group
        taken_by = taken_by.index_copy(0, group.flatten(), group.gather(1, into).flatten())
        lost = into != torch.arange(count, device=device)
        gone = gone.index_copy(0, group.flatten(), lost.flatten())
        for owner in owners:
            vanished[owner] = vanished.get(owner, 0) + count - goal(count)
    lengths = tuple(
        tuple(count - vanished.get((row, s), 0) for s, count in enumerate(counts))
        for row, counts in enumerate(tokens.layout.lengths)
    )
    counts = [sum(row) for row in lengths]
    m = max(counts, default=0)

    alive = ~gone.view(b, n)
    survivors = (~alive).to(torch.uint8).argsort(dim=1, stable=True)[:, :m]  # (B, M) places before
    start = torch.arange(b, device=device)[:, None] * n
    places = (alive.cumsum(1) - 1).gather(1, taken_by.view(b, n) - start).clamp(0, max(0, m - 1))  # (B, N)
    out = gather(tokens, survivors, front_mask(counts, m, device))
    total = torch.zeros(b, m, device=device)
    if m:
        total = total.scatter_add(1, places, weight)
        out = _averaged(out, tokens, places, weight, total)
    out = out.replace(layout=Layout(lengths, tokens.layout.order, tokens.layout.origin))
    places = places if moved is None else places.scatter(1, moved, places)
    return out, Merge(places, total, original)


def _match(features: Tensor, weight: Tensor, goal: int) -> Tensor:
    """Which place of its group each token ends up in, when `goal` of n are to be left.

    Args:
        features: (G, n, E); weight: (G, n).

    Returns:
        (G, n) int64; a token that is left points at itself.
    """
    g, n, e = features.shape
    features = features.float()
    alive = torch.arange(n, device=features.device).expand(g, n)  # (G, m): places of those left so far
    now = alive  # (G, n): where in `alive` each token is
    while (m := alive.shape[1]) > goal:
        r = min(m // 2, m - goal)
        unit = F.normalize(features, dim=-1)
        best, partner = (unit[:, ::2] @ unit[:, 1::2].mT).max(-1)  # (G, (m + 1) // 2)
        pick = best.topk(r, dim=1).indices
        source, target = 2 * pick, 2 * partner.gather(1, pick) + 1  # (G, r), places in `alive`
        step = torch.arange(m, device=features.device).repeat(g, 1).scatter(1, source, target)
        lost = torch.zeros(g, m, dtype=torch.bool, device=features.device).scatter(1, source, True)
        rest = lost.to(torch.uint8).argsort(dim=1, stable=True)[:, : m - r]  # survivors, in order
        total = torch.zeros_like(weight).scatter_add(1, step, weight)
        share = (weight / total.gather(1, step))[..., None]
        summed = torch.zeros_like(features).scatter_add(
            1, step[..., None].expand(-1, -1, e), features * share
        )
        features = summed.gather(1, rest[..., None].expand(-1, -1, e))
        weight, alive = total.gather(1, rest), alive.gather(1, rest)
        now = ((~lost).cumsum(1) - 1).gather(1, step.gather(1, now))
    return alive.gather(1, now)


def _groups(
    tokens: Tokens, protect: int, one_modality: bool
) -> Iterator[tuple[Tensor, Sequence[tuple[int, int]]]]:
    """Groups that may merge, those of equal size together: (G, n) flat places, and (row, sample) of each."""
    b, n, _ = tokens.shape
    layout = tokens.layout
    static = one_modality and layout.order == "bidirectional"
    if static and layout.full(n):
        if n > protect:
            whole = torch.arange(b * n, device=tokens.device).view(b, n)[:, protect:]
            yield whole, [(row, 0) for row in range(b)]
        return
    found: dict[int, tuple[list, list]] = {}
    kinds = None if static else torch.stack([tokens.block.long(), tokens.modality.long()], -1).tolist()
    for row, lengths in enumerate(layout.lengths):
        at = 0
        for sample, count in enumerate(lengths):
            members: dict = {}
            loose = range(at + protect, at + count)
            if static:
                members[None] = [row * n + place for place in loose]
            else:
                for place in loose:
                    members.setdefault(tuple(kinds[row][place]), []).append(row * n + place)
            for group in filter(None, members.values()):
                places, owners = found.setdefault(len(group), ([], []))
                places.append(group)
                owners.append((row, sample))
            at += count
    for _, (places, owners) in sorted(found.items()):
        yield torch.tensor(places, device=tokens.device), owners


def _averaged(out: Tokens, tokens: Tokens, places: Tensor, weight: Tensor, total: Tensor) -> Tokens:
    """`x` and `pos` of merged tokens: means over their members by weight. A token alone keeps its very numbers."""
    b, m = out.shape[:2]
    # float32 sums, so that half-precision tokens do not lose digits; shares add up to 1
    share = (weight / total.gather(1, places).clamp(min=torch.finfo(weight.dtype).tiny))[..., None]
    new = {}
    for name in ("x", "pos"):
        v = getattr(tokens, name).masked_fill(~tokens.valid[..., None], 0).float() * share
        index = places[..., None].expand_as(v)
        new[name] = v.new_zeros(b, m, v.shape[-1]).scatter_add(1, index, v).to(getattr(tokens, name).dtype)
    if tokens.ids is not None:
        own = out.ids.gather(1, places)
        unlike = ((tokens.ids != own) & tokens.valid).long()
        unlike = torch.zeros_like(out.ids).scatter_add(1, places, unlike)
        new["ids"] = out.ids.masked_fill(unlike > 0, -1)
    return out.replace(**new)
