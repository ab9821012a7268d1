"""What a person sees of a run: a live bar in a terminal, plain lines elsewhere, curves in TensorBoard."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def clock(seconds: float) -> str:
    """70 -> "1:10", 3700 -> "1:01:40"."""
    minutes, s = divmod(round(max(0.0, seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def figures_text(figures: dict[str, float]) -> str:
    return "  ".join(f"{k} {v:.4g}" for k, v in figures.items())


class Show:
    """Shows a run's progress; silent on all ranks but the first.

    Args:
        steps: of the whole run.
        first: the step at which it starts or goes on.
        active: False on all ranks but the first, and when nothing shall be shown.
        logs: folder for TensorBoard, or None.
        every: seconds between plain lines where there is no terminal.
    """

    def __init__(self, steps: int, first: int, active: bool, logs: Path | None, every: float = 10.0) -> None:
        self.steps, self.first, self.active, self.every = steps, first, active, every
        self.progress = self.writer = None
        self.printed = -float("inf")
        if active and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"))
            self.progress = Progress(*columns)
            self.bar = self.progress.add_task("reading the first batch", total=steps, completed=first)
        if active and logs is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(logs), purge_step=first if first else None)

    def __enter__(self) -> Show:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.progress is not None:
            self.progress.stop()
        if self.writer is not None:
            self.writer.close()

    def say(self, line: str) -> None:
        if self.active:
            # markup off: a path may hold square brackets
            self.progress.console.print(line, markup=False, highlight=False) if self.progress else print(
                line, flush=True
            )

    def curves(self, group: str, figures: dict[str, float], step: int) -> None:
        if self.writer is not None:
            for name, value in figures.items():
                self.writer.add_scalar(f"{group}/{name}", value, step)

    def step(self, done: int, figures: dict[str, float], per_second: float, left: float) -> None:
        """Called now and then with averages since the last call."""
        if not self.active:
            return
        self.curves("train", figures | {"samples_per_second": per_second}, done)
        line = f"{figures_text(figures)}  {per_second:,.0f} samples/s  {clock(left)} left"
        if self.progress is not None:
            self.progress.update(self.bar, completed=done, description=line)
        elif done == self.steps or time.monotonic() - self.printed >= self.every:
            self.printed = time.monotonic()
            self.say(f"step {done}/{self.steps}  {line}")
