"""Runs `worker.py` in a subprocess: a crash or a hang is reported for the current file, and the others continue."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

TIMEOUT = 60.0  # seconds without output. A file takes well under 1 s, but machines are shared


def supervise(mode: str, folder: Path, total: int, *numbers: int, timeout: float = TIMEOUT) -> list[dict]:
    """Results of `total` items, in order; ``{"crash": ...}`` if the process crashed or hung."""
    results: list[dict] = [{} for _ in range(total)]
    first = 0
    while first < total:
        first = _run(mode, folder, [*numbers, first], results, timeout)
    return results


def _run(mode: str, folder: Path, numbers: list[int], results: list[dict], timeout: float) -> int:
    """Runs one process until it ends; returns the item to continue with."""
    script = Path(__file__).with_name("worker.py")
    command = [sys.executable, str(script), mode, str(folder), *map(str, numbers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    errors = (folder / "stderr.txt").open("w+")
    at, begun, rest = numbers[-1], False, b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as p, errors:
        ready = selectors.DefaultSelector()
        ready.register(p.stdout, selectors.EVENT_READ)
        last = time.monotonic()
        while True:
            # importing torch on a busy machine may take long
            limit = timeout if begun else max(timeout, 300.0)
            if not ready.select(timeout=max(0.0, last + limit - time.monotonic())):
                p.kill()
                results[at] = {"crash": f"no output for {limit:.0f} s"}
                return at + 1
            chunk = os.read(p.stdout.fileno(), 1 << 16)
            if not chunk:
                break
            last = time.monotonic()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in map(json.loads, lines):
                if "begin" in line:
                    at, begun = line["begin"], True
                else:
                    results[line["done"]] = line
                    at = line["done"] + 1
        code = p.wait()
        errors.seek(0)
        tail = errors.read()[-2000:]
    if not begun and code:
        raise RuntimeError(f"the worker did not start: {tail}")
    if code and at < len(results):
        results[at] = {"crash": f"the process ended with {code}: {tail}"}
        return at + 1
    return len(results) if not code else at
