"""What a case of the corpus is, and the list of them that the other scripts fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Case:
    """A file, and what is right.

    Args:
        kind: which of `worker.FRONT_ENDS` reads it.
        name: its path below the folder of that kind.
        right: the number of tokens (of rows for a manifest), or a pattern that the `InputError` matches.
        make: gives the bytes, or several files by name below a folder called `name`, or makes the file at a path itself.
        check: a raw sample -> whether it is right.
    """

    kind: str
    name: str
    right: int | str
    make: Callable
    check: Callable | None = None

    def path(self, folder: Path) -> Path:
        return folder / self.kind.replace(" ", "-") / self.name


CASES: list[Case] = []


def case(kind: str, name: str, right: int | str, make: Callable, check: Callable | None = None) -> None:
    CASES.append(Case(kind, name, right, make, check))


def cut(make: Callable[[], bytes], part: float = 0.5) -> Callable[[], bytes]:
    """The first part of a file."""
    return lambda: (d := make())[: int(len(d) * part)]
