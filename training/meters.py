"""Running averages of losses and the throughput of a run, without a device synchronisation per step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class AverageMeters:
    """Weighted averages of a step's outputs, summed on the device; skipped steps do not count."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.device, self.ranks = device, ranks
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}  # name -> (sum of value x weight, sum of weight)
        self.skipped, self.in_a_row = self._zero(), self._zero()
        self._step: list[tuple[dict[str, Any], float]] = []  # micro-batches of the current step

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self.device)

    def add(self, out: dict[str, Any], weight: float) -> None:
        """Add one micro-batch of the current step."""
        self._step.append(({k: v.detach() if isinstance(v, Tensor) else v for k, v in out.items()}, weight))

    def step_loss(self) -> Tensor:
        """The sum of the current step's losses, the same on every rank; only useful to test whether it is finite."""
        total = torch.stack([out["loss"].float() for out, _ in self._step]).sum()
        if self.ranks > 1:
            torch.distributed.all_reduce(total)
        return total

    def end_step(self, taken: Tensor) -> None:
        """End the step; `taken` is 1.0, or 0.0 for a skipped step."""
        for out, weight in self._step:
            for name, value in out.items():
                value = torch.as_tensor(value, dtype=torch.float32, device=self.device) * weight
                value = torch.where(taken > 0, value, 0.0)  # not a product: 0 x NaN is NaN
                known = self.sums.get(name)
                share = taken * weight
                self.sums[name] = (known[0] + value, known[1] + share) if known else (value, share)
        self.skipped = self.skipped + 1 - taken
        self.in_a_row = (self.in_a_row + 1) * (1 - taken)
        self._step = []

    def read(self) -> tuple[dict[str, float], int, int]:
        """Synchronise with the device and reset.

        Returns:
            Averages over all ranks since the last call, the number of steps skipped since then, and how many of the
            latest steps were skipped in a row.
        """
        flat = [self.skipped, self.in_a_row, *(v for pair in self.sums.values() for v in pair)]
        skipped, in_a_row, *values = torch.stack(flat).tolist()
        sums = {n: (values[2 * i], values[2 * i + 1]) for i, n in enumerate(self.sums)}
        if self.ranks > 1:  # as objects, since a rank whose batches lack a column may lack its values
            gathered: list[Any] = [None] * self.ranks
            torch.distributed.all_gather_object(gathered, sums)
            names = dict.fromkeys(n for each in gathered for n in each)
            sums = {n: tuple(map(sum, zip(*(g[n] for g in gathered if n in g), strict=True))) for n in names}
        self.sums, self.skipped = {}, self._zero()
        return {n: v / w for n, (v, w) in sums.items() if w}, int(skipped), int(in_a_row)


class Throughput:
    """Training samples per second; pauses for evaluation and saving do not count."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.start = self.mark = time.monotonic()
        self.pause = self.mark_pause = 0.0
        self.steps = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside this context does not count."""
        began = time.monotonic()
        yield
        self.pause += time.monotonic() - began

    def since_last(self, steps: int) -> float:
        """Samples/s since the last call; `steps` counts from the start of this process."""
        now = time.monotonic()
        spent = now - self.mark - (self.pause - self.mark_pause)
        per_second = (steps - self.steps) * self.batch / max(spent, 1e-9)
        self.mark, self.mark_pause, self.steps = now, self.pause, steps
        return per_second

    def overall(self) -> float:
        """Samples/s from the start to the last call of `since_last`."""
        return self.steps * self.batch / max(self.mark - self.start - self.mark_pause, 1e-9)
