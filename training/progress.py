"""Progress of a run: a live bar in a terminal, plain lines elsewhere, curves in TensorBoard.

A line: `step 120/1000  loss 2.312  lr 9.8e-04  412 samples/s  eta 3:12`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def format_seconds(seconds: float) -> str:
    """70 -> "1:10", 3700 -> "1:01:40"."""
    minutes, s = divmod(round(max(0.0, seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def format_metrics(metrics: dict[str, float]) -> str:
    """{"loss": 2.3121, "lr": 0.00098} -> "loss 2.312  lr 9.8e-04"."""
    return "  ".join(f"{k} {v:.1e}" if k == "lr" else f"{k} {v:.4g}" for k, v in metrics.items())


class Progress:
    """Prints and logs a run's progress; does nothing on ranks other than 0.

    Args:
        steps: optimizer steps of the whole run.
        first: the step at which this process starts or resumes.
        active: False on ranks other than 0.
        logs: folder for TensorBoard, or None.
        every: seconds between plain lines where stdout is no terminal.
    """

    def __init__(self, steps: int, first: int, active: bool, logs: Path | None, every: float = 10.0) -> None:
        self.steps, self.first, self.active, self.every = steps, first, active, every
        self.bar = self.writer = None
        self.printed = -float("inf")
        if active and sys.stdout.isatty():
            import rich.progress as rich

            columns = (rich.BarColumn(bar_width=24), rich.MofNCompleteColumn())
            self.bar = rich.Progress(*columns, rich.TextColumn("{task.description}"))
            self.bar_task = self.bar.add_task("reading the first batch", total=steps, completed=first)
        if active and logs is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(logs), purge_step=first if first else None)

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.writer is not None:
            self.writer.close()

    def print(self, line: str) -> None:
        """Print one line, above the bar if there is one."""
        if not self.active:
            return
        if self.bar is not None:  # markup off: a path may hold square brackets
            self.bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def log(self, group: str, metrics: dict[str, float], step: int) -> None:
        """Write metrics to TensorBoard as `group/name`."""
        if self.writer is not None:
            for name, value in metrics.items():
                self.writer.add_scalar(f"{group}/{name}", value, step)

    def update(self, step: int, metrics: dict[str, float], samples_per_second: float, eta: float) -> None:
        """Show `step` steps done, averages since the last call, and the seconds left."""
        if not self.active:
            return
        self.log("train", metrics | {"samples_per_second": samples_per_second}, step)
        line = f"{format_metrics(metrics)}  {samples_per_second:,.0f} samples/s  eta {format_seconds(eta)}"
        if self.bar is not None:
            self.bar.update(self.bar_task, completed=step, description=line)
        elif step == self.steps or time.monotonic() - self.printed >= self.every:
            self.printed = time.monotonic()
            self.print(f"step {step}/{self.steps}  {line}")
