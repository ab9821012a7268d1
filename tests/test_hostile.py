"""Every file of the hostile corpus gives the right tokens or an `InputError` that names it, in 5 s and 1 GB."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("resource")  # limits and peaks of memory; not on Windows

HERE = Path(__file__).parent / "hostile"
SECONDS, BYTES = 5.0, 1 << 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(case, its path, what came of it) for each file."""
    sys.path.insert(0, str(HERE))
    try:
        from make import write
        from watch import watch
    finally:
        sys.path.remove(str(HERE))
    folder = tmp_path_factory.mktemp("hostile")
    cases = write(folder)
    answers = watch("corpus", folder, len(cases))
    return [(c, str(c.path(folder)), a) for c, a in zip(cases, answers, strict=True)]


def test_there_are_files_for_every_reader(corpus):
    kinds = Counter(c.kind.partition(" ")[0] for c, _, _ in corpus)
    assert set(kinds) == {
        "image",
        "audio",
        "video",
        "points",
        "views",
        "series",
        "text",
        "latents",
        "manifest",
    }
    assert sum(kinds.values()) >= 200 and min(kinds.values()) >= 10, kinds


def test_each_gives_the_right_tokens_or_is_refused_by_name(corpus):
    faults = []
    for c, path, got in corpus:
        if "count" in got and got["count"] == c.right and got.get("right", True):
            continue
        said = got.get("refused", "")
        # once is right: no wrapped complaint says it again
        if isinstance(c.right, str) and said.count(path) == 1 and re.search(c.right, said):
            continue
        faults.append(
            f"{path}: expected {c.right!r}, found { ({k: got[k] for k in got if k not in ('cpu', 'wall')}) }"
        )
    assert not faults, "\n".join(faults)


def test_none_takes_long_or_much_memory(corpus):
    """CPU seconds, which a busy machine does not stretch; what hangs without computing is stopped and told as a crash."""
    slow = [(path, got["cpu"]) for _, path, got in corpus if got.get("cpu", 0) > SECONDS]
    large = [(path, got["bytes"]) for _, path, got in corpus if got.get("bytes", 0) > BYTES]
    assert not slow and not large
    print("slowest", sorted((got["cpu"], c.name) for c, _, got in corpus if "cpu" in got)[-3:])
    print("largest", sorted((got["bytes"] >> 20, c.name) for c, _, got in corpus if "bytes" in got)[-3:])


def test_the_watch_survives_crashes_and_hangs(tmp_path):
    sys.path.insert(0, str(HERE))
    try:
        from watch import watch
    finally:
        sys.path.remove(str(HERE))
    well, crashed, hung, last = watch("trial", tmp_path, 4, still=2.0)
    assert (well, last) == ({"done": 0}, {"done": 3})
    assert "ended with -6" in crashed["crash"] and "no answer for 2 s" in hung["crash"]


def test_the_watch_sees_memory(tmp_path):
    """The measure itself: a reader that takes 300 MB is seen to."""
    sys.path.insert(0, str(HERE))
    try:
        import worker
    finally:
        sys.path.remove(str(HERE))
    got = worker.attempt(lambda path: (None, len(bytearray(300 << 20))), "x")
    assert 290 << 20 < got["bytes"] < 400 << 20
