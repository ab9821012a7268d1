"""Runs `worker.py` and watches it: a crash or a hang is laid to the file that it was at, and the rest goes on."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

STILL = 60.0  # seconds without an answer: it hangs. A file takes well under one, but machines are shared


def watch(what: str, folder: Path, total: int, *numbers: int, still: float = STILL) -> list[dict]:
    """What came of each of `total` items, in order; ``{"crash": ...}`` where the process died or hung."""
    answers: list[dict] = [{} for _ in range(total)]
    first = 0
    while first < total:
        first = _once(what, folder, [*numbers, first], answers, still)
    return answers


def _once(what: str, folder: Path, numbers: list[int], answers: list[dict], still: float) -> int:
    """One process, until it ends; the item to go on with."""
    script = Path(__file__).with_name("worker.py")
    command = [sys.executable, str(script), what, str(folder), *map(str, numbers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    errors = (folder / "stderr.txt").open("w+")
    at, begun, rest = numbers[-1], False, b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as p, errors:
        ready = selectors.DefaultSelector()
        ready.register(p.stdout, selectors.EVENT_READ)
        last = time.monotonic()
        while True:
            # loading torch on a busy machine is not a hang
            limit = still if begun else max(still, 300.0)
            if not ready.select(timeout=max(0.0, last + limit - time.monotonic())):
                p.kill()
                answers[at] = {"crash": f"no answer for {limit:.0f} s"}
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
                    answers[line["done"]] = line
                    at = line["done"] + 1
        code = p.wait()
        errors.seek(0)
        tail = errors.read()[-2000:]
    if not begun and code:
        raise RuntimeError(f"the worker didn't start: {tail}")
    if code and at < len(answers):
        answers[at] = {"crash": f"the process ended with {code}: {tail}"}
        return at + 1
    return len(answers) if not code else at
