"""Instrument samples of Sonic Pi, downloaded into the cache on first use."""

from __future__ import annotations

from worldtokens.data import fetch
from worldtokens.data.rows import Rows, split_of


def open_samples(split: str | None = None) -> Rows:
    """165 instrument and other audio samples of Sonic Pi, CC0.

    Each row: `id` ("bd_boom"), `audio` (FLAC path, 44.1 kHz), `class` (the prefix: "bd" bass drum, "tabla", "drum", "elec",
    "ambi" ...), `split` (by hash, about 80 / 8 / 12).

    Args:
        split: "train", "validation" or "test"; None for all.
    """
    root = fetch.cached("samples", lambda work: fetch.deb("sonic-pi-samples", work))
    records = [
        {
            "id": path.stem,
            "audio": str(path),
            "class": path.stem.partition("_")[0],
            "split": split_of(path.stem),
        }
        for path in sorted((root / "usr/share/sonic-pi/samples").glob("*.flac"))
    ]
    rows = Rows(records, name="samples")
    return rows if split is None else rows.split(split)
