"""CLIP: two or more modalities in one space, matching rows pulled together (Radford et al. 2021).

Any front-ends by column name, one trunk for all or one each. The loss is open_clip's (`ClipLoss`, `SigLipLoss`), over
every pair of columns that a batch has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.pooling import POOLS, AttentionPool, pool_tokens, usual_pool
from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import Task
from worldtokens.tasks.retrieval import ranks, summary
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokens import Tokens

MAX_SCALE = 100.0


class Ranking(NamedTuple):
    """What `CLIP.rank` gives: for every query the candidates' numbers, best first, and their cosines."""

    order: Tensor  # (Q, C) int64
    scores: Tensor  # (Q, C) float, in that order


class CLIP(Task):
    """A contrastive model over named columns.

    Args:
        tokenizers: front-ends by column name, e.g. ``{"image": ..., "text": ...}``.
        trunk: one Transformer for all columns, or one for each by name.
        dim: width of the shared space.
        pool: ``"mean" | "first" | "last" | "patches"`` (the mean without class token and registers) for all columns or
            by name, where it may also be an `AttentionPool`. Default: the last token where reading is causal, the class
            token where there is one, else the mean.
        loss: ``"clip"`` (softmax over the batch) or ``"siglip"`` (a sigmoid for every pair, Zhai et al. 2023).
        projection: from a trunk's width to `dim`, for all columns or by name: ``"linear"``, ``"bias"`` (linear with a
            bias) or ``"none"``.

    Raises:
        ValueError: fewer than two columns, or widths that don't fit.
    """

    metric = ("mean/R@10", "max")

    def __init__(
        self,
        tokenizers: dict[str, Tokenizer],
        trunk: Part | dict[str, Part],
        dim: int = 512,
        pool: str | dict[str, str | AttentionPool] | None = None,
        loss: str = "clip",
        projection: str | dict[str, str] = "linear",
    ) -> None:
        super().__init__()
        if len(tokenizers) < 2:
            raise ValueError(f"CLIP matches two or more columns, got {sorted(tokenizers)}")
        if loss not in ("clip", "siglip"):
            raise ValueError(f"loss={loss!r}, expected 'clip' or 'siglip'")
        for name, given in (("trunk", trunk), ("pool", pool), ("projection", projection)):
            if isinstance(given, Mapping) and set(given) != set(tokenizers):
                raise ValueError(f"{name} names {sorted(given)}, the columns are {sorted(tokenizers)}")
        self.tokenizers = nn.ModuleDict(tokenizers)
        self.trunk = nn.ModuleDict(trunk) if isinstance(trunk, Mapping) else trunk
        self.dim, self.loss_kind = dim, loss
        self.pooling, self.pools = {}, nn.ModuleDict()
        self.projections = nn.ModuleDict()
        for name, tokenizer in tokenizers.items():
            width = self._trunk(name).dim
            if tokenizer.dim != width:
                raise ValueError(
                    f"the {name!r} front-end gives tokens {tokenizer.dim} wide, its trunk takes {width}"
                )
            how = pool[name] if isinstance(pool, Mapping) else pool
            self.pooling[name] = how = usual_pool(tokenizer) if how is None else how
            if isinstance(how, AttentionPool):
                self.pools[name] = how
            elif how not in POOLS:
                raise ValueError(f"pool of {name!r} is {how!r}, expected one of {POOLS} or an AttentionPool")
            kind = projection[name] if isinstance(projection, Mapping) else projection
            self.projections[name] = _projection(name, kind, width, dim)
        start = math.log(1 / 0.07) if loss == "clip" else math.log(10.0)
        self.logit_scale = nn.Parameter(torch.tensor(start))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0)) if loss == "siglip" else None

    @property
    def columns(self) -> list[str]:
        return list(self.tokenizers)

    def _trunk(self, column: str) -> nn.Module:
        return self.trunk[column] if isinstance(self.trunk, nn.ModuleDict) else self.trunk

    def _pool(self, column: str, tokens: Tokens) -> Tensor:
        how = self.pools[column] if column in self.pools else self.pooling[column]
        return pool_tokens(tokens, how, getattr(self.tokenizers[column], "prefix", 0))

    # ---- forward -----------------------------------------------------------------------------------------

    def encode(self, column: str, batch: Batch | Tensor) -> Tensor:
        """A front-end's batch (or a preprocessed tensor) -> (B, dim), unit length, with a graph."""
        tokens = self._trunk(column)(self.tokenizers[column](batch))
        return F.normalize(self.projections[column](self._pool(column, tokens)).float(), dim=-1)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The embeddings of every column that the batch has: ``{column: (rows that have it, dim)}``."""
        return {name: self.encode(name, batch[name]) for name in self.tokenizers if name in batch}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The contrastive loss over every pair of columns, of the rows that have both.

        A batch without a single pair gives a zero that still has a graph.
        """
        with torch.no_grad():  # in place, so that the rate can still pull it back from the bound
            self.logit_scale.clamp_(0.0, math.log(MAX_SCALE))
        found = self(batch)
        n, has = batch["weight"], batch["has"]
        losses, figures = [], {}
        for a, b in itertools.combinations(self.columns, 2):
            pair = self._rows(found.get(a), found.get(b), has.get(a), has.get(b), n)
            # every process asks for every pair, also one that it has no row of: the others wait for it
            pair = gather_rows(*pair)
            if len(pair[0]):
                losses.append(self._pair_loss(*pair))
                figures[f"{a}-{b}"] = losses[-1].detach()
        if losses:
            total = torch.stack(losses).mean()
        else:
            total = sum(f.sum() for f in found.values()) * 0.0 + self.logit_scale * 0.0
        if len(losses) < 2:
            figures = {}
        return {"loss": total, "scale": self.logit_scale.detach().exp(), **figures}

    def _rows(
        self,
        a: Tensor | None,
        b: Tensor | None,
        has_a: tuple[int, ...] | None,
        has_b: tuple[int, ...] | None,
        n: int,
    ) -> tuple[Tensor, Tensor]:
        """The rows of two columns that both have, in step; none where a column is missing."""
        if a is None or b is None:
            none = self.logit_scale.new_zeros(0, self.dim)
            return none, none
        if has_a is None and has_b is None:
            return a, b
        place_a = {row: i for i, row in enumerate(range(n) if has_a is None else has_a)}
        place_b = {row: i for i, row in enumerate(range(n) if has_b is None else has_b)}
        both = [row for row in place_a if row in place_b]
        pick_a = torch.tensor([place_a[r] for r in both], dtype=torch.long, device=a.device)
        pick_b = torch.tensor([place_b[r] for r in both], dtype=torch.long, device=b.device)
        return a[pick_a], b[pick_b]

    def _pair_loss(self, a: Tensor, b: Tensor) -> Tensor:
        from open_clip.loss import ClipLoss, SigLipLoss

        scale = self.logit_scale.exp()
        if self.loss_kind == "siglip":
            return SigLipLoss()(a, b, scale, self.logit_bias)
        return ClipLoss()(a, b, scale)

    # ---- what a person asks ------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, column: str, sources: Any, batch_size: int = 64) -> Tensor:
        """Files, texts or preprocessed tensors -> vectors in the shared space.

        Args:
            column: which front-end, e.g. ``"text"``.
            sources: a list of what the front-end's `read` takes; one string; or a preprocessed batch (a float
                (B, 3, H, W) for pictures, int64 (B, N) ids for text).
            batch_size: sources worked on at a time.

        Returns:
            (B, dim) float32 on the model's device, unit length.

        Raises:
            InputError: no such column, or a source can't be read.
        """
        if column not in self.tokenizers:
            raise InputError(f"this model has no column {column!r}; it has {self.columns}")
        was_training = self.training
        self.eval()
        try:
            if isinstance(sources, Tensor | Batch):
                return self.encode(column, sources.to(self.device))
            if isinstance(sources, str | bytes):
                sources = [sources]
            tokenizer, out = self.tokenizers[column], []
            for i in range(0, len(sources), batch_size):
                raws = [tokenizer.read(s) for s in sources[i : i + batch_size]]
                out.append(self.encode(column, tokenizer.collate(raws).to(self.device)))
            return torch.cat(out) if out else torch.zeros(0, self.dim, device=self.device)
        finally:
            self.train(was_training)

    def class_vectors(
        self,
        classes: Sequence[str],
        templates: Sequence[str | Callable[[str], str]] = ("{}",),
        column: str = "text",
    ) -> Tensor:
        """One vector for each class: the mean over its prompts, each of unit length, made unit length again."""
        if not classes or not templates:
            raise InputError("zero-shot needs at least one class and one template")
        prompts = [t(c) if callable(t) else t.format(c) for c in classes for t in templates]
        vectors = self.embed(column, prompts).unflatten(0, (len(classes), len(templates)))
        return F.normalize(vectors.mean(1), dim=-1)

    def zero_shot(
        self,
        images: Any,
        classes: Sequence[str],
        templates: Sequence[str | Callable[[str], str]] = ("{}",),
        column: str = "image",
        text: str = "text",
    ) -> Tensor:
        """Which of the classes, told in words, each picture shows.

        Args:
            images: as `embed` takes.
            classes: C names.
            templates: prompts with ``{}`` for the name, or functions of it, averaged per class.

        Returns:
            (B, C) probabilities.
        """
        vectors = self.class_vectors(classes, templates, text)
        with torch.no_grad():
            logits = self.logit_scale.exp() * self.embed(column, images) @ vectors.T
        return logits.softmax(-1)

    def rank(self, queries: Any, candidates: Any, query: str = "text", candidate: str = "image") -> Ranking:
        """Order the candidates for every query by cosine, best first.

        Args:
            queries, candidates: as `embed` takes, or (n, dim) float embeddings made before.
            query, candidate: their columns.

        Returns:
            `Ranking(order, scores)`, both (Q, C).
        """
        q, c = self._vectors(query, queries), self._vectors(candidate, candidates)
        scores, order = (q @ c.T).sort(dim=-1, descending=True, stable=True)
        return Ranking(order, scores)

    def _vectors(self, column: str, given: Any) -> Tensor:
        if isinstance(given, Tensor) and given.ndim == 2 and given.is_floating_point():
            return F.normalize(given.to(self.device).float(), dim=-1)
        return self.embed(column, given)

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> dict[str, float]:
        """Retrieval between every pair of columns, both ways.

        A list in a column (several captions of one picture) is several queries, and as candidates any of them is a
        hit. Rows that lack a column are left out of its pairs.

        Returns:
            ``"text_to_image/R@1"``, ``.../R@5``, ``.../R@10``, ``.../chance@k``, ``.../median_rank`` for each pair and
            direction, and ``"mean/R@10"``.
        """
        vectors, ids = {}, {}
        for name in self.columns:
            sources, owner = [], []
            for i, row in enumerate(rows):
                value = row.get(name)
                values = value if isinstance(value, list) else [] if value is None else [value]
                sources += values
                owner += [i] * len(values)
            if sources:
                vectors[name], ids[name] = self.embed(name, sources, batch_size), owner
        out: dict[str, float] = {}
        for a, b in itertools.permutations(vectors, 2):
            common = set(ids[a]) & set(ids[b])
            if not common:
                continue
            qa, qi = _only(vectors[a], ids[a], common)
            cb, ci = _only(vectors[b], ids[b], common)
            figures = summary(ranks(qa, cb, qi, ci), qi, ci)
            out |= {f"{a}_to_{b}/{k}": v for k, v in figures.items()}
        if not out:
            raise InputError(f"no row has two of this model's columns {self.columns}")
        tens = [v for k, v in out.items() if k.endswith("/R@10")]
        return out | {"mean/R@10": sum(tens) / len(tens)}


