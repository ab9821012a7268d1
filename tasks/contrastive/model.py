"""CLIP: two or more modalities in one space, matching rows pulled together (Radford et al. 2021).

Any number of front-ends by column name, one trunk for all or one each; a row may lack any of its columns, and so may
a whole batch. The loss is that of each pair of columns (`pair_loss`), averaged over the pairs that the batch has.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.pooling import POOLS, AttentionPool, pool_tokens, usual_pool
from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import Task, evaluating
from worldtokens.tasks.contrastive.loss import alike, gather_rows, key_of, pair_loss
from worldtokens.tasks.contrastive.standardize import Standardize
from worldtokens.tasks.metrics.retrieval import between
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
        pairs: the pairs of columns that the loss is over, e.g. ``[["image", "text"], ["image", "audio"]]``; None: all.
            A pair left out is matched by way of the others (ImageBind, Girdhar et al. 2023).
        same: columns by which rows are alike: two rows of one value there show the same thing, so neither is the other's
            negative. Front-ends' columns, compared as read, or others of the row, such as ``"id"`` where several rows
            belong to one image. None: the columns of text, so that a caption which several rows of a batch share is
            no false negative. ``[]``: every other row is a negative, as in open_clip.
        standardize: every column's channels in the shared space are brought to mean 0 and variance 1 before vectors are made
            unit length, by the batch in training and by running figures after (`Standardize`): what all images have in
            common is no likeness then. Helps models trained from scratch on small sets.
        label_smoothing: share of each match's target that is spread evenly over the batch (label smoothing, Szegedy et al. 2016), so
            that small sets are memorised later. Only with ``loss="clip"``.

    Raises:
        ValueError: fewer than two columns, widths that do not fit, or pairs of unknown columns.
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
            raise ValueError(f"CLIP matches two or more columns, got {sorted(tokenizers)}")
        if loss not in ("clip", "siglip"):
            raise ValueError(f"loss={loss!r}, expected 'clip' or 'siglip'")
        for name, given in (("trunk", trunk), ("pool", pool), ("projection", projection)):
            if isinstance(given, Mapping) and set(given) != set(tokenizers):
                raise ValueError(f"{name} names {sorted(given)}, the columns are {sorted(tokenizers)}")
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
        self.standards = nn.ModuleDict({name: Standardize(dim) for name in tokenizers} if standardize else {})
        start = math.log(1 / 0.07) if loss == "clip" else math.log(10.0)
        self.logit_scale = nn.Parameter(torch.tensor(start))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0)) if loss == "siglip" else None
        self.pairs = _checked_pairs(pairs, list(tokenizers))
        text = [name for name, t in tokenizers.items() if t.modality == "text"]
        self.same = text if same is None else list(same)

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
        x = self._projected(column, batch)
        return F.normalize(self.standards[column](x) if self.standards else x, dim=-1)

    def _projected(self, column: str, batch: Batch | Tensor) -> Tensor:
        """Where a batch lies in the shared space, (B, dim) float32, of any length."""
        return self.projections[column](self._pooled(column, batch)).float()

    def _pooled(self, column: str, batch: Batch | Tensor) -> Tensor:
        """What the projection reads, (B, width of the trunk)."""
        return self._pool(column, self._trunk(column)(self.tokenizers[column](batch)))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The embeddings of every column that the batch has: ``{column: (rows that have it, dim)}``."""
        return {name: self.encode(name, batch[name]) for name in self.tokenizers if name in batch}

    def read(
        self,
        row: Mapping[str, Any],
        rng: random.Random | None = None,
        augment: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> dict[str, Any]:
        """As `Task.read`, and the columns named in `same`."""
        raws = super().read(row, rng, augment)
        others = (name for name in self.same if name not in self.tokenizers and row.get(name) is not None)
        return raws | {name: row[name] for name in others}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """As `Task.collate`; ``batch["same"]`` is (rows, K) int64, where rows that are alike share a number above 0."""
        batch = super().collate(rows)
        if self.same:
            keys = [[key_of(row[name]) if name in row else 0 for name in self.same] for row in rows]
            batch["same"] = torch.tensor(keys, dtype=torch.int64).view(len(rows), len(self.same))
        return batch

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The contrastive loss of every pair of columns, over the rows that have both; the mean over the pairs.

        A batch without a single pair gives a zero that still has a graph.
        """
        with torch.no_grad():  # in place, so that the rate can still pull it back from the bound
            self.logit_scale.clamp_(0.0, math.log(MAX_SCALE))
        found = {name: self._projected(name, batch[name]) for name in self.tokenizers if name in batch}
        x, has = self._placed(found, batch["has"], batch["weight"])
        same = batch["same"] if "same" in batch else has.new_zeros(len(has), 0, dtype=torch.int64)
        x, facts = gather_rows(x, torch.cat([has.long(), same], 1))
        has, same = facts[:, : len(self.columns)] > 0, alike(facts[:, len(self.columns) :])
        scale, losses, counts = self.logit_scale.exp(), [], []
        x = self._unit(x, has)
        for a, b in self.pairs:
            i, j = self.columns.index(a), self.columns.index(b)
            both = has[:, i] & has[:, j]
            losses.append(
                pair_loss(x[:, i], x[:, j], both, same, scale, self.logit_bias, self.label_smoothing)
            )
            counts.append(both.any())
        total = torch.stack(losses).sum() / torch.stack(counts).sum().clamp(min=1)
        figures = {}
        if len(self.pairs) > 1:
            pairs = zip(self.pairs, losses, strict=True)
            figures = {f"{a}-{b}": loss.detach() for (a, b), loss in pairs if a in found and b in found}
        return {"loss": total, "scale": scale.detach(), **figures}

    def _unit(self, x: Tensor, has: Tensor) -> Tensor:
        """(n, C, dim) of all processes -> unit length, standardised where that was asked for, by the rows that `has` names."""
        if self.standards:
            columns = [self.standards[name] for name in self.columns]
            x = torch.stack(
                [
                    standard.of_batch(x[:, i], has[:, i]) if self.training else standard(x[:, i])
                    for i, standard in enumerate(columns)
                ],
                1,
            )
        return F.normalize(x, dim=-1)

    def _placed(
        self, found: Mapping[str, Tensor], has: Mapping[str, tuple[int, ...] | None], n: int
    ) -> tuple[Tensor, Tensor]:
        """Vectors at their rows' places, (n, C, dim) with zeros elsewhere, and which are there, (n, C) bool."""
        columns, there = [], []
        for name in self.columns:
            x, rows = found.get(name), has.get(name)
            if x is None:
                x, rows = self.logit_scale.new_zeros(n, self.dim), ()
            elif rows is not None:
                places = torch.tensor(rows, dtype=torch.long, device=x.device)
                x = x.new_zeros(n, self.dim).index_copy(0, places, x)
            columns.append(x)
            there.append([True] * n if rows is None else [i in set(rows) for i in range(n)])
        return torch.stack(columns, 1), torch.tensor(there, device=columns[0].device).view(-1, n).T

    # ---- what a person asks ------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, column: str, sources: Any, batch_size: int = 64) -> Tensor:
        """Files, texts or preprocessed tensors -> vectors in the shared space.

        Args:
            column: which front-end, e.g. ``"text"``.
            sources: a list of what the front-end's `read` takes; one string; or a preprocessed batch (a float
                (B, 3, H, W) for images, int64 (B, N) ids for text).
            batch_size: sources worked on at a time.

        Returns:
            (B, dim) float32 on the model's device, unit length.

        Raises:
            InputError: no such column, or a source cannot be read.
        """
        return self._each(self.encode, self.dim, column, sources, batch_size)

    def features(self, column: str, sources: Any, batch_size: int = 64) -> Tensor:
        """As `embed`, but what the projection to the shared space reads: for linear probes, as Radford et al. (2021) took them.

        Returns:
            (B, width of the column's trunk) float32, of any length.

        Raises:
            InputError: as `embed`.
        """

        def pooled(column: str, batch: Batch | Tensor) -> Tensor:
            return self._pooled(column, batch).float()

        width = self._trunk(column).dim if column in self.tokenizers else 0
        return self._each(pooled, width, column, sources, batch_size)

    def _each(
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
        """Which of the classes, told in words, each image shows.

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

        A list in a column (several captions of one image) is several queries, and as candidates any of them is a
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
        out = between(vectors, ids)
        if not out:
            raise InputError(f"no row has two of this model's columns {self.columns}")
        return out


def _checked_pairs(pairs: Sequence[Sequence[str]] | None, columns: Sequence[str]) -> list[tuple[str, str]]:
    if pairs is None:
        return list(itertools.combinations(columns, 2))
    found = [tuple(p) for p in pairs]
    known = all(len(set(p)) == len(p) == 2 and set(p) <= set(columns) for p in found)
    if not found or not known or len({frozenset(p) for p in found}) != len(found):
        raise ValueError(f"pairs={list(pairs)!r}, expected different pairs of the columns {list(columns)}")
    return found


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
