"""Token merging by similarity for any front-end, and its inverse: ToMe (Bolya et al. 2023).

Notable: the number of remaining tokens follows from lengths alone, which `Layout` holds on the CPU. So shapes are
static. ToMe's proportional attention adds log size to the attention scores; `TokenMerge.sizes` holds the sizes.

Shapes: B rows, N tokens per row before and M after, D width, G groups of n tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.layout import Layout
from worldtokens.tokenizers.reduce.masking import (
    check_ratio,
    gather,
    kept_count,
    prefix_mask,
    with_layout,
    without_embeddings,
)
from worldtokens.tokens import Tokens


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMerge:
    """Which tokens `merge_tokens` merged.

    Args:
        indices: (B, N) int64, index of the merged token that holds each original one; arbitrary at padding.
        sizes: (B, M) float32, how many original tokens each merged one holds; 0 at padding.
        original: the tokens before merging, without their embeddings (width 0).
    """

    indices: Tensor
    sizes: Tensor
    original: Tokens

    def unmerge(self, tokens: Tokens) -> Tokens:
        """Every original token gets the embedding of its merged token: (B, M, D) -> (B, N, D).

        All other fields are as before merging; zeros at padding. Undo several merges in reverse order.
        """
        if not tokens.shape[1]:
            x = tokens.x.new_zeros(*self.indices.shape, tokens.dim)
        else:
            x = tokens.x.gather(1, self.indices[..., None].expand(-1, -1, tokens.dim))
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
) -> tuple[Tokens, TokenMerge]:
    """Merge the most similar tokens: bipartite soft matching as in ToMe (Bolya et al. 2023).

    A sample's tokens of one block number and one modality form a group. Every second token of a group is matched with
    the most similar of the others (cosine), and the most similar pairs become one token: the mean of `x` and `pos`,
    weighted by the number of tokens that each side holds. One pass at most halves a group; `r` or `keep` may need
    several. A merged token takes the index of its matched partner. `ids` that differ become -1.

    Args:
        tokens: (B, N, D).
        r: number of tokens to remove from each group, >= 0; a group keeps at least one. Give this or `keep`.
        keep: ratio of each group to keep, above 0 and at most 1, rounded to the nearest count.
        protect: number of leading tokens of each sample that are never merged and not counted (class token).
        sizes: (B, N), number of tokens that each one already holds: `TokenMerge.sizes` of an earlier merge. Default: 1.
        features: (B, N, E), features that similarity is computed on, e.g. attention keys. Default: `x`.
        one_modality: assert that no sample holds two modalities. Tokens with a ``"bidirectional"`` layout are then merged
            without device synchronisation; otherwise block and modality are copied to the CPU once.

    Returns:
        The merged tokens (B, M, D), and the merge that undoes it.

    Raises:
        InputError: `r`, `keep` or `protect` is out of range, or the tokens are causal, where no two share a block
            number.
    """
    if (r is None) == (keep is None):
        raise InputError(f"r={r} and keep={keep}: give one of them")
    if r is not None and (type(r) is not int or r < 0):
        raise InputError(f"r={r!r}, expected an integer >= 0")
    check_ratio(1.0 if keep is None else keep, protect)
    for name, value in (("sizes", sizes), ("features", features)):
        if value is not None and value.shape[:2] != tokens.shape[:2]:
            raise InputError(
                f"{name} is {tuple(value.shape)}, expected {tuple(tokens.shape[:2])} like the tokens"
            )
    if tokens.layout is not None and tokens.layout.order == "causal":
        raise InputError(
            "causal tokens each have their own block number, so none can be merged: merge before .causal(), or drop "
            "some with mask_tokens"
        )
    original = without_embeddings(tokens)
    tokens, moved = with_layout(tokens)
    if moved is not None:
        sizes = sizes if sizes is None else sizes.gather(1, moved)
        features = features if features is None else features.gather(1, moved[..., None].expand_as(features))
    b, n, _ = tokens.shape
    device = tokens.device
    weight = torch.ones(b, n, device=device) if sizes is None else sizes.to(device, torch.float32)
    weight = weight.masked_fill(~tokens.valid, 0)
    by = (tokens.x if features is None else features).detach().flatten(0, 1)

    def goal(count: int) -> int:
        return max(1, count - r) if r is not None else kept_count(count, keep, 0)

    target = torch.arange(b * n, device=device)  # flat index of the token that each one is merged into
    gone = ~tokens.valid.flatten()
    removed: dict[tuple[int, int], int] = {}  # by (row, sample)
    for group, owners in _groups(tokens, protect, one_modality):
        count = group.shape[1]
        if goal(count) == count:
            continue
        into = _match(by[group], weight.flatten()[group], goal(count))  # (G, n): index in the group
        target = target.index_copy(0, group.flatten(), group.gather(1, into).flatten())
        lost = into != torch.arange(count, device=device)
        gone = gone.index_copy(0, group.flatten(), lost.flatten())
        for owner in owners:
            removed[owner] = removed.get(owner, 0) + count - goal(count)
    lengths = tuple(
        tuple(count - removed.get((row, s), 0) for s, count in enumerate(counts))
        for row, counts in enumerate(tokens.layout.lengths)
    )
    counts = [sum(row) for row in lengths]
    m = max(counts, default=0)

    alive = ~gone.view(b, n)
    survivors = (~alive).to(torch.uint8).argsort(dim=1, stable=True)[:, :m]  # (B, M) indices before
    start = torch.arange(b, device=device)[:, None] * n
    indices = (alive.cumsum(1) - 1).gather(1, target.view(b, n) - start).clamp(0, max(0, m - 1))  # (B, N)
    out = gather(tokens, survivors, prefix_mask(counts, m, device))
    total = torch.zeros(b, m, device=device)
    if m:
        total = total.scatter_add(1, indices, weight)
        out = _averaged(out, tokens, indices, weight, total)
    out = out.replace(layout=Layout(lengths, tokens.layout.order, tokens.layout.origin))
    indices = indices if moved is None else indices.scatter(1, moved, indices)
    return out, TokenMerge(indices, total, original)


def _match(features: Tensor, weight: Tensor, goal: int) -> Tensor:
    """Index in its group of the token that each one is merged into, so that `goal` of n remain.

    Args:
        features: (G, n, E).
        weight: (G, n).
        goal: number of tokens to keep per group.

    Returns:
        (G, n) int64; a remaining token has its own index.
    """
    g, n, e = features.shape
    features = features.float()
    alive = torch.arange(n, device=features.device).expand(g, n)  # (G, m): indices of the remaining ones
    now = alive  # (G, n): index in `alive` of each token
    while (m := alive.shape[1]) > goal:
        r = min(m // 2, m - goal)
        unit = F.normalize(features, dim=-1)
        best, partner = (unit[:, ::2] @ unit[:, 1::2].mT).max(-1)  # (G, (m + 1) // 2)
        pick = best.topk(r, dim=1).indices
        source, target = 2 * pick, 2 * partner.gather(1, pick) + 1  # (G, r), indices in `alive`
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
    """Groups of tokens that may merge, batched by size: (G, n) flat indices, and (row, sample) of each group."""
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
                members[None] = [row * n + i for i in loose]
            else:
                for i in loose:
                    members.setdefault(tuple(kinds[row][i]), []).append(row * n + i)
            for group in filter(None, members.values()):
                indices, owners = found.setdefault(len(group), ([], []))
                indices.append(group)
                owners.append((row, sample))
            at += count
    for _, (indices, owners) in sorted(found.items()):
        yield torch.tensor(indices, device=tokens.device), owners


def _averaged(out: Tokens, tokens: Tokens, indices: Tensor, weight: Tensor, total: Tensor) -> Tokens:
    """`x` and `pos` of merged tokens: weighted means of their members. A token that is not merged is copied exactly."""
    b, m = out.shape[:2]
    # float32 sums, so that half-precision tokens do not lose digits; shares add up to 1
    share = (weight / total.gather(1, indices).clamp(min=torch.finfo(weight.dtype).tiny))[..., None]
    new = {}
    for name in ("x", "pos"):
        v = getattr(tokens, name).masked_fill(~tokens.valid[..., None], 0).float() * share
        index = indices[..., None].expand_as(v)
        new[name] = v.new_zeros(b, m, v.shape[-1]).scatter_add(1, index, v).to(getattr(tokens, name).dtype)
    if tokens.ids is not None:
        own = out.ids.gather(1, indices)
        unlike = ((tokens.ids != own) & tokens.valid).long()
        unlike = torch.zeros_like(out.ids).scatter_add(1, indices, unlike)
        new["ids"] = out.ids.masked_fill(unlike > 0, -1)
    return out.replace(**new)
