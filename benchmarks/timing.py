"""What the benchmarks share: interleaved timing in one process, ratios with their range, recording of results.

On a shared machine absolute times vary, but ratios of times measured one right after the other are stable.
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

RESULTS_FILE = "WORLDTOKENS_BENCH"  # environment variable: the file in which `run.py` collects results


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warm: int = 1
) -> dict[str, list[float]]:
    """Seconds of every contender in every round; the order is reversed from round to round.

    Args:
        contenders: functions by name.
        rounds: number of timed calls of each.
        warm: warm-up calls of each.
    """
    for _ in range(warm):
        for run in contenders.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds):
        for name in list(contenders)[:: -1 if i % 2 else 1]:
            start = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def speedup(ours: list[float], peer: list[float]) -> tuple[float, float, float]:
    """Time of the peer divided by ours: median over rounds, minimum and maximum."""
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def report(what: str, seconds: Mapping[str, list[float]], work: float, unit: str, note: str = "") -> None:
    """Print one line of the table, and record it for `run.py`.

    Args:
        what: the workload, e.g. ``"ViT-S/16 forward, fp32, batch 16"``.
        seconds: seconds per round of ours (first) and of the peer.
        work: units of work per round, e.g. number of images.
        unit: the unit, e.g. ``"images"``.
        note: further figures, e.g. memory.
    """
    (ours, a), (peer, b) = seconds.items()
    median, low, high = speedup(a, b)
    rates = [work / statistics.median(v) for v in (a, b)]
    line = {
        "what": what,
        "ours": f"{rates[0]:.4g} {unit}/s",
        "peer": f"{peer}: {rates[1]:.4g}",
        "ratio": f"{median:.2f} ({low:.2f} to {high:.2f})",
        "note": note,
    }
    print(f"{what:52} {ours} {line['ours']:>20}   {line['peer']:>28}   {line['ratio']} {note}", flush=True)
    record(line)


def record(line: Mapping[str, str]) -> None:
    """Append a line (what, ours, peer, ratio, note) to the results file of `run.py`, if it runs the benchmark."""
    if path := os.environ.get(RESULTS_FILE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def peak_memory(run) -> tuple[float, float]:
    """Peak MB of a call above the memory before it, and in all: the resident set of the process (Linux only)."""
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


def perturb(module, seed: int = 0):
    """Add noise to every parameter, also gains and biases: freshly initialised ones hide swapped or missing terms."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * (0.02 if p.ndim > 1 else 0.1))
    return module
