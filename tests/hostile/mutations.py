"""Fuzzing: valid files of every reader with bytes replaced, deleted or inserted by hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cases import CASES
from corpus import CASES as _  # noqa: F401  the import fills the list
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SEEDS = [
    "image/orientation-6.jpg", "image/palette.png", "image/animated.gif", "image/two-pages.tiff", "image/whole.webp",
    "image/grey-16-bit-ramp.png", "image/grey-and-alpha.png", "audio/stereo.wav", "audio/stereo.flac", "audio/stereo.mp3",
    "audio/stereo.opus", "audio/stereo.m4a", "audio/into-a-pipe.wav", "video/phone.mp4", "video/index-first.mp4",
    "video/no-count.webm", "video/no-count.ts", "video/no-count.mkv", "video/whole.avi", "points/46-points.xyz",
    "points/46-points.ply", "points/46-points.pts", "points/46-points.npz", "points/float16.npy", "points/cube.obj",
    "points/box-ply.ply", "points/box-stl.stl", "points/box-stl_ascii.stl", "points/box-off.off", "points/box-glb.glb",
    "latents/planes.npy", "latents/named.npz", "series/missing-values.csv", "series-timed/a-row-left-out.csv",
    "text/joined-emoji.txt", "manifest/quotes-and-breaks-csv/quotes-and-breaks.csv", "manifest/two-jsonl/two.jsonl",
    "views/two-views/cameras.json", "views/nerf/transforms.json", "views/two-views/a.png",
]  # fmt: skip


def kind_of(seed: str) -> str:
    """The kind of a seed, a key of `worker.front_ends`."""
    folder = seed.partition("/")[0]
    return next(c.kind for c in CASES if c.kind.replace(" ", "-") == folder)


def mutations(size: int) -> st.SearchStrategy:
    """Lists of (operation, offset, bytes or count)."""
    where = st.integers(0, min(200, size)) | st.integers(
        0, size
    )  # headers have the lengths that readers rely on
    return st.lists(
        st.tuples(st.just("set"), where, st.binary(min_size=1, max_size=4))
        | st.tuples(st.just("put"), where, st.binary(min_size=1, max_size=9))
        | st.tuples(st.just("cut"), where, st.integers(1, 40) | st.integers(1, size)),
        min_size=1,
        max_size=4,
    )


def mutated(data: bytes, operations: list[tuple]) -> bytes:
    """The data after all operations."""
    for operation, at, value in operations:
        end = at + (value if operation == "cut" else len(value) if operation == "set" else 0)
        data = data[:at] + (b"" if operation == "cut" else value) + data[end:]
    return data


def fuzz_one(folder: Path, number: int, count: int, one: Callable[[Path], None]) -> str | None:
    """Calls `one` with `count` mutated copies of a seed, deterministically.

    Returns:
        None, or the first error; the file that caused it is left in the folder.
    """
    seed = SEEDS[number]
    path = folder / seed
    data = path.read_bytes()
    target = path.parent if kind_of(seed) == "views" else path

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(operations=mutations(len(data)))
    def try_all(operations: list[tuple]) -> None:
        path.write_bytes(mutated(data, operations))
        one(target)

    try:
        try_all()
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:400]
    path.write_bytes(data)
    return None
