"""Training batches from rows: the content of batch k is a pure function of (seed, k).

Notable here: batches do not depend on the number of workers or on earlier reads. So any number of workers gives the
same batches, and a resumed run needs only its step. The row order is seeded by (seed, epoch); the choice of a caption
and the augmentation of a row by (seed, epoch, row).
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
BadRows = tuple[tuple[int, str], ...]  # (row number, why it cannot be used)


def combine_seeds(*numbers: int) -> int:
    """One 63-bit seed from several integers, by hashing; similar numbers give unrelated seeds."""
    data = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global CPU generators of torch, NumPy and Python at exit."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """Which rows are in which batch.

    An epoch is all whole batches of a shuffled order; the remaining rows are dropped, other ones in each epoch. Every
    process makes the same number of steps.

    Args:
        rows: number of training rows.
        batch: rows per optimizer step, over all processes and micro-batches.
        gradient_accumulation_steps: micro-batches per optimizer step.
        ranks: number of processes.
        rank: this process.
        seed: seed of the row order.

    Raises:
        InputError: the batch is not divisible into equal micro-batches, or there are fewer rows than one batch.
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
                f"batch_size={self.batch}, gradient_accumulation_steps={self.gradient_accumulation_steps}: both must "
                "be 1 or more"
            )
        if self.batch % (self.gradient_accumulation_steps * self.ranks):
            raise InputError(
                f"batch_size={self.batch} is not divisible by gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} x {self.ranks} processes: make it a multiple of "
                f"{self.gradient_accumulation_steps * self.ranks}"
            )
        if self.rows < self.batch:
            raise InputError(
                f"there are {self.rows} training rows, fewer than one batch of {self.batch}: add rows, or set batch_size "
                f"to {self.rows} or less"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.rows // self.batch

    def order(self, epoch: int) -> Tensor:
        """Row numbers of an epoch in their order, (rows,) int64."""
        generator = torch.Generator().manual_seed(combine_seeds(self.seed, 1, epoch))
        return torch.randperm(self.rows, generator=generator)

    def locate(self, k: int) -> tuple[int, slice, slice]:
        """Micro-batch k -> (epoch, the step's slice of that epoch's order, this process's slice of it)."""
        step, micro = divmod(k, self.gradient_accumulation_steps)
        epoch, index = divmod(step, self.steps_per_epoch)
        size = self.batch // (self.gradient_accumulation_steps * self.ranks)
        first = index * self.batch + (micro * self.ranks + self.rank) * size
        return epoch, slice(index * self.batch, (index + 1) * self.batch), slice(first, first + size)


class _CachingTokenizer:
    """A front-end whose `read` caches the raw tensors of files and bytes, up to a budget of bytes.

    `read` returns a copy, so that an in-place augmentation cannot change the cache.
    """

    def __init__(self, tokenizer: Any, budget: list[int]) -> None:
        self.tokenizer, self.budget, self.cached = tokenizer, budget, {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "tokenizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def read(self, source: Any) -> Tensor:
        if not isinstance(source, str | bytes | os.PathLike):
            return self.tokenizer.read(source)
        raw = self.cached.get(source)
        if raw is not None:
            return raw.clone()
        raw = self.tokenizer.read(source)
        if isinstance(raw, Tensor):
            size = raw.nbytes + (len(source) if isinstance(source, bytes) else 0) + 512
            if size <= self.budget[0]:
                self.budget[0] -= size
                self.cached[source] = raw.clone()
        return raw


def _with_cache(task: Task, budget: int) -> Task:
    """A shallow copy of the task, its weights shared, whose front-ends cache what they read."""
    shared_budget = [budget]
    twin = copy.copy(task)
    twin.__dict__["_modules"] = {n: m for n, m in task._modules.items() if n != "tokenizers"}
    twin.__dict__["tokenizers"] = {n: _CachingTokenizer(t, shared_budget) for n, t in task.tokenizers.items()}
    return twin


class Batches(torch.utils.data.Dataset):
    """Map-style dataset of micro-batches: `batches[k]` is (collated batch or None, rows that could not be used).

    A row that raises InputError is replaced by another one that is not in the step, drawn from (seed, epoch, row). So
    batches keep their size and all processes have equal ones.

    Args:
        task: reads and collates the rows.
        rows: a sequence of dicts.
        plan: which rows are in which batch.
        augment: by column, a transform of the raw tensor.
        cache: bytes of raw tensors to cache in memory, 0 for none.
    """

    TRIES = 16  # replacement rows tried for a bad row

    def __init__(
        self,
        task: Task,
        rows: Sequence[Mapping[str, Any]],
        plan: BatchPlan,
        augment: Augment | None = None,
        cache: int = 0,
    ) -> None:
        self.task, self.rows, self.plan, self.augment = task, rows, plan, augment
        self._reader = _with_cache(task, cache) if cache else task
        self._order: tuple[int, Tensor] | None = None
        self._bad: dict[int, str] = {}

    def __len__(self) -> int:
        return self.plan.steps_per_epoch * self.plan.gradient_accumulation_steps

    def __getitem__(self, k: int) -> tuple[Batch | None, BadRows]:
        epoch, step_slice, own_slice = self.plan.locate(k)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.plan.order(epoch)
        order = self._order[1]
        taken = set(order[step_slice].tolist())
        bad: dict[int, str] = {}
        with preserve_rng_state():
            read = [self._read_or_replace(i, epoch, taken, bad) for i in order[own_slice].tolist()]
            batch = self._collate([r for r in read if r is not None], bad)
        return batch, tuple(bad.items())

    def _read_or_replace(
        self, i: int, epoch: int, taken: set[int], bad: dict[int, str]
    ) -> tuple[int, dict] | None:
        replacements = random.Random(combine_seeds(self.plan.seed, 3, epoch, i))
        tries = self.TRIES if len(self.rows) > len(taken) else 0
        while True:
            try:
                return i, self._read(i, epoch)
            except InputError as e:
                bad[i] = self._bad[i] = str(e)
            i = None
            while i is None and tries:
                tries -= 1
                other = replacements.randrange(len(self.rows))
                i = other if other not in taken else None
            if i is None:
                return None

    def _read(self, i: int, epoch: int) -> dict[str, Any]:
        if i in self._bad:
            raise InputError(self._bad[i])
        seed = combine_seeds(self.plan.seed, 2, epoch, i)
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
            for i, raws in read:  # find the row that fails
                try:
                    self.task.collate([raws])
                    good.append((i, raws))
                except InputError as e:
                    bad[i] = self._bad[i] = str(e)
            if len(good) == len(read):
                raise
        return self._collate(good, bad)


def _start_worker(_: int) -> None:
    # Ctrl-C reaches the whole process group, but the loop still needs batches to finish the step and save
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def iterate_batches(
    batches: Batches, first: int, end: int, workers: int, pin: bool = False
) -> Iterator[tuple[Batch | None, BadRows]]:
    """Micro-batches first..end-1 in order, loaded by `workers` processes (0: in this one).

    The workers live for the whole run, so the device does not wait at the start of an epoch.
    """
    if workers == 0:
        return (batches[k] for k in range(first, end))
    return iter(
        torch.utils.data.DataLoader(
            batches,
            batch_size=None,
            sampler=range(first, end),
            collate_fn=_identity,
            num_workers=workers,
            prefetch_factor=4,
            pin_memory=pin,
            worker_init_fn=_start_worker,
            generator=torch.Generator().manual_seed(0),  # otherwise it draws from the global generator
            # forked workers share the task's memory; Python's default method would pickle the task
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
    )


def _identity(x: Any) -> Any:
    return x
