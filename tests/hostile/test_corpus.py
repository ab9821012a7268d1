"""Every file of the hostile corpus gives the right tokens or an `InputError` that names it, in 5 s and 1 GB."""

import re
from collections import Counter

import pytest

pytest.importorskip("resource")  # limits and peaks of memory; not on Windows

SECONDS, BYTES = 5.0, 1 << 30


@pytest.fixture(scope="module")
def results(load, tmp_path_factory):
    """(case, its path, its result) for each file."""
    folder = tmp_path_factory.mktemp("hostile")
    cases = load("corpus").write(folder)
    results = load("supervisor").supervise("corpus", folder, len(cases))
    return [(c, str(c.path(folder)), r) for c, r in zip(cases, results, strict=True)]


def test_there_are_files_for_every_reader(results):
    kinds = Counter(c.kind.partition(" ")[0] for c, _, _ in results)
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


def test_each_file_gives_the_expected_tokens_or_error(results):
    faults = []
    for c, path, got in results:
        if "count" in got and got["count"] == c.expected and got.get("correct", True):
            continue
        error = got.get("error", "")
        # the path occurs once: no wrapped error repeats it
        if isinstance(c.expected, str) and error.count(path) == 1 and re.search(c.expected, error):
            continue
        faults.append(
            f"{path}: expected {c.expected!r}, found { ({k: got[k] for k in got if k not in ('cpu', 'wall')}) }"
        )
    assert not faults, "\n".join(faults)


def test_no_file_takes_long_or_much_memory(results):
    """CPU seconds, independent of the machine's load; a hang without computation is reported as a crash."""
    slow = [(path, got["cpu"]) for _, path, got in results if got.get("cpu", 0) > SECONDS]
    large = [(path, got["bytes"]) for _, path, got in results if got.get("bytes", 0) > BYTES]
    assert not slow and not large
    print("slowest", sorted((got["cpu"], c.name) for c, _, got in results if "cpu" in got)[-3:])
    print("largest", sorted((got["bytes"] >> 20, c.name) for c, _, got in results if "bytes" in got)[-3:])


def test_the_supervisor_survives_crashes_and_hangs(load, tmp_path):
    first, crashed, hung, last = load("supervisor").supervise("trial", tmp_path, 4, timeout=2.0)
    assert (first, last) == ({"done": 0}, {"done": 3})
    assert "ended with -6" in crashed["crash"] and "no output for 2 s" in hung["crash"]


def test_the_worker_measures_memory(load):
    """A reader that allocates 300 MB is measured as such."""
    got = load("worker").attempt(lambda path: (None, len(bytearray(300 << 20))), "x")
    assert 290 << 20 < got["bytes"] < 400 << 20
