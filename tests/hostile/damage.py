"""Valid files of every reader, and what hypothesis does to their bytes: some changed, some cut out, some put in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cases import CASES
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from make import CASES as _  # noqa: F401  the scripts fill the list

SEEDS = [
    "image/orientation-6.jpg", "image/palette.png", "image/moving.gif", "image/two-pages.tiff", "image/whole.webp",
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
    """Which reader a seed is for."""
    folder = seed.partition("/")[0]
    return next(c.kind for c in CASES if c.kind.replace(" ", "-") == folder)


def changes(size: int) -> st.SearchStrategy:
    """Lists of (what, where, bytes or how many)."""
    where = st.integers(0, min(200, size)) | st.integers(
        0, size
    )  # headers hold the lengths that readers trust
    return st.lists(
        st.tuples(st.just("set"), where, st.binary(min_size=1, max_size=4))
        | st.tuples(st.just("put"), where, st.binary(min_size=1, max_size=9))
        | st.tuples(st.just("cut"), where, st.integers(1, 40) | st.integers(1, size)),
        min_size=1,
        max_size=4,
    )


def changed(data: bytes, what: list[tuple]) -> bytes:
    for verb, at, value in what:
        end = at + (value if verb == "cut" else len(value) if verb == "set" else 0)
        data = data[:at] + (b"" if verb == "cut" else value) + data[end:]
    return data


def damaged(folder: Path, number: int, count: int, one: Callable[[Path], None]) -> str | None:
    """Call `one` for so many damaged copies of a seed, the same ones every time.

    Returns:
        None, or what went wrong first; the file that shows it stays in its place.
    """
    seed = SEEDS[number]
    place = folder / seed
    data = place.read_bytes()
    target = place.parent if kind_of(seed) == "views" else place

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(what=changes(len(data)))
    def try_all(what: list[tuple]) -> None:
        place.write_bytes(changed(data, what))
        one(target)

    try:
        try_all()
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:400]
    place.write_bytes(data)
    return None
