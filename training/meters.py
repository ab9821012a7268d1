"""Averages and speed of a run, kept so that no step waits for the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Tally:
    """Sums of figures, on the device, weighted as their batches are; steps left out do not count."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.device, self.ranks = device, ranks
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}  # name -> (sum of value x weight, sum of weight)
        self.skipped, self.in_a_row = self._zero(), self._zero()
        self._open: list[tuple[dict[str, Any], float]] = []

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self.device)

    def add(self, out: dict[str, Any], weight: float) -> None:
        """One part of a step."""
        self._open.append(({k: v.detach() if isinstance(v, Tensor) else v for k, v in out.items()}, weight))

    def step_loss(self) -> Tensor:
        """The open step's summed loss: only good for asking whether it is finite. The same on every rank."""
        total = torch.stack([out["loss"].float() for out, _ in self._open]).sum()
        if self.ranks > 1:
            torch.distributed.all_reduce(total)
        return total

    def close(self, made: Tensor) -> None:
        """End the step; `made` is 1.0, or 0.0 for a step left out."""
        for out, weight in self._open:
            for name, value in out.items():
                value = torch.as_tensor(value, dtype=torch.float32, device=self.device) * weight
                value = torch.where(made > 0, value, 0.0)  # not a product: 0 x NaN is NaN
                known = self.sums.get(name)
                share = made * weight
                self.sums[name] = (known[0] + value, known[1] + share) if known else (value, share)
        self.skipped = self.skipped + 1 - made
        self.in_a_row = (self.in_a_row + 1) * (1 - made)
        self._open = []

    def read(self) -> tuple[dict[str, float], int, int]:
        """Averages over all ranks, steps left out since the last read, how many of the last ones in a row."""
        flat = [self.skipped, self.in_a_row, *(v for pair in self.sums.values() for v in pair)]
        skipped, in_a_row, *values = torch.stack(flat).tolist()
        sums = {n: (values[2 * i], values[2 * i + 1]) for i, n in enumerate(self.sums)}
        if self.ranks > 1:  # as objects, since a rank whose batches lack a column may lack its figures
            parts: list[Any] = [None] * self.ranks
            torch.distributed.all_gather_object(parts, sums)
            names = dict.fromkeys(n for part in parts for n in part)
            sums = {n: tuple(map(sum, zip(*(p[n] for p in parts if n in p), strict=True))) for n in names}
        self.sums, self.skipped = {}, self._zero()
        return {n: v / w for n, (v, w) in sums.items() if w}, int(skipped), int(in_a_row)


class Speed:
    """Rows a second, without the pauses in which nothing is trained."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.start = self.mark = time.monotonic()
        self.pause = self.mark_pause = 0.0
        self.steps = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.pause += time.monotonic() - began

    def since(self, steps: int) -> float:
        """Over the steps since this was last asked; `steps` counts from the start."""
        now = time.monotonic()
        spent = now - self.mark - (self.pause - self.mark_pause)
        per_second = (steps - self.steps) * self.batch / max(spent, 1e-9)
        self.mark, self.mark_pause, self.steps = now, self.pause, steps
        return per_second

    def overall(self) -> float:
        return self.steps * self.batch / max(self.mark - self.start - self.mark_pause, 1e-9)
