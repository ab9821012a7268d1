"""The contract of a task: front-ends by column name, a trunk, a loss, and what a person asks of it.

A row is a dict whose keys are the front-ends' names: ``{"image": "cat.jpg", "text": "a cat"}``. A task has a
front-end's verbs one level up: `read` a row, `collate` rows, then `loss`. The training loop knows no more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.tokenizers.base import Batch


class evaluating:
    """Within, a module is in eval mode; after, in the mode that it was in: ``with evaluating(model): ...``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.was_training = self.module.training
        self.module.eval()

    def __exit__(self, *exc: Any) -> None:
        self.module.train(self.was_training)


class Task(Part):
    """Front-ends, a trunk and a loss.

    A subclass keeps its front-ends in `self.tokenizers` (an nn.ModuleDict by column name), writes `loss` and
    `evaluate`, and names the figure that picks the best checkpoint in `metric`.
    """

    metric: tuple[str, str] = ("loss", "min")  # (key of `evaluate`'s answer, "min" or "max")

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def read(
        self,
        row: Mapping[str, Any],
        rng: random.Random | None = None,
        augment: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> dict[str, Any]:
        """One row -> its raw tensors by column (CPU). Columns that the row lacks are left out.

        Args:
            row: values by column. A list (several captions of one image) means: draw one with `rng`, or
                take the first without it. A tuple is one value, such as a sound's (waveform, sample_rate).
            rng: given in training.
            augment: by column, what to do with a raw tensor in training.

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
        """Rows from `read` -> one batch: a front-end's batch by column, and for each which rows it comes from.

        ``batch["has"][column]`` is a tuple of row numbers, or None when every row has the column.
        ``batch["weight"]`` is what the batch counts for when several are averaged (here: rows).
        """
        batch = Batch(weight=len(rows), has={})
        for name, tokenizer in self.tokenizers.items():
            places = tuple(i for i, r in enumerate(rows) if name in r)
            if places:
                batch[name] = tokenizer.collate([rows[i][name] for i in places])
                batch["has"][name] = None if len(places) == len(rows) else places
        return batch

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """A batch on the device -> ``{"loss": mean over the batch's weight, ...figures to show}``."""
        raise NotImplementedError

    def evaluate(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> dict[str, float]:
        """Figures on held-out rows, by name. Leaves the module's train / eval mode as it found it."""
        raise NotImplementedError
