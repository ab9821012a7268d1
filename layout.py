"""What is known about a batch of tokens on the CPU side: the lengths of its samples, and their reading order.

Fast paths choose their kernel from a `Layout`, never from a tensor's content, so that no forward pass waits for a device.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable

MODALITIES = {"text": 0, "image": 1, "audio": 2, "video": 3, "points": 4, "views": 5, "latents": 6}
MODALITIES |= {"series": 7, "discrete": 8}
ANY_LENGTH = -2  # `Layout.uniform` of rows without padding, of any length


def modality_id(name: str) -> int:
    """The int16 number of a modality: fixed for the built-in ones, otherwise a hash of its name.

    A third party's front-end needs no registry and gets the same number in every process.
    """
    known = MODALITIES.get(name)
    return known if known is not None else 64 + zlib.crc32(name.encode()) % (32767 - 64)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is known about a batch of tokens without reading a tensor.

    Args:
        lengths: per row the token counts of its samples, in order, contiguous from the left; the rest of the row is
            padding. A sample is one segment.
        order: reading order inside a sample: ``"bidirectional"`` (one block number), ``"causal"`` (block increases with
            every token) or ``"any"`` (given by `Tokens.block`).
        origin: after `Tokens.pack`, the index before packing of each sample, counted row by row.
        dynamic: for a graph exported for any number of rows of any length, one sample each: ``"full"`` (rows without
            padding) or ``"padded"``. `lengths` is empty then.

    `rows` is the number of rows, or -1 if dynamic; `single` is True if no row holds more than one sample; `uniform` is the
    common length of rows with one sample each, or -1. They are computed once: a compiled region that uses them is not
    recompiled for other lengths.
    """

    lengths: tuple[tuple[int, ...], ...]
    order: str = "any"
    origin: tuple[int, ...] | None = None
    dynamic: str | None = None
    rows: int = dataclasses.field(init=False, repr=False, compare=False)
    single: bool = dataclasses.field(init=False, repr=False, compare=False)
    uniform: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.order not in ("bidirectional", "causal", "any"):
            raise ValueError(f"order is {self.order!r}, expected 'bidirectional', 'causal' or 'any'")
        first = self.lengths[0] if self.lengths else ()
        alike = len(first) == 1 and all(row == first for row in self.lengths)
        object.__setattr__(self, "rows", len(self.lengths) if self.dynamic is None else -1)
        object.__setattr__(self, "single", all(len(row) <= 1 for row in self.lengths))
        object.__setattr__(self, "uniform", first[0] if alike else -1)
        if self.dynamic == "full":
            object.__setattr__(self, "uniform", ANY_LENGTH)

    @classmethod
    def simple(cls, lengths: Iterable[int], order: str = "any") -> Layout:
        """One sample per row, of the given lengths."""
        return cls(tuple((int(n),) if n else () for n in lengths), order)

    def full(self, n: int) -> bool:
        """True if every row is one sample of n tokens, without padding."""
        return self.uniform == ANY_LENGTH or self.uniform == n

    @property
    def samples(self) -> int:
        """Number of vectors that `Tokens.pool` returns: an empty row counts as one sample."""
        return sum(max(1, len(row)) for row in self.lengths)
