"""Classification of one column: a tokenizer, a trunk, pooling and a linear head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.config import make_norm
from worldtokens.backbone.pooling import POOLS, AttentionPool, default_pool, pool_tokens
from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import Task, evaluating, zero_loss
from worldtokens.tasks.classification.mixing import Mix, normalized_images, soft_cross_entropy, soft_labels
from worldtokens.tasks.language.loss import IGNORE
from worldtokens.tokenizers.base import Batch, Tokenizer


class Prediction(NamedTuple):
    """The result of `Classifier.predict`: for every sample the k likeliest classes, best first, with probabilities."""

    names: list[list[str | int]]  # B lists of k names, or indices where classes have no names
    probabilities: Tensor  # (B, k) float, in that order


class Classifier(Task):
    """A classifier of one column, of any modality.

    Args:
        tokenizer: the tokenizer; its column is named after its modality (``"image"``), or give ``{"photo": ...}``.
        trunk: a Transformer or Recurrent of the tokenizer's width.
        classes: class names, or their number. 0: no head, `forward` returns the pooled features.
        pool: ``"mean" | "first" | "last" | "patches"`` (mean without class token and registers), ``"prefix"`` (class
            token and registers concatenated, as in distilled DeiT) or an `AttentionPool`. Default: the last token for
            causal attention, else the class token if there is one, else the mean.
        pool_norm: adds a norm between pooling and head.
        label_smoothing: share of the target that is spread evenly over the classes, 0 to below 1.
        label: column of a row's class, by name or index. A row whose class is None or -100 stays in the batch, but does
            not contribute to the loss.
        mixup, cutmix: in training, mix neighbouring images of a batch and their labels; alpha of the Beta distribution
            of the mixing ratio, 0 to disable. With both, each batch draws one of them.

    Raises:
        ValueError: widths that do not match, or a setting out of its range.
    """

    metric = ("top1", "max")

    def __init__(
        self,
        tokenizer: Tokenizer | dict[str, Tokenizer],
        trunk: Part,
        classes: int | list[str],
        pool: str | AttentionPool | None = None,
        pool_norm: bool = False,
        label_smoothing: float = 0.0,
        label: str = "label",
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__()
        tokenizers = tokenizer if isinstance(tokenizer, Mapping) else {tokenizer.modality: tokenizer}
        if len(tokenizers) != 1 or label in tokenizers:
            raise ValueError(f"Classifier takes one column besides {label!r}, got {sorted(tokenizers)}")
        ((self.column, front),) = tokenizers.items()
        if front.dim != trunk.dim:
            raise ValueError(f"the tokenizer has dim={front.dim}, the trunk dim={trunk.dim}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing}, expected 0 to below 1")
        self.names = None if isinstance(classes, int) else list(classes)
        if self.names is not None and len(set(self.names)) != len(self.names):
            raise ValueError("classes contain a name twice")
        self.classes = classes if isinstance(classes, int) else len(classes)
        self.label, self.label_smoothing, self.mix = label, label_smoothing, Mix(mixup, cutmix)
        self.tokenizers, self.trunk = nn.ModuleDict(tokenizers), trunk
        self.pool = default_pool(front) if pool is None else pool
        if not isinstance(self.pool, AttentionPool) and self.pool not in (*POOLS, "prefix"):
            raise ValueError(f"pool={pool!r}, expected one of {(*POOLS, 'prefix')} or an AttentionPool")
        self.width = trunk.dim * (getattr(front, "prefix", 0) if self.pool == "prefix" else 1)
        if not self.width or (pool_norm and self.pool == "prefix"):
            raise ValueError("pool='prefix' needs a class token or registers, and takes no pool_norm")
        self.norm: nn.Module = nn.Identity()
        if pool_norm:
            self.norm = make_norm(trunk.cfg) if hasattr(trunk, "cfg") else nn.LayerNorm(trunk.dim)
        self.head: nn.Linear | nn.Identity = nn.Identity()
        if self.classes:
            self.head = nn.Linear(self.width, self.classes)
            nn.init.normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        return super().config_args(folder) | {"tokenizer": dict(self.tokenizers)}

    # ---- rows --------------------------------------------------------------------------------------------

    def read(
        self,
        row: Mapping[str, Any],
        rng=None,
        augment: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> dict[str, Any]:
        """Reads one row into its raw tensor by column, and its class as an index if the row has one.

        Raises:
            InputError: the value cannot be read, or the class is unknown.
        """
        raws = super().read(row, rng, augment)
        if not self._unlabelled(row):
            raws[self.label] = self.class_index(row[self.label])
        return raws

    def _unlabelled(self, row: Mapping[str, Any]) -> bool:
        value = row.get(self.label)
        return value is None or (isinstance(value, int) and value == IGNORE)

    def class_index(self, label: str | int) -> int:
        """The index of a class given by name or index.

        Raises:
            InputError: no such class.
        """
        if self.names is not None and label in self.names:
            return self.names.index(label)
        if isinstance(label, str) and label.isdecimal():  # a cell of a table
            label = int(label)
        if isinstance(label, bool) or not hasattr(label, "__index__") or not 0 <= label < self.classes:
            known = f"one of {self.names[:10]} or " if self.names else ""
            raise InputError(f"{self.label} is {label!r}, expected {known}an index below {self.classes}")
        return label.__index__()

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Collates rows from `read` into one batch.

        ``batch[label]`` is (B,) int64 for the rows that have the column, -100 where such a row has no class.
        ``batch["weight"]`` is the number of rows that have both.
        """
        batch = super().collate(rows)
        labels = [r.get(self.label, IGNORE) for r in rows if self.column in r]
        batch[self.label] = torch.tensor(labels, dtype=torch.long)
        batch["weight"] = sum(label != IGNORE for label in labels)
        return batch

    # ---- forward -----------------------------------------------------------------------------------------

    def features(self, batch: Mapping[str, Batch | Tensor]) -> Tensor:
        """Features before the head, (B, dim).

        Args:
            batch: the tokenizer's batch by column, or a preprocessed tensor.
        """
        front = self.tokenizers[self.column]
        tokens = self.trunk(front(self._column_batch(batch)))
        return self.norm(pool_tokens(tokens, self.pool, getattr(front, "prefix", 0)))

    def _column_batch(self, batch: Mapping[str, Batch | Tensor]) -> Batch | Tensor:
        if self.column not in batch:
            raise InputError(f"the batch has {sorted(batch)}, expected the column {self.column!r}")
        return batch[self.column]

    def forward(self, batch: Mapping[str, Batch | Tensor]) -> Tensor:
        """Computes logits (B, classes) from ``{"image": ...}``."""
        return self.head(self.features(batch))

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy with label smoothing, and accuracy (`top1`), over the rows with a class.

        Without any such row the loss is 0, with a graph. For `top1`, a mixed image has the class of its larger part.
        """
        if self.column not in batch:
            return {"loss": zero_loss(self)}
        target = batch.get(self.label)
        if self.training and self.mix:
            front = self.tokenizers[self.column]
            images = normalized_images(front, self._column_batch(batch))
            if target is None:
                target = torch.full((len(images),), IGNORE, device=images.device)
            images, labels = self.mix(images, soft_labels(target, self.classes))
            logits = self({self.column: images}).float()
            loss = soft_cross_entropy(logits, labels, self.label_smoothing)
            known, target = labels.sum(-1) > 0, labels.argmax(-1)
        else:
            logits = self(batch).float()
            if target is None:
                target = torch.full((len(logits),), IGNORE, device=logits.device)
            known = target != IGNORE
            total = F.cross_entropy(
                logits, target, ignore_index=IGNORE, label_smoothing=self.label_smoothing, reduction="sum"
            )
            loss = total / known.sum().clamp(min=1)
        correct = known & (logits.detach().argmax(-1) == target)
        return {"loss": loss, "top1": correct.sum() / known.sum().clamp(min=1)}

    # ---- inference ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, sources: Sequence[Any], batch_size: int = 64) -> Tensor:
        """Logits (B, classes) of files or objects that the tokenizer's `read` accepts, in eval mode."""
        front, out = self.tokenizers[self.column], []
        with evaluating(self):
            for i in range(0, len(sources), batch_size):
                raws = [front.read(s) for s in sources[i : i + batch_size]]
                out.append(self({self.column: front.collate(raws).to(self.device)}))
        width = self.classes or self.width
        return torch.cat(out) if out else torch.zeros(0, width, device=self.device)

    def predict(self, sources: Sequence[Any] | str | bytes, top: int = 5, batch_size: int = 64) -> Prediction:
        """Predicts the class of each source.

        Args:
            sources: a list of what the tokenizer's `read` accepts, or one path.
            top: number of classes per source, best first; at most all.
            batch_size: sources per forward pass.

        Returns:
            `Prediction(names, probabilities)`.

        Raises:
            InputError: a source cannot be read, or this model has no head.
        """
        if not self.classes:
            raise InputError("this model has no head (classes=0): forward and logits return its features")
        sources = [sources] if isinstance(sources, str | bytes | Path) else sources
        best = self.logits(sources, batch_size).float().softmax(-1).topk(min(top, self.classes))
        names = [[n if self.names is None else self.names[n] for n in row] for row in best.indices.tolist()]
        return Prediction(names, best.values)

    def evaluate(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> dict[str, float]:
        """Accuracy ``top1`` and ``top5``, ``macro`` (recall averaged over the classes present) and ``loss``.

        Raises:
            InputError: no rows, or a row without a class or without the column.
        """
        logits, target = self._logits_and_targets(rows, batch_size)
        hits = logits.topk(min(5, self.classes)).indices == target[:, None]  # (n, 5)
        counts = torch.bincount(target, minlength=self.classes)
        correct = torch.bincount(target[hits[:, 0]], minlength=self.classes)
        return {
            "top1": float(hits[:, 0].float().mean()),
            "top5": float(hits.any(1).float().mean()),
            "macro": float((correct / counts)[counts > 0].mean()),
            "loss": float(F.cross_entropy(logits, target)),
        }

    def confusion(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> Tensor:
        """Confusion matrix (classes, classes) int64: rows are true classes, columns are predicted classes.

        `figures.confusion.confusion_figure` draws it.

        Raises:
            InputError: as `evaluate`.
        """
        logits, target = self._logits_and_targets(rows, batch_size)
        pairs = target * self.classes + logits.argmax(-1)
        return torch.bincount(pairs, minlength=self.classes**2).view(self.classes, self.classes)

    def _logits_and_targets(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Logits (n, classes) float32 and true classes (n,), on the CPU."""
        if not self.classes:
            raise InputError("this model has no head (classes=0): it makes no predictions to count")
        if not len(rows):
            raise InputError("no rows to evaluate")
        logits, target = [], []
        for i in range(0, len(rows), batch_size):
            sources = []
            for index, row in enumerate((rows[j] for j in range(i, min(i + batch_size, len(rows)))), i):
                if self._unlabelled(row) or row.get(self.column) is None:
                    raise InputError(f"row {index} lacks {self.column!r} or {self.label!r}")
                source = row[self.column]
                sources.append(source[0] if isinstance(source, list) else source)
                target.append(self.class_index(row[self.label]))
            logits.append(self.logits(sources, batch_size).float().cpu())
        return torch.cat(logits), torch.tensor(target)
