"""`Case`, and the list of cases that the `*_cases` modules fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Case:
    """A file and its expected result.

    Args:
        kind: a key of `worker.front_ends`, which reads the file.
        name: path below the folder of that kind.
        expected: number of tokens (of rows for a manifest), or a regular expression that the `InputError` matches.
        make: returns the bytes, or a dict of several files below a folder called `name`; or takes a path and creates it.
        check: a raw sample -> whether it is correct.
    """

    kind: str
    name: str
    expected: int | str
    make: Callable
    check: Callable | None = None

    def path(self, folder: Path) -> Path:
        return folder / self.kind.replace(" ", "-") / self.name


CASES: list[Case] = []


def case(kind: str, name: str, expected: int | str, make: Callable, check: Callable | None = None) -> None:
    """Adds a case to the corpus."""
    CASES.append(Case(kind, name, expected, make, check))


def truncated(make: Callable[[], bytes], fraction: float = 0.5) -> Callable[[], bytes]:
    """The first part of a file."""
    return lambda: (d := make())[: int(len(d) * fraction)]
