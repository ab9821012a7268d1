"""The contract of a task: one tokenizer per column, a trunk, a loss and inference methods.

A row is a dict whose keys are column names: ``{"image": "cat.jpg", "text": "a cat"}``. A task repeats a tokenizer's
methods one level up: `read` a row, `collate` rows, then `loss`. The training loop uses nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tokenizers.base import Batch


class evaluating:
    """Context manager: puts a module in eval mode and restores its mode on exit. ``with evaluating(model): ...``"""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.was_training = self.module.training
        self.module.eval()

    def __exit__(self, *exc: Any) -> None:
        self.module.train(self.was_training)


def zero_loss(module: nn.Module) -> Tensor:
    """0 with a graph to every trainable parameter, so that no rank waits for a gradient that another has."""
    return cast(Tensor, sum(p.sum() for p in module.parameters() if p.requires_grad)) * 0.0


class Task(Part):
    """Base class: tokenizers, a trunk and a loss.

    A subclass stores its tokenizers in `self.tokenizers` (an nn.ModuleDict by column name), implements `loss` and
    `evaluate`, and names in `metric` the value that selects the best checkpoint.
    """

    tokenizers: Any  # an nn.ModuleDict, whose entries torch types as Module
    metric: tuple[str, str] = ("loss", "min")  # (key in the result of `evaluate`, "min" or "max")

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def read(
        self,
        row: Mapping[str, Any],
        rng: random.Random | None = None,
        augment: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> dict[str, Any]:
        """Reads one row into raw tensors by column (CPU). Columns that the row lacks are skipped.

        Args:
            row: values by column. A list holds alternatives (several captions of one image): `rng` draws one, without
                `rng` the first is taken. A tuple is one value, such as an audio's (waveform, sample_rate).
            rng: random generator, given in training.
            augment: augmentation of the raw tensor, by column; given in training.

        Raises:
            InputError: a value cannot be read.
        """
        raws = {}
        for name, tokenizer in self.tokenizers.items():
            value = row.get(name)
            if isinstance(value, list):
                if not value:
                    continue
                value = rng.choice(value) if rng is not None else value[0]
            if value is None:
                continue
            raw = tokenizer.read(value)
            raws[name] = augment[name](raw) if augment and name in augment else raw
        if not raws:
            raise InputError(
                f"a row has the columns {sorted(row)}, but none of this task's: {sorted(self.tokenizers)}"
            )
        return raws

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Collates rows from `read` into one batch: each tokenizer's batch by column, and which rows have the column.

        ``batch["has"][column]`` is a tuple of row indices, or None when every row has the column.
        ``batch["weight"]`` is the batch's weight when several are averaged (here: the number of rows).
        """
        batch = Batch(weight=len(rows), has={})
        for name, tokenizer in self.tokenizers.items():
            indices = tuple(i for i, r in enumerate(rows) if name in r)
            if indices:
                batch[name] = tokenizer.collate([rows[i][name] for i in indices])
                batch["has"][name] = None if len(indices) == len(rows) else indices
        return batch

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Computes ``{"loss": mean over the batch's weight, ...metrics to log}`` from a batch on the model's device."""
        raise NotImplementedError

    def evaluate(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> dict[str, float]:
        """Computes metrics on held-out rows, by name. Restores the module's train / eval mode."""
        raise NotImplementedError
