"""Reads files of the corpus in a process of its own, so that a crash of a native decoder is one failed file.

    python tests/hostile/worker.py corpus FOLDER FIRST      # cases FIRST, FIRST + 1, ... of make.CASES
    python tests/hostile/worker.py fuzz FOLDER COUNT FIRST  # seeds of every reader, damaged COUNT times each
    python tests/hostile/worker.py trial FOLDER FIRST       # what the watch itself is tested with

A line of JSON says what begins, another how it went.
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

ROOM = 3 << 30  # bytes of address space beyond those of the libraries: no test brings the machine down
START = time.process_time()


def front_ends() -> dict:
    """By kind: path -> (raw sample, number of tokens)."""
    import torch

    import worldtokens as wt
    from worldtokens.apps.tokens.inspect import read_text
    from worldtokens.tokenizers.latents.tokenizer import TriplaneTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = {
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

    def through(kind: str):
        tokenizer = made[kind]

        def read(path: str):
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                raw = tokenizer.read(read_text(path) if kind == "text" else path)
                tokens = tokenizer(tokenizer.collate([raw]))
            assert tokens.valid.all() and tokens.x.isfinite().all() and tokens.pos.isfinite().all()
            return raw, tokens.shape[1]

        return read

    def rows(path: str):
        found = wt.open_rows(path)
        return found, len(found)

    return {kind: through(kind) for kind in made} | {"manifest": rows}


def reset_peak() -> None:
    """Give back what was freed, and let the kernel count the peak anew, where it can."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps it, and it would count as in use before
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Most bytes of memory in use since `reset_peak`, or since the start."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) << 10
    except (OSError, TypeError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def in_use() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak()


def limit() -> None:
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, resource.RLIM_INFINITY))


def say(**facts) -> None:
    os.write(OUT, (json.dumps(facts) + "\n").encode())


def attempt(read, path: str) -> dict:
    """Read one file; what came of it, CPU seconds and bytes beyond what was in use before."""
    from worldtokens.errors import InputError

    reset_peak()
    before, begun, clock = in_use(), time.process_time(), time.monotonic()
    raw = None
    try:
        raw, count = read(path)
        out = {"count": count}
    except InputError as e:
        out = {"refused": str(e)}
    except BaseException as e:  # whatever it is, it's the finding
        out = {"wrong": f"{type(e).__name__}: {e}"[:300]}
    out |= {"cpu": time.process_time() - begun, "wall": time.monotonic() - clock}
    return out | {"bytes": max(0, peak() - before), "raw": raw}


def corpus(folder: Path, first: int) -> None:
    from make import CASES

    readers = front_ends()
    warm(readers, folder)
    limit()
    for i, c in enumerate(CASES[first:], first):
        say(begin=i)
        out = attempt(readers[c.kind], str(c.path(folder)))
        raw = out.pop("raw")
        if "count" in out and c.check is not None:
            out["right"] = bool(c.check(raw))
        say(done=i, **out)


def warm(readers: dict, folder: Path) -> None:
    """What libraries load at their first use is not a file's doing."""
    import torch  # noqa: F401
    import trimesh  # noqa: F401
    from make import CASES

    seen = set()
    for c in CASES:
        if isinstance(c.right, int) and c.kind not in seen:
            seen.add(c.kind)
            attempt(readers[c.kind], str(c.path(folder)))


def fuzz(folder: Path, count: int, first: int) -> None:
    from damage import SEEDS, damaged, kind_of

    readers = front_ends()
    limit()
    for i, kind in enumerate(map(kind_of, SEEDS)):
        if i < first:
            continue
        say(begin=i)
        told = {"tried": 0, "refused": 0, "cpu": 0.0, "bytes": 0}

        def one(path: Path, read=readers[kind], told=told) -> None:
            out = attempt(read, str(path))
            told["tried"] += 1
            told["refused"] += "refused" in out
            told["cpu"], told["bytes"] = max(told["cpu"], out["cpu"]), max(told["bytes"], out["bytes"])
            assert "wrong" not in out, out["wrong"]
            assert "count" in out or str(path) in out["refused"], f"names no file: {out['refused']}"

        say(done=i, wrong=damaged(folder, i, count, one), **told)


def trial(folder: Path, first: int) -> None:
    """What `watch` must see through: an item that is well, one that crashes, one that hangs, one that is well."""
    doings = (int, os.abort, lambda: time.sleep(600), int)
    for i, do in enumerate(doings[first:], first):
        say(begin=i)
        do()
        say(done=i)


if __name__ == "__main__":
    # decoders write to stdout and stderr as they like: the answers go to a copy
    OUT = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.insert(0, str(Path(__file__).parent))
    what, where, *numbers = sys.argv[1:]
    {"corpus": corpus, "fuzz": fuzz, "trial": trial}[what](Path(where), *map(int, numbers))