def _projection(column: str, kind: str, width: int, dim: int) -> nn.Module:
    if kind not in ("linear", "bias", "none"):
        raise ValueError(f"projection of {column!r} is {kind!r}, expected 'linear', 'bias' or 'none'")
    if kind == "none":
        if width != dim:
            raise ValueError(f"the {column!r} trunk is {width} wide: projection='none' needs dim={width}")
        return nn.Identity()
    layer = nn.Linear(width, dim, bias=kind == "bias")
    nn.init.normal_(layer.weight, std=width**-0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def gather_rows(*columns: Tensor) -> tuple[Tensor, ...]:
    """The rows of all processes, in the order of their ranks, with gradients back to each; they may differ in number.

    Every process then has the loss of the whole batch, as one process would: DDP's mean over equal losses is right.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return columns
    world = torch.distributed.get_world_size()
    if world == 1:
        return columns
    mine = torch.tensor([len(columns[0])], device=columns[0].device)
    counts = [torch.empty_like(mine) for _ in range(world)]
    torch.distributed.all_gather(counts, mine)
    counts = [int(c) for c in counts]
    return tuple(_Gather.apply(c, counts, torch.distributed.get_rank()) for c in columns)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, counts: list[int], rank: int) -> Tensor:
        ctx.first, ctx.count = sum(counts[:rank]), counts[rank]
        padded = F.pad(x, (0, 0, 0, max(counts) - len(x))).contiguous()
        parts = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(parts, padded)
        return torch.cat([p[:c] for p, c in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        torch.distributed.all_reduce(grad)
        return grad[ctx.first : ctx.first + ctx.count], None, None


def _only(vectors: Tensor, ids: list[int], keep: set[int]) -> tuple[Tensor, list[int]]:
    places = [i for i, owner in enumerate(ids) if owner in keep]
    return vectors[places], [ids[i] for i in places]
