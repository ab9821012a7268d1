"""`Rows`: a map-style dataset of dicts, the one format in which data reaches training.

A row's keys are the names of front-ends (`image`, `text`, `audio` ...), its values are what these front-ends read: a
path, bytes, a string, or a list of strings for several captions. Extra keys (`id`, `class`, `split` ...) are kept.

Notable: a value may be a `Lazy` handle, which is read when its row is accessed and opens its file for each read. No file
handle is shared, so `Rows` can be pickled, sent to spawned workers, and used by forked workers and threads in parallel.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worldtokens.errors import InputError

SPLITS: Mapping[str, float] = {"train": 0.80, "validation": 0.08, "test": 0.12}


class Lazy:
    """A value that is read when its row is accessed; subclasses have only plain, picklable fields."""

    __slots__ = ()

    def read(self) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Packed(Lazy):
    """`size` bytes of the file `path`, from byte `start` on."""

    path: str
    start: int
    size: int

    def read(self) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                data = file.read(self.size)
        except OSError as error:
            raise InputError(
                f"{self.path}: {error.strerror}; the file existed when the rows were opened"
            ) from error
        if len(data) != self.size:
            raise InputError(
                f"{self.path}: found {len(data)} bytes at {self.start}, expected {self.size}. "
                "The file has changed since it was opened; install or download it again."
            )
        return data


def split_of(key: str, fractions: Mapping[str, float] = SPLITS) -> str:
    """The split of `key` ("train", "validation", "test"), from its hash alone.

    A key is always in the same split, whatever else the set contains: a growing set keeps its splits.

    Args:
        key: any string.
        fractions: split -> fraction of all keys, each in [0, 1]; they add up to 1.
    """
    if not fractions or min(fractions.values()) < 0 or abs(sum(fractions.values()) - 1) > 1e-6:
        raise InputError(f"split fractions {dict(fractions)}: expected fractions >= 0 that add up to 1")
    value = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    total = 0.0
    for split, fraction in fractions.items():
        total += fraction
        if value < total:
            return split
    return [split for split, fraction in fractions.items() if fraction > 0][-1]


def connected_groups(items: Iterable[Iterable[str]]) -> list[str]:
    """Connected components: items that share a key, directly or through other items, are one group.

    Used for splits: items that must be in one split share a key, and `split_of` takes the group's name.

    Args:
        items: the keys of each item.

    Returns:
        the group name of each item, which is the smallest key of the group: independent of the order of items.
    """
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = key = parent[parent[key]]
        return key

    first = []
    for keys in items:
        roots = sorted({root(key) for key in keys})
        first.append(roots[0])
        for other in roots[1:]:
            parent[other] = roots[0]
    return [root(key) for key in first]


class Rows(Sequence):
    """A map-style dataset (also for torch) of dicts.

    `rows[i]` is a new dict with its lazy values read, which the caller may modify; `rows[a:b]` is `Rows`.

    Args:
        records: the rows, with values that may be `Lazy`. Not copied.
        name: name of the set in `repr` and errors.
        skipped: one message per row skipped while reading.
        replaced: number of lines in which undecodable bytes were replaced by U+FFFD.
    """

    def __init__(
        self,
        records: Iterable[Mapping],
        *,
        name: str = "rows",
        skipped: Sequence[str] = (),
        replaced: int = 0,
    ):
        self._records = records if isinstance(records, list) else list(records)
        self.name, self.skipped, self.replaced = name, tuple(skipped), replaced

    def _derive(self, records: list, name: str | None = None) -> Rows:
        return Rows(records, name=name or self.name, skipped=self.skipped, replaced=self.replaced)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self._derive(self._records[index])
        record = self._records[operator.index(index)]
        return {key: _value(value) for key, value in record.items()}

    @property
    def columns(self) -> list[str]:
        """All keys of all rows, in order of first appearance."""
        return list(dict.fromkeys(key for record in self._records for key in record))

    def column(self, name: str, default: Any = None) -> list:
        """The value of a column in every row, `default` if a row lacks it. Lazy values are returned as handles."""
        if self._records and name not in self.columns:
            raise InputError(f"{self.name}: no column {name!r}; the columns are {', '.join(self.columns)}")
        return [record.get(name, default) for record in self._records]

    def texts(self, column: str = "text") -> list[str]:
        """All captions as one flat list, in order of rows, e.g. to train a text tokenizer."""
        values = (value for value in self.column(column) if value is not None)
        return [text for value in values for text in ([value] if isinstance(value, str) else value)]

    def filter(self, function: Callable[[Mapping], bool]) -> Rows:
        """The rows for which `function(row)` is true. Lazy values are passed as handles."""
        return self._derive([record for record in self._records if function(record)])

    def select(self, indices: Iterable[int]) -> Rows:
        """The rows at these indices, in this order; an index may be repeated."""
        return self._derive([self._records[operator.index(index)] for index in indices])

    def split(self, name: str, fractions: Mapping[str, float] | None = None, by: str | None = None) -> Rows:
        """One split; the splits are disjoint and cover all rows.

        Rows with a `split` column are split by it, unless `fractions` is given. Otherwise the hash of the column `by`
        decides (see `split_of`): rows with the same value, such as several captions of one image, are in one split, and
        splits stay the same when rows are added or the folder is moved.

        Args:
            name: "train", "validation" or "test", or a name from `fractions` or the `split` column.
            fractions: split -> fraction; default 0.80 / 0.08 / 0.12.
            by: the column that decides; default `base` if it exists, else `id`.
        """
        if fractions is None and "split" in self.columns:
            splits = self.column("split")
        else:
            by = by or next((key for key in ("base", "id") if key in self.columns), None)
            if by is None:
                raise InputError(
                    f"{self.name}: no column to split by; name one with by=, of {', '.join(self.columns)}"
                )
            fractions = fractions or SPLITS
            splits = [split_of(str(_value(key)), fractions) for key in self.column(by)]
        known = set(splits) | set(fractions or ())
        if name not in known:
            found = ", ".join(sorted(str(each) for each in known))
            raise InputError(
                f"{self.name}: no split {name!r}; found {found}. Use one of those, or give fractions="
            )
        chosen = [record for record, split in zip(self._records, splits, strict=True) if split == name]
        return self._derive(chosen, f"{self.name}/{name}")

    def report(self) -> str:
        """A short text for the user: number of rows, skipped rows and replaced bytes."""
        lines = [repr(self)]
        if self.replaced:
            lines.append(f"{self.replaced:,} lines had undecodable bytes, replaced by U+FFFD")
        if self.skipped:
            lines.append(f"{len(self.skipped):,} rows skipped:")
            lines += [f"  {message}" for message in self.skipped[:10]]
            if len(self.skipped) > 10:
                lines.append(f"  ... and {len(self.skipped) - 10:,} more in .skipped")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Rows({self.name}: {len(self):,} rows of {', '.join(self.columns) or 'no columns'})"


def _value(value):
    """A value as the caller gets it: handles are read, lists and dicts copied, so that the set cannot be modified."""
    if isinstance(value, Lazy):
        return value.read()
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    return value
