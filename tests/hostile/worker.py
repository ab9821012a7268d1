"""Reads files of the corpus in a separate process, so that a crash of a native decoder fails one file only.

    python tests/hostile/worker.py corpus FOLDER FIRST      # cases FIRST, FIRST + 1, ... of corpus.CASES
    python tests/hostile/worker.py fuzz FOLDER COUNT FIRST  # seeds of every reader, COUNT mutations each
    python tests/hostile/worker.py trial FOLDER FIRST       # items that test the supervisor

Each item prints one JSON line at its start and one with its result.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import sys
import time
import warnings
from pathlib import Path

HEADROOM = 3 << 30  # bytes of address space beyond the libraries: no test exhausts the machine
START = time.process_time()


def front_ends() -> dict:
    """Kind -> function from a path to (raw sample, number of tokens)."""
    import torch

    import worldtokens as wt
    from worldtokens.apps.tokens.inspect import read_text
    from worldtokens.tokenizers.latents.tokenizer import TriplaneTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizers = {
        "image": wt.ImageTokenizer(16, 16, 224),
        "image native": wt.ImageTokenizer(16, 16, None, max_tokens=256),
        "audio": wt.AudioTokenizer(48, "whisper"),
        "audio whole": wt.AudioTokenizer(48, "whisper", seconds=None),
        "audio wave": wt.AudioTokenizer(48, "waveform", config={"conv_dim": 16}),
        "video": wt.VideoTokenizer(16, (4, 16, 16), frames=18, size=32),
        "points": wt.PointTokenizer(16, hidden=(8, 8, 8)),
        "views": wt.ViewTokenizer(16, 16, 32),
        "series": wt.SeriesTokenizer(16, 2, patch=4),
        "series timed": wt.SeriesTokenizer(16, 2, patch=4, time="time"),
        "text": wt.TextTokenizer.clip(16),
        "latents": TriplaneTokenizer(16, 2, 2),
    }

    def reader(kind: str):
        tokenizer = tokenizers[kind]

        def read(path: str):
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                raw = tokenizer.read(read_text(path) if kind == "text" else path)
                tokens = tokenizer(tokenizer.collate([raw]))
            assert tokens.valid.all() and tokens.x.isfinite().all() and tokens.pos.isfinite().all()
            return raw, tokens.shape[1]

        return read

    def rows(path: str):
        rows = wt.open_rows(path)
        return rows, len(rows)

    return {kind: reader(kind) for kind in tokenizers} | {"manifest": rows}


def reset_peak() -> None:
    """Returns freed memory to the system and resets the kernel's peak, where possible."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, which would count as in use
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Peak memory in bytes since `reset_peak`, or since the start."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) << 10
    except (OSError, TypeError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def in_use() -> int:
    """Memory in use, in bytes."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak()


def limit() -> None:
    """Limits the address space."""
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (now + HEADROOM, resource.RLIM_INFINITY))


def report(**fields) -> None:
    """Prints one JSON line."""
    os.write(OUT, (json.dumps(fields) + "\n").encode())


def attempt(read, path: str) -> dict:
    """Reads one file; returns the result, CPU seconds and additional bytes of memory."""
    from worldtokens.errors import InputError

    reset_peak()
    before, begun, clock = in_use(), time.process_time(), time.monotonic()
    raw = None
    try:
        raw, count = read(path)
        out = {"count": count}
    except InputError as e:
        out = {"error": str(e)}
    except BaseException as e:  # any other exception is a failure
        out = {"wrong": f"{type(e).__name__}: {e}"[:300]}
    out |= {"cpu": time.process_time() - begun, "wall": time.monotonic() - clock}
    return out | {"bytes": max(0, peak() - before), "raw": raw}


def corpus(folder: Path, first: int) -> None:
    from corpus import CASES

    readers = front_ends()
    warm(readers, folder)
    limit()
    for i, c in enumerate(CASES[first:], first):
        report(begin=i)
        out = attempt(readers[c.kind], str(c.path(folder)))
        raw = out.pop("raw")
        if "count" in out and c.check is not None:
            out["correct"] = bool(c.check(raw))
        report(done=i, **out)


def warm(readers: dict, folder: Path) -> None:
    """Reads one valid file of each kind, so that lazy imports do not count."""
    import torch  # noqa: F401
    import trimesh  # noqa: F401
    from corpus import CASES

    seen = set()
    for c in CASES:
        if isinstance(c.expected, int) and c.kind not in seen:
            seen.add(c.kind)
            attempt(readers[c.kind], str(c.path(folder)))


def fuzz(folder: Path, count: int, first: int) -> None:
    from mutations import SEEDS, fuzz_one, kind_of

    readers = front_ends()
    limit()
    for i, kind in enumerate(map(kind_of, SEEDS)):
        if i < first:
            continue
        report(begin=i)
        total = {"tried": 0, "errors": 0, "cpu": 0.0, "bytes": 0}

        def one(path: Path, read=readers[kind], total=total) -> None:
            out = attempt(read, str(path))
            total["tried"] += 1
            total["errors"] += "error" in out
            total["cpu"], total["bytes"] = max(total["cpu"], out["cpu"]), max(total["bytes"], out["bytes"])
            assert "wrong" not in out, out["wrong"]
            assert "count" in out or str(path) in out["error"], f"does not name the file: {out['error']}"

        report(done=i, wrong=fuzz_one(folder, i, count, one), **total)


def trial(folder: Path, first: int) -> None:
    """Items to test `supervise`: one that succeeds, one that crashes, one that hangs, one that succeeds."""
    actions = (int, os.abort, lambda: time.sleep(600), int)
    for i, action in enumerate(actions[first:], first):
        report(begin=i)
        action()
        report(done=i)


if __name__ == "__main__":
    # decoders write to stdout and stderr: results go to a copy of stdout
    OUT = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.insert(0, str(Path(__file__).parent))
    mode, folder, *numbers = sys.argv[1:]
    {"corpus": corpus, "fuzz": fuzz, "trial": trial}[mode](Path(folder), *map(int, numbers))
