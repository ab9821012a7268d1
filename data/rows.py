"""`Rows`: a sequence of dicts, the one shape in which data reaches training.

A row's keys are front-ends' names (`image`, `text`, `audio` ...) and its values are what those front-ends
read: a path, bytes, a string, or a list of strings where an image has several captions. Extra keys
(`id`, `class`, `split` ...) travel along.

Notable here: a value may be a `Lazy` handle, which is read only when its row is asked for, and which opens
its file for each read. So no file handle is shared: `Rows` may be pickled, sent to a spawned worker, or used by
forked workers and threads at once.
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
    """A value that is read when its row is asked for; subclasses hold only plain, picklable fields."""

    __slots__ = ()

    def read(self) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Packed(Lazy):
    """`size` bytes from byte `start` on of the file `path`."""

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
                f"{self.path}: {error.strerror}; it was there when the rows were opened"
            ) from error
        if len(data) != self.size:
            raise InputError(
                f"{self.path}: found {len(data)} bytes at {self.start}, expected {self.size}. "
                "The file was cut or changed since it was opened; install or fetch it again."
            )
        return data


def side_of(key: str, fractions: Mapping[str, float] = SPLITS) -> str:
    """The side of a split on which `key` falls, by its hash alone.

    The same key always falls on the same side, whatever else the set holds: a set that grows keeps its split.

    Args:
        key: any string.
        fractions: side -> share of all keys, each in [0, 1]; they add up to 1.
    """
    if not fractions or min(fractions.values()) < 0 or abs(sum(fractions.values()) - 1) > 1e-6:
        raise InputError(f"split fractions {dict(fractions)}: expected shares of 0 or more that add up to 1")
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    total = 0.0
    for side, share in fractions.items():
        total += share
        if place < total:
            return side
    return [side for side, share in fractions.items() if share > 0][-1]


def kin(items: Iterable[Iterable[str]]) -> list[str]:
    """The group of each item: items that share a key, directly or through others, are one group.

    What must not be divided by a split is told by its keys, and `side_of` decides on the group's name.

    Args:
        items: for each item its keys.

    Returns:
        for each item the name of its group, which is the smallest key in it: it does not depend on the order.
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
    """A fixed, map-style sequence of rows; also a torch map-style dataset.

    `rows[i]` is a fresh dict with its lazy values read (the caller may change it); `rows[a:b]` is again `Rows`.

    Args:
        records: the rows, values possibly `Lazy`. Held as given, not copied.
        name: what `repr` and errors call this set.
        skipped: one message for each row that was left out while reading.
        replaced: lines in which bytes that did not decode became U+FFFD.
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
        """Every key that some row has, in order of first appearance."""
        return list(dict.fromkeys(key for record in self._records for key in record))

    def column(self, name: str, default: Any = None) -> list:
        """That key of every row, `default` where a row lacks it. Lazy values come unread, as handles."""
        if self._records and name not in self.columns:
            raise InputError(f"{self.name}: no column {name!r}; the columns are {', '.join(self.columns)}")
        return [record.get(name, default) for record in self._records]

    def texts(self, column: str = "text") -> list[str]:
        """All captions as one flat list, in order of rows: what a text tokenizer is trained on."""
        values = (value for value in self.column(column) if value is not None)
        return [text for value in values for text in ([value] if isinstance(value, str) else value)]

    def where(self, keep: Callable[[Mapping], bool]) -> Rows:
        """The rows for which `keep(row)` holds. Lazy values are shown to `keep` unread."""
        return self._derive([record for record in self._records if keep(record)])

    def take(self, indices: Iterable[int]) -> Rows:
        """The rows at these positions, in this order; a position may come more than once."""
        return self._derive([self._records[operator.index(index)] for index in indices])

    def split(self, side: str, fractions: Mapping[str, float] | None = None, by: str | None = None) -> Rows:
        """One side of a split; the sides are disjoint and together are all rows.

        Rows with a `split` column are split by it, unless `fractions` is given. Otherwise the hash of the
        column `by` decides (see `side_of`), so that rows that share its value, such as several captions of
        one image, stay on one side, and the split stays the same when rows are added or the folder moves.

        Args:
            side: "train", "validation" or "test", or a name from `fractions` or the `split` column.
            fractions: side -> share; default 0.80 / 0.08 / 0.12.
            by: the deciding column; default `base` where there is one, else `id`.
        """
        if fractions is None and "split" in self.columns:
            sides = self.column("split")
        else:
            by = by or next((key for key in ("base", "id") if key in self.columns), None)
            if by is None:
                raise InputError(
                    f"{self.name}: no column to split by; name one with by=, of {', '.join(self.columns)}"
                )
            fractions = fractions or SPLITS
            sides = [side_of(str(_value(key)), fractions) for key in self.column(by)]
        known = set(sides) | set(fractions or ())
        if side not in known:
            found = ", ".join(sorted(str(name) for name in known))
            raise InputError(
                f"{self.name}: no split {side!r}; found {found}. Name one of those, or give fractions="
            )
        chosen = [record for record, where in zip(self._records, sides, strict=True) if where == side]
        return self._derive(chosen, f"{self.name}/{side}")

    def report(self) -> str:
        """What was read and what was left out, in a few lines for a person."""
        lines = [repr(self)]
        if self.replaced:
            lines.append(f"{self.replaced:,} lines held bytes that could not be decoded and now hold U+FFFD")
        if self.skipped:
            lines.append(f"{len(self.skipped):,} rows skipped:")
            lines += [f"  {message}" for message in self.skipped[:10]]
            if len(self.skipped) > 10:
                lines.append(f"  ... and {len(self.skipped) - 10:,} more in .skipped")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Rows({self.name}: {len(self):,} rows of {', '.join(self.columns) or 'nothing'})"


def _value(value):
    """A value as its reader sees it: handles read, lists and dicts copied so that a caller cannot change the set."""
    if isinstance(value, Lazy):
        return value.read()
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    return value
