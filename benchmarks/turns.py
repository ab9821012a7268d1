"""What the benchmarks share: contenders timed in turns in one process, ratios with their spread, one line of the table.

A second means little on a shared machine; a ratio of two times taken one after the other holds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

KEPT = "WORLDTOKENS_BENCH"  # a file that `run.py` gathers the lines from


def turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warm: int = 1
) -> dict[str, list[float]]:
    """Seconds of every contender in every round; each round in the opposite order of the last.

    Args:
        contenders: what to call, by name.
        rounds: how often each is timed.
        warm: calls of each before.
    """
    for _ in range(warm):
        for run in contenders.values():
            run()
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds):
        for name in list(contenders)[:: -1 if i % 2 else 1]:
            start = time.perf_counter()
            contenders[name]()
            took[name].append(time.perf_counter() - start)
    return took


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """How many times faster ours is: the median over rounds, the lowest and the highest."""
    each = [b / a for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(each), min(each), max(each)


def report(what: str, took: Mapping[str, list[float]], work: float, unit: str, note: str = "") -> None:
    """Print one line of the table, and keep it for `run.py`.

    Args:
        what: what was done, e.g. ``"ViT-S/16 forward, fp32, batch 16"``.
        took: seconds a round; ours first, then the peer.
        work: units of work in a round, e.g. images.
        unit: of what, e.g. ``"images"``.
        note: e.g. memory.
    """
    (ours, a), (peer, b) = took.items()
    middle, low, high = ratio(a, b)
    rates = [work / statistics.median(v) for v in (a, b)]
    line = {
        "what": what,
        "ours": f"{rates[0]:.4g} {unit}/s",
        "peer": f"{peer}: {rates[1]:.4g}",
        "ratio": f"{middle:.2f} ({low:.2f} to {high:.2f})",
        "note": note,
    }
    print(f"{what:52} {ours} {line['ours']:>20}   {line['peer']:>28}   {line['ratio']} {note}", flush=True)
    keep(line)


def keep(line: Mapping[str, str]) -> None:
    """Keep a line (what, ours, peer, ratio, note) for `run.py`, where it asked for it."""
    if path := os.environ.get(KEPT):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def high_water(run) -> tuple[float, float]:
    """MB that a call needs above what is held before, and in all: the process's own high-water mark (Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run()
    peak = _status("VmHWM")
    return peak - before, peak


def _status(name: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) / 1024


def scatter(module, seed: int = 0):
    """Every parameter away from its start, gains and biases too: fresh weights hide swapped or missing terms."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * (0.02 if p.ndim > 1 else 0.1))
    return module
