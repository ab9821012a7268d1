"""What is known about a batch of tokens on the CPU side: the lengths of its samples, and their reading order.

A fast path picks its kernel from a `Layout`, never from a tensor's content, so that no forward pass waits for a device.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable

MODALITIES = {"text": 0, "image": 1, "audio": 2, "video": 3, "points": 4, "views": 5, "latents": 6}
MODALITIES |= {"series": 7, "discrete": 8}
ANY_LENGTH = -2  # `Layout.uniform` of rows that are whole whatever their length


def modality_id(name: str) -> int:
    """The int16 number of a modality: a fixed one for those built in, else a hash of its name.

    A third party's front-end needs no registry and gets the same number in every process.
    """
    known = MODALITIES.get(name)
    return known if known is not None else 64 + zlib.crc32(name.encode()) % (32767 - 64)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is known about a batch of tokens without looking into a tensor.

    Args:
        lengths: for each row the token counts of its samples, in order, contiguous from the left, the rest of
            the row being padding. A sample is one segment.
        order: reading order inside a sample: ``"bidirectional"`` (one block number), ``"causal"`` (block rises with
            every token) or ``"any"`` (look at `Tokens.block`).
        origin: after `Tokens.pack`, the place that each sample (counted row by row) had before.
        open: for a graph that is exported for any number of rows of any length, one sample each: ``"whole"`` (no row
            has padding) or ``"padded"``. `lengths` is empty then.

    `rows` is their number, `single` tells that no row holds more than one sample, `uniform` is the length of every row's
    one sample where they are equal, else -1. All are found here, once: a compiled region that reads them is not compiled
    again for other lengths.
    """

    lengths: tuple[tuple[int, ...], ...]
    order: str = "any"
    origin: tuple[int, ...] | None = None
    open: str | None = None
    rows: int = dataclasses.field(init=False, repr=False, compare=False)
    single: bool = dataclasses.field(init=False, repr=False, compare=False)
    uniform: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.order not in ("bidirectional", "causal", "any"):
            raise ValueError(f"order is {self.order!r}, expected 'together', 'causal' or 'any'")
        first = self.lengths[0] if self.lengths else ()
        alike = len(first) == 1 and all(row == first for row in self.lengths)
        object.__setattr__(self, "rows", len(self.lengths) if self.open is None else -1)
        object.__setattr__(self, "single", all(len(row) <= 1 for row in self.lengths))
        object.__setattr__(self, "uniform", first[0] if alike else -1)
        if self.open == "whole":
            object.__setattr__(self, "uniform", ANY_LENGTH)

    @classmethod
    def simple(cls, lengths: Iterable[int], order: str = "any") -> Layout:
        """One sample a row, of the given lengths."""
        return cls(tuple((int(n),) if n else () for n in lengths), order)

    def full(self, n: int) -> bool:
        """True when every row is one sample of all n tokens."""
        return self.uniform == ANY_LENGTH or self.uniform == n

    @property
    def samples(self) -> int:
        """How many samples a pooling gives: an empty row counts as one."""
        return sum(max(1, len(row)) for row in self.lengths)
