"""Which of the known classes a sample belongs to: one front-end, a trunk, pooling, a linear head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.backbone.config import make_norm
from worldtokens.backbone.pooling import POOLS, AttentionPool, pool_tokens, usual_pool
from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tasks.base import Task, evaluating
from worldtokens.tasks.classification.mixing import Mix, pictures_of, soft, soft_cross_entropy
from worldtokens.tasks.language.loss import IGNORE
from worldtokens.tokenizers.base import Batch, Tokenizer


class Prediction(NamedTuple):
    """What `Classifier.predict` gives: for every sample the classes, best first, and their probabilities."""

    names: list[list[str | int]]  # B lists of k names, or numbers where the classes have none
    probabilities: Tensor  # (B, k) float, in that order


class Classifier(Task):
    """A classifier of one column, of whatever modality.

    Args:
        tokenizer: the front-end; its column is named as its modality (``"image"``), or give ``{"photo": ...}``.
        trunk: a Transformer or Recurrent of the front-end's width.
        classes: their names, or how many. 0: no head, `forward` gives the pooled features.
        pool: ``"mean" | "first" | "last" | "patches"`` (the mean without class token and registers), ``"prefix"`` (these
            put one after another, as distilled DeiT reads them) or an `AttentionPool`. Default: the last token where
            reading is causal, the class token where there is one, else the mean.
        pool_norm: a norm between pooling and head.
        label_smoothing: share of the target spread evenly over the classes, 0 to below 1.
        label: the column that holds a row's class, by name or number. A row whose class is None or -100 is read, but
            is not learned from.
        mixup, cutmix: in training, mix neighbouring images of a batch and their labels; the alpha of the Beta
            distribution that a mixture's share is drawn from, 0 for never. With both, each batch draws one of them.

    Raises:
        ValueError: widths that do not fit, or a setting out of its range.
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
        given = tokenizer if isinstance(tokenizer, Mapping) else {tokenizer.modality: tokenizer}
        if len(given) != 1 or label in given:
            raise ValueError(f"Classifier reads one column beside {label!r}, got {sorted(given)}")
        ((self.column, front),) = given.items()
        if front.dim != trunk.dim:
            raise ValueError(f"the front-end gives tokens {front.dim} wide, the trunk takes {trunk.dim}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing}, expected 0 to below 1")
        self.names = None if isinstance(classes, int) else list(classes)
        if self.names is not None and len(set(self.names)) != len(self.names):
            raise ValueError("classes hold the same name twice")
        self.classes = classes if isinstance(classes, int) else len(classes)
        self.label, self.label_smoothing, self.mix = label, label_smoothing, Mix(mixup, cutmix)
        self.tokenizers, self.trunk = nn.ModuleDict(given), trunk
        self.pool = usual_pool(front) if pool is None else pool
        if not isinstance(self.pool, AttentionPool) and self.pool not in (*POOLS, "prefix"):
            raise ValueError(f"pool={pool!r}, expected one of {(*POOLS, 'prefix')} or an AttentionPool")
        self.width = trunk.dim * (getattr(front, "prefix", 0) if self.pool == "prefix" else 1)
        if not self.width or (pool_norm and self.pool == "prefix"):
            raise ValueError("pool='prefix' needs a class token or registers, and takes no pool_norm")
        self.norm = nn.Identity()
        if pool_norm:
            self.norm = make_norm(trunk.cfg) if hasattr(trunk, "cfg") else nn.LayerNorm(trunk.dim)
        self.head = nn.Identity()
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
        """One row -> its raw tensor by column, and its class as a number where the row tells it.

        Raises:
            InputError: the value cannot be read, or the class is not known.
        """
        raws = super().read(row, rng, augment)
        if not self._unlabelled(row):
            raws[self.label] = self.number(row[self.label])
        return raws

    def _unlabelled(self, row: Mapping[str, Any]) -> bool:
        value = row.get(self.label)
        return value is None or (isinstance(value, int) and value == IGNORE)

    def number(self, label: str | int) -> int:
        """A class, by name or number -> its number.

        Raises:
            InputError: there is no such class.
        """
        if self.names is not None and label in self.names:
            return self.names.index(label)
        if isinstance(label, str) and label.isdecimal():  # a table's cell
            label = int(label)
        if isinstance(label, bool) or not hasattr(label, "__index__") or not 0 <= label < self.classes:
            known = f"one of {self.names[:10]} or " if self.names else ""
            raise InputError(f"{self.label} is {label!r}, expected {known}a number below {self.classes}")
        return label.__index__()

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows from `read` -> one batch.

        ``batch[label]`` is (B,) int64 for the rows that have the column, -100 where such a row has no class; the batch
        weighs as many rows as have both.
        """
        batch = super().collate(rows)
        labels = [r.get(self.label, IGNORE) for r in rows if self.column in r]
        batch[self.label] = torch.tensor(labels, dtype=torch.long)
        batch["weight"] = sum(label != IGNORE for label in labels)
        return batch

    # ---- forward -----------------------------------------------------------------------------------------

    def features(self, batch: Mapping[str, Batch | Tensor]) -> Tensor:
        """What the head reads: (B, dim).

        Args:
            batch: the front-end's batch by column, or a preprocessed tensor.
        """
        front = self.tokenizers[self.column]
        tokens = self.trunk(front(self._own(batch)))
        return self.norm(pool_tokens(tokens, self.pool, getattr(front, "prefix", 0)))

    def _own(self, batch: Mapping[str, Batch | Tensor]) -> Batch | Tensor:
        if self.column not in batch:
            raise InputError(f"the batch has {sorted(batch)}, expected the column {self.column!r}")
        return batch[self.column]

    def forward(self, batch: Mapping[str, Batch | Tensor]) -> Tensor:
        """``{"image": ...}`` -> logits (B, classes)."""
        return self.head(self.features(batch))

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy with label smoothing, and the share of right answers (`top1`), over the rows with a class.

        Without any such row the loss is 0, with a graph. Mixed images count as the class of their larger part.
        """
        if self.column not in batch:
            zero = sum(p.sum() for p in self.parameters() if p.requires_grad) * 0.0
            return {"loss": zero}
        target = batch.get(self.label)
        if self.training and self.mix:
            front = self.tokenizers[self.column]
            pictures = pictures_of(front, self._own(batch))
            if target is None:
                target = torch.full((len(pictures),), IGNORE, device=pictures.device)
            pictures, labels = self.mix(pictures, soft(target, self.classes))
            logits = self({self.column: pictures}).float()
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
        right = known & (logits.detach().argmax(-1) == target)
        return {"loss": loss, "top1": right.sum() / known.sum().clamp(min=1)}

    # ---- what a person asks ------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, sources: Sequence[Any], batch_size: int = 64) -> Tensor:
        """Files or objects, as the front-end's `read` takes them -> (B, classes), in eval mode."""
        front, out = self.tokenizers[self.column], []
        with evaluating(self):
            for i in range(0, len(sources), batch_size):
                raws = [front.read(s) for s in sources[i : i + batch_size]]
                out.append(self({self.column: front.collate(raws).to(self.device)}))
        width = self.classes or self.width
        return torch.cat(out) if out else torch.zeros(0, width, device=self.device)

    def predict(self, sources: Sequence[Any] | str | bytes, top: int = 5, batch_size: int = 64) -> Prediction:
        """What each source shows.

        Args:
            sources: a list of what the front-end's `read` takes, or one path.
            top: how many classes to tell, the best first; at most all.

        Returns:
            `Prediction(names, probabilities)`.

        Raises:
            InputError: a source cannot be read, or this model has no head.
        """
        if not self.classes:
            raise InputError("this model has no head (classes=0): forward and logits give its features")
        sources = [sources] if isinstance(sources, str | bytes | Path) else sources
        found = self.logits(sources, batch_size).float().softmax(-1).topk(min(top, self.classes))
        names = [[n if self.names is None else self.names[n] for n in row] for row in found.indices.tolist()]
        return Prediction(names, found.values)

    def evaluate(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> dict[str, float]:
        """``top1``, ``top5`` (shares of rows whose class is the first, or among the first five), ``macro`` (the mean over
        the classes present of each one's share of right answers) and ``loss``.

        Raises:
            InputError: no rows, or one without its class or its column.
        """
        logits, target = self._answers(rows, batch_size)
        hits = logits.topk(min(5, self.classes)).indices == target[:, None]  # (n, 5)
        counts = torch.bincount(target, minlength=self.classes)
        right = torch.bincount(target[hits[:, 0]], minlength=self.classes)
        return {
            "top1": float(hits[:, 0].float().mean()),
            "top5": float(hits.any(1).float().mean()),
            "macro": float((right / counts)[counts > 0].mean()),
            "loss": float(F.cross_entropy(logits, target)),
        }

    def confusion(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> Tensor:
        """How often each class was taken for each: (classes, classes) int64, the truth down, the answer across.

        `apps.confusion.confusion_figure` makes an image of it.

        Raises:
            InputError: as `evaluate`.
        """
        logits, target = self._answers(rows, batch_size)
        pairs = target * self.classes + logits.argmax(-1)
        return torch.bincount(pairs, minlength=self.classes**2).view(self.classes, self.classes)

    def _answers(self, rows: Sequence[Mapping[str, Any]], batch_size: int) -> tuple[Tensor, Tensor]:
        """Logits (n, classes) float32 and true classes (n,), on the CPU."""
        if not self.classes:
            raise InputError("this model has no head (classes=0): there are no answers to count")
        if not len(rows):
            raise InputError("no rows to evaluate")
        logits, target = [], []
        for i in range(0, len(rows), batch_size):
            sources = []
            for at, row in enumerate((rows[j] for j in range(i, min(i + batch_size, len(rows)))), i):
                if self._unlabelled(row) or row.get(self.column) is None:
                    raise InputError(f"row {at} lacks {self.column!r} or {self.label!r}")
                source = row[self.column]
                sources.append(source[0] if isinstance(source, list) else source)
                target.append(self.number(row[self.label]))
            logits.append(self.logits(sources, batch_size).float().cpu())
        return torch.cat(logits), torch.tensor(target)
