"""CLIP: contrastive learning of one embedding space for two or more modalities (Radford et al. 2021).

It takes any number of tokenizers by column name and one trunk for all or one each. A row, or a whole batch, may lack any
column. The loss is `pair_loss` of each pair of columns, averaged over the pairs that the batch has.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.pooling import POOLS, AttentionPool, default_pool, pool_tokens
from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import Task, evaluating
from worldtokens.tasks.contrastive.loss import gather_rows, hash_value, pair_loss, share_key
from worldtokens.tasks.contrastive.standardize import Standardize
from worldtokens.tasks.metrics.retrieval import retrieval_metrics
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokens import Tokens

MAX_SCALE = 100.0


class Ranking(NamedTuple):
    """The result of `CLIP.rank`: for every query the indices of the candidates, best first, and their cosines."""

    order: Tensor  # (Q, C) int64
    scores: Tensor  # (Q, C) float, in that order


class CLIP(Task):
    """A contrastive model over named columns.

    Args:
        tokenizers: tokenizers by column name, e.g. ``{"image": ..., "text": ...}``.
        trunk: one Transformer for all columns, or one for each by name.
        dim: width of the shared space.
        pool: ``"mean" | "first" | "last" | "patches"`` (mean without class token and registers), for all columns or by
            name; by name it may also be an `AttentionPool`. Default: the last token for causal attention, else the class
            token if there is one, else the mean.
        loss: ``"clip"`` (softmax over the batch) or ``"siglip"`` (a sigmoid for every pair, Zhai et al. 2023).
        projection: projection from the trunk's width to `dim`, for all columns or by name: ``"linear"`` (no bias),
            ``"bias"`` (linear with a bias) or ``"none"``.
        pairs: pairs of columns in the loss, e.g. ``[["image", "text"], ["image", "audio"]]``; None: all. Columns without
            a pair of their own align through the others (ImageBind, Girdhar et al. 2023).
        same: columns that mark false negatives: two rows with an equal value there are not negatives of each other. These
            are the tokenizers' columns, compared as read, or other columns of the row, such as ``"id"`` where several
            rows belong to one image. None: the text columns, so that a caption shared by several rows of a batch is
            no false negative. ``[]``: every other row is a negative, as in open_clip.
        standardize: standardise each column's channels in the shared space to mean 0 and variance 1 before embeddings
            are normalised, by batch statistics in training and by running statistics in evaluation (`Standardize`). This
            removes what all samples of a column share; it helps models trained from scratch on small sets.
        label_smoothing: share of each target that is spread evenly over the batch (Szegedy et al. 2016), 0 to below 1;
            delays memorisation of small sets. Only with ``loss="clip"``.

    Raises:
        ValueError: fewer than two columns, widths that do not match, or pairs of unknown columns.
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
        pairs: list[list[str]] | None = None,
        same: list[str] | None = None,
        standardize: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if len(tokenizers) < 2:
            raise ValueError(f"CLIP needs two or more columns, got {sorted(tokenizers)}")
        if loss not in ("clip", "siglip"):
            raise ValueError(f"loss={loss!r}, expected 'clip' or 'siglip'")
        for name, value in (("trunk", trunk), ("pool", pool), ("projection", projection)):
            if isinstance(value, Mapping) and set(value) != set(tokenizers):
                raise ValueError(f"{name} names {sorted(value)}, the columns are {sorted(tokenizers)}")
        if not 0 <= label_smoothing < 1 or (label_smoothing and loss != "clip"):
            raise ValueError(
                f"label_smoothing={label_smoothing} with loss={loss!r}, expected 0 <= label_smoothing < 1 with 'clip'"
            )
        self.tokenizers = nn.ModuleDict(tokenizers)
        self.trunk = nn.ModuleDict(trunk) if isinstance(trunk, Mapping) else trunk
        self.dim, self.loss_kind, self.label_smoothing = dim, loss, label_smoothing
        self.pooling, self.pools = {}, nn.ModuleDict()
        self.projections = nn.ModuleDict()
        for name, tokenizer in tokenizers.items():
            width = self._trunk(name).dim
            if tokenizer.dim != width:
                raise ValueError(f"the {name!r} tokenizer has dim={tokenizer.dim}, its trunk dim={width}")
            how = pool[name] if isinstance(pool, Mapping) else pool
            self.pooling[name] = how = default_pool(tokenizer) if how is None else how
            if isinstance(how, AttentionPool):
                self.pools[name] = how
            elif how not in POOLS:
                raise ValueError(f"pool of {name!r} is {how!r}, expected one of {POOLS} or an AttentionPool")
            kind = projection[name] if isinstance(projection, Mapping) else projection
            self.projections[name] = _projection(name, kind, width, dim)
        self.standardizers = nn.ModuleDict(
            {name: Standardize(dim) for name in tokenizers} if standardize else {}
        )
        start = math.log(1 / 0.07) if loss == "clip" else math.log(10.0)
        self.logit_scale = nn.Parameter(torch.tensor(start))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0)) if loss == "siglip" else None
        self.pairs = _check_pairs(pairs, list(tokenizers))
        text = [name for name, t in tokenizers.items() if t.modality == "text"]
        self.same = text if same is None else list(same)

    @property
    def columns(self) -> list[str]:
        return list(self.tokenizers)

    def _trunk(self, column: str) -> Part:
        return cast(Part, self.trunk[column] if isinstance(self.trunk, nn.ModuleDict) else self.trunk)

    def _pool(self, column: str, tokens: Tokens) -> Tensor:
        how = self.pools[column] if column in self.pools else self.pooling[column]
        return pool_tokens(
            tokens, cast("str | AttentionPool", how), getattr(self.tokenizers[column], "prefix", 0)
        )

    # ---- forward -----------------------------------------------------------------------------------------

    def encode(self, column: str, batch: Batch | Tensor) -> Tensor:
        """Embeds a tokenizer's batch, or a preprocessed tensor: (B, dim) of unit length, with a graph."""
        x = self._projected(column, batch)
        return F.normalize(self.standardizers[column](x) if self.standardizers else x, dim=-1)

    def _projected(self, column: str, batch: Batch | Tensor) -> Tensor:
        """Projects a batch into the shared space: (B, dim) float32, not normalised."""
        return self.projections[column](self._pooled(column, batch)).float()

    def _pooled(self, column: str, batch: Batch | Tensor) -> Tensor:
        """Pooled features before the projection, (B, width of the trunk)."""
        return self._pool(column, self._trunk(column)(self.tokenizers[column](batch)))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Embeds every column that the batch has: ``{column: (rows that have it, dim)}``."""
        return {name: self.encode(name, batch[name]) for name in self.tokenizers if name in batch}

    def read(
        self,
        row: Mapping[str, Any],
        rng: random.Random | None = None,
        augment: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> dict[str, Any]:
        """As `Task.read`, with the columns named in `same` added."""
        raws = super().read(row, rng, augment)
        others = (name for name in self.same if name not in self.tokenizers and row.get(name) is not None)
        return raws | {name: row[name] for name in others}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """As `Task.collate`; ``batch["same"]`` holds (rows, K) int64 hashes of the columns in `same`, 0 where missing."""
        batch = super().collate(rows)
        if self.same:
            keys = [[hash_value(row[name]) if name in row else 0 for name in self.same] for row in rows]
            batch["same"] = torch.tensor(keys, dtype=torch.int64).view(len(rows), len(self.same))
        return batch

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Contrastive loss of every pair of columns over the rows that have both, averaged over the pairs.

        A batch without any pair gives a zero with a graph.
        """
        with torch.no_grad():  # clamped in place, so that gradients can still move it off the bound
            self.logit_scale.clamp_(0.0, math.log(MAX_SCALE))
        projected = {name: self._projected(name, batch[name]) for name in self.tokenizers if name in batch}
        x, has = self._scatter(projected, batch["has"], batch["weight"])
        same = batch["same"] if "same" in batch else has.new_zeros(len(has), 0, dtype=torch.int64)
        x, gathered = gather_rows(x, torch.cat([has.long(), same], 1))
        has, same = gathered[:, : len(self.columns)] > 0, share_key(gathered[:, len(self.columns) :])
        scale, losses, counts = self.logit_scale.exp(), [], []
        x = self._normalized(x, has)
        for a, b in self.pairs:
            i, j = self.columns.index(a), self.columns.index(b)
            both = has[:, i] & has[:, j]
            losses.append(
                pair_loss(x[:, i], x[:, j], both, same, scale, self.logit_bias, self.label_smoothing)
            )
            counts.append(both.any())
        total = torch.stack(losses).sum() / torch.stack(counts).sum().clamp(min=1)
        per_pair = {}
        if len(self.pairs) > 1:
            pairs = zip(self.pairs, losses, strict=True)
            per_pair = {
                f"{a}-{b}": loss.detach() for (a, b), loss in pairs if a in projected and b in projected
            }
        return {"loss": total, "scale": scale.detach(), **per_pair}

    def _normalized(self, x: Tensor, has: Tensor) -> Tensor:
        """Normalises (n, C, dim) of all processes; with `standardize`, standardises it first by the rows in `has`."""
        if self.standardizers:
            columns = [self.standardizers[name] for name in self.columns]
            x = torch.stack(
                [
                    module.forward_batch(x[:, i], has[:, i]) if self.training else module(x[:, i])
                    for i, module in enumerate(columns)
                ],
                1,
            )
        return F.normalize(x, dim=-1)

    def _scatter(
        self, projected: Mapping[str, Tensor], has: Mapping[str, tuple[int, ...] | None], n: int
    ) -> tuple[Tensor, Tensor]:
        """Scatters vectors to their rows: (n, C, dim) with zeros elsewhere, and (n, C) bool, True where set."""
        columns, present = [], []
        for name in self.columns:
            x, rows = projected.get(name), has.get(name)
            if x is None:
                x, rows = self.logit_scale.new_zeros(n, self.dim), ()
            elif rows is not None:
                indices = torch.tensor(rows, dtype=torch.long, device=x.device)
                x = x.new_zeros(n, self.dim).index_copy(0, indices, x)
            columns.append(x)
            present.append([True] * n if rows is None else [i in set(rows) for i in range(n)])
        return torch.stack(columns, 1), torch.tensor(present, device=columns[0].device).view(-1, n).T

    # ---- inference ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, column: str, sources: Any, batch_size: int = 64) -> Tensor:
        """Embeds files, texts or preprocessed tensors into the shared space.

        Args:
            column: column of the tokenizer, e.g. ``"text"``.
            sources: a list of what the tokenizer's `read` accepts; one string; or a preprocessed batch (float
                (B, 3, H, W) for images, int64 (B, N) token ids for text).
            batch_size: sources per forward pass.

        Returns:
            (B, dim) float32 on the model's device, unit length.

        Raises:
            InputError: no such column, or a source cannot be read.
        """
        return self._encode_sources(self.encode, self.dim, column, sources, batch_size)

    def features(self, column: str, sources: Any, batch_size: int = 64) -> Tensor:
        """As `embed`, but the features before the projection: for linear probes, as in Radford et al. (2021).

        Returns:
            (B, width of the column's trunk) float32, not normalised.

        Raises:
            InputError: as `embed`.
        """

        def pooled(column: str, batch: Batch | Tensor) -> Tensor:
            return self._pooled(column, batch).float()

        width = self._trunk(column).dim if column in self.tokenizers else 0
        return self._encode_sources(pooled, width, column, sources, batch_size)

    def _encode_sources(
        self, encode: Callable[..., Tensor], width: int, column: str, sources: Any, batch_size: int
    ) -> Tensor:
        if column not in self.tokenizers:
            raise InputError(f"this model has no column {column!r}; it has {self.columns}")
        with evaluating(self):
            if isinstance(sources, Tensor | Batch):
                return encode(column, sources.to(self.device))
            if isinstance(sources, str | bytes):
                sources = [sources]
            tokenizer, out = self.tokenizers[column], []
            for i in range(0, len(sources), batch_size):
                raws = [tokenizer.read(s) for s in sources[i : i + batch_size]]
                out.append(encode(column, tokenizer.collate(raws).to(self.device)))
            return torch.cat(out) if out else torch.zeros(0, width, device=self.device)

    def class_vectors(
        self,
        classes: Sequence[str],
        templates: Sequence[str | Callable[[str], str]] = ("{}",),
        column: str = "text",
    ) -> Tensor:
        """Class embeddings (C, dim): the mean of the normalised embeddings of a class's prompts, normalised again."""
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
        """Zero-shot classification: probabilities of classes given by name.

        Args:
            images: as in `embed`.
            classes: C class names.
            templates: prompts with ``{}`` for the name, or functions of it, averaged per class.
            column, text: columns of the images and of the prompts.

        Returns:
            (B, C) probabilities.
        """
        vectors = self.class_vectors(classes, templates, text)
        with torch.no_grad():
            logits = self.logit_scale.exp() * self.embed(column, images) @ vectors.T
        return logits.softmax(-1)

    def rank(self, queries: Any, candidates: Any, query: str = "text", candidate: str = "image") -> Ranking:
        """Ranks the candidates of every query by cosine, best first.

        Args:
            queries, candidates: as in `embed`, or precomputed (n, dim) float embeddings.
            query, candidate: their columns.

        Returns:
            `Ranking(order, scores)`, both (Q, C).
        """
        q, c = self._vectors(query, queries), self._vectors(candidate, candidates)
        scores, order = (q @ c.T).sort(dim=-1, descending=True, stable=True)
        return Ranking(order, scores)

    def _vectors(self, column: str, sources: Any) -> Tensor:
        if isinstance(sources, Tensor) and sources.ndim == 2 and sources.is_floating_point():
            return F.normalize(sources.to(self.device).float(), dim=-1)
        return self.embed(column, sources)

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> dict[str, float]:
        """Retrieval metrics between every pair of columns, in both directions.

        A list in a column (several captions of one image) counts as several queries; as candidates, any of them is a
        hit. Rows that lack a column are skipped in its pairs.

        Returns:
            ``"text_to_image/R@1"``, ``.../R@5``, ``.../R@10``, ``.../chance@k``, ``.../median_rank`` for each pair and
            direction, and ``"mean/R@10"``.
        """
        vectors, ids = {}, {}
        for name in self.columns:
            sources, owners = [], []
            for i, row in enumerate(rows):
                value = row.get(name)
                values = value if isinstance(value, list) else [] if value is None else [value]
                sources += values
                owners += [i] * len(values)
            if sources:
                vectors[name], ids[name] = self.embed(name, sources, batch_size), owners
        out = retrieval_metrics(vectors, ids)
        if not out:
            raise InputError(f"no row has two of this model's columns {self.columns}")
        return out


def _check_pairs(pairs: Sequence[Sequence[str]] | None, columns: Sequence[str]) -> list[tuple[str, str]]:
    if pairs is None:
        return list(itertools.combinations(columns, 2))
    found = [cast("tuple[str, str]", tuple(p)) for p in pairs]  # lengths are checked below
    known = all(len(set(p)) == len(p) == 2 and set(p) <= set(columns) for p in found)
    if not found or not known or len({frozenset(p) for p in found}) != len(found):
        raise ValueError(f"pairs={list(pairs)!r}, expected different pairs of the columns {list(columns)}")
    return found


def _projection(column: str, kind: str, width: int, dim: int) -> nn.Module:
    if kind not in ("linear", "bias", "none"):
        raise ValueError(f"projection of {column!r} is {kind!r}, expected 'linear', 'bias' or 'none'")
    if kind == "none":
        if width != dim:
            raise ValueError(f"the {column!r} trunk has dim={width}: projection='none' needs dim={width}")
        return nn.Identity()
    layer = nn.Linear(width, dim, bias=kind == "bias")
    nn.init.normal_(layer.weight, std=width**-0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
