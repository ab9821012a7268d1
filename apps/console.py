"""What the commands share: progress bars, and the choice of the device."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from worldtokens.errors import InputError


@contextlib.contextmanager
def progress(label: str, every: float = 10.0) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr in a terminal, a line every `every` seconds elsewhere; yields ``report(done, total)``."""
    console = Console(stderr=True)
    if console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            print(f"{label}: {done} of {total}", file=sys.stderr, flush=True)

    yield report


def pick_device(requested: str | None) -> str:
    """The requested device; by default the GPU if there is one, else the CPU.

    Raises:
        InputError: torch does not know the device, or this machine does not have it.
    """
    import torch

    if requested is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return str(torch.empty(0, device=requested).device)
    except (RuntimeError, AssertionError) as e:
        raise InputError(
            f"--device {requested}: {str(e).splitlines()[0]}; expected cpu, cuda or cuda:N"
        ) from e
