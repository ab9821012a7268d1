"""From rows to batches: what batch number k holds is a pure function of (seed, k).

Notable here: nothing depends on the number of workers or on what was read before, so N workers give what none
give, and a resumed run needs no saved reading position but its step. Order comes from (seed, epoch); the
draw of a caption and the augmentation of a row from (seed, epoch, row).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import os
import random
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tasks.base import Task
from worldtokens.tokenizers.base import Batch

Augment = Mapping[str, Callable[[Tensor], Tensor]]
Bad = tuple[tuple[int, str], ...]  # (row number, why it cannot be used)


def mix(*numbers: int) -> int:
    """One 63-bit seed from several whole numbers; near numbers give unrelated seeds."""
    data = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Seed every global generator that a module or a transform may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Global CPU generators are as they were when this ends."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which rows are in which batch.

    Args:
        rows: how many there are.
        batch: rows of one optimizer step, over all processes and the whole accumulation.
        gradient_accumulation_steps: parts that a step's rows are worked through in, one after another.
        ranks: processes.
        rank: this one.
        seed: of the order.

    An epoch is all whole batches of a shuffled order; the rest of the rows waits for another epoch's order.
    Every process makes the same number of steps.

    Raises:
        InputError: the batch cannot be dealt out evenly, or there are fewer rows than one batch.
    """

    rows: int
    batch: int
    gradient_accumulation_steps: int = 1
    ranks: int = 1
    rank: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.gradient_accumulation_steps < 1:
            raise InputError(
                f"batch_size={self.batch}, gradient_accumulation_steps={self.gradient_accumulation_steps}: both must be 1 or more"
            )
        if self.batch % (self.gradient_accumulation_steps * self.ranks):
            raise InputError(
                f"batch_size={self.batch} cannot be dealt out to gradient_accumulation_steps={self.gradient_accumulation_steps} x "
                f"{self.ranks} processes: make it a multiple of {self.gradient_accumulation_steps * self.ranks}"
            )
        if self.rows < self.batch:
            raise InputError(
                f"there are {self.rows} training rows, fewer than one batch of {self.batch}: give more rows, or "
                f"set batch_size to {self.rows} or less"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.rows // self.batch

    def order(self, epoch: int) -> Tensor:
        """(rows,) int64: this epoch's order."""
        generator = torch.Generator().manual_seed(mix(self.seed, 1, epoch))
        return torch.randperm(self.rows, generator=generator)

    def place(self, k: int) -> tuple[int, slice, slice]:
        """Of micro-batch k: its epoch, and in that epoch's order the step's rows and this process's own."""
        step, part = divmod(k, self.gradient_accumulation_steps)
        epoch, at = divmod(step, self.steps_per_epoch)
        own = self.batch // (self.gradient_accumulation_steps * self.ranks)
        first = at * self.batch + (part * self.ranks + self.rank) * own
        return epoch, slice(at * self.batch, (at + 1) * self.batch), slice(first, first + own)


class _Remembering:
    """A front-end whose `read` keeps the raws of files and bytes that it has read, up to a budget.

    Augmentation works on a copy, so that an in-place transform cannot change what is kept.
    """

    def __init__(self, tokenizer: Any, budget: list[int]) -> None:
        self.tokenizer, self.budget, self.kept = tokenizer, budget, {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "tokenizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def read(self, source: Any) -> Tensor:
        if not isinstance(source, str | bytes | os.PathLike):
            return self.tokenizer.read(source)
        raw = self.kept.get(source)
        if raw is not None:
            return raw.clone()
        raw = self.tokenizer.read(source)
        if isinstance(raw, Tensor):
            size = raw.nbytes + (len(source) if isinstance(source, bytes) else 0) + 512
            if size <= self.budget[0]:
                self.budget[0] -= size
                self.kept[source] = raw.clone()
        return raw


def _remembering(task: Task, budget: int) -> Task:
    """The same task, its weights shared, seen through front-ends that remember what they read."""
    left = [budget]
    twin = copy.copy(task)
    twin.__dict__["_modules"] = {n: m for n, m in task._modules.items() if n != "tokenizers"}
    twin.__dict__["tokenizers"] = {n: _Remembering(t, left) for n, t in task.tokenizers.items()}
    return twin


class Batches(torch.utils.data.Dataset):
    """`batches[k]` is micro-batch k of a run, read and collated, with the rows that could not be used.

    A row that raises InputError gives its place to another that is not in the step, drawn from (seed, epoch,
    row), so that batches keep their size and processes stay even.

    Args:
        task: reads and collates.
        rows: a sequence of dicts.
        plan: which rows are in which batch.
        augment: by column, what is done with a raw tensor.
        cache: bytes of raw tensors to keep in memory, 0 for none.
    """

    TRIES = 16  # other rows tried in the place of one that cannot be used

    def __init__(
        self,
        task: Task,
        rows: Sequence[Mapping[str, Any]],
        plan: Plan,
        augment: Augment | None = None,
        cache: int = 0,
    ) -> None:
        self.task, self.rows, self.plan, self.augment = task, rows, plan, augment
        self._reader = _remembering(task, cache) if cache else task
        self._order: tuple[int, Tensor] | None = None
        self._bad: dict[int, str] = {}

    def __len__(self) -> int:
        return self.plan.steps_per_epoch * self.plan.gradient_accumulation_steps

    def __getitem__(self, k: int) -> tuple[Batch | None, Bad]:
        epoch, whole, own = self.plan.place(k)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.plan.order(epoch)
        order = self._order[1]
        taken = set(order[whole].tolist())
        bad: dict[int, str] = {}
        with generators_kept():
            read = [self._read_or_other(i, epoch, taken, bad) for i in order[own].tolist()]
            batch = self._collate([r for r in read if r is not None], bad)
        return batch, tuple(bad.items())

    def _read_or_other(
        self, i: int, epoch: int, taken: set[int], bad: dict[int, str]
    ) -> tuple[int, dict] | None:
        others = random.Random(mix(self.plan.seed, 3, epoch, i))
        tries = self.TRIES if len(self.rows) > len(taken) else 0
        while True:
            try:
                return i, self._read(i, epoch)
            except InputError as e:
                bad[i] = self._bad[i] = str(e)
            i = None
            while i is None and tries:
                tries -= 1
                other = others.randrange(len(self.rows))
                i = other if other not in taken else None
            if i is None:
                return None

    def _read(self, i: int, epoch: int) -> dict[str, Any]:
        if i in self._bad:
            raise InputError(self._bad[i])
        seed = mix(self.plan.seed, 2, epoch, i)
        if self.augment:
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            random.seed(seed)
        return self._reader.read(self.rows[i], random.Random(seed), self.augment)

    def _collate(self, read: list[tuple[int, dict]], bad: dict[int, str]) -> Batch | None:
        if not read:
            return None
        try:
            return self.task.collate([raws for _, raws in read])
        except InputError:
            good = []
            for i, raws in read:  # which of them is it?
                try:
                    self.task.collate([raws])
                    good.append((i, raws))
                except InputError as e:
                    bad[i] = self._bad[i] = str(e)
            if len(good) == len(read):
                raise
        return self._collate(good, bad)


def _start_worker(_: int) -> None:
    # Ctrl-C reaches the whole process group, and the loop still needs its batches to end the step and save
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def stream(
    batches: Batches, first: int, end: int, workers: int, pin: bool = False
) -> Iterator[tuple[Batch | None, Bad]]:
    """Micro-batches first..end-1 in order, read by that many worker processes (0: in this one).

    One set of workers serves the whole run, so epochs have no seam at which the device waits.
    """
    if workers == 0:
        return (batches[k] for k in range(first, end))
    return iter(
        torch.utils.data.DataLoader(
            batches,
            batch_size=None,
            sampler=range(first, end),
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=4,
            pin_memory=pin,
            worker_init_fn=_start_worker,
            generator=torch.Generator().manual_seed(0),  # else it draws from the global one
            # forked workers share the task's memory; Python's own default starts afresh and pickles it
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
    )


def _as_it_is(x: Any) -> Any:
    return x
