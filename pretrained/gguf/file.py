"""The header of a .gguf file, and its tensors one at a time.

Values and tensor descriptions are plain little-endian structures (the specification is ggml's docs/gguf.md); packed
weights are unpacked by the `gguf` library. Its own reader takes 3.4 s for a vocabulary of 49,152 and does not say which
tensor a shortened file lacks, so the header is read here: 0.1 s, every length checked against the file.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worldtokens.errors import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# type number of a value -> struct letter; 8 is a string, 9 an array
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor lies in the file: its shape as torch has it, kind of packing, first byte and how many."""

    shape: tuple[int, ...]
    kind: int
    first: int
    size: int


class GGUFFile:
    """A .gguf file: `values` of its header by name, and its tensors.

    Args:
        path: of the file.

    Raises:
        InputError: it is not one, is cut off, or holds a kind of packing that `gguf` does not know; named.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            import gguf

            self._gguf = gguf
        except ImportError as e:
            raise InputError(f"{path} needs the gguf library: pip install worldtokens[gguf]") from e
        try:
            with open(self.path, "rb") as f:
                self._data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:  # an empty file cannot be mapped
            raise InputError(f"{path} cannot be read: {e}") from e
        self._at, self._doing = 0, "its beginning"
        if self._data[:4] != MAGIC:
            raise InputError(f"{path} is not a .gguf file: it begins with {self._data[:4]!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in VERSIONS:
            raise InputError(f"{path} is of .gguf version {version}, expected {VERSIONS} (little-endian)")
        tensors, values = self._scalar("Q"), self._scalar("Q")
        self.values: dict[str, Any] = {}
        for i in range(values):
            self._doing = f"value {i} of {values}"
            name = self._string()
            self._doing = f"value {name!r}"
            self.values[name] = self._value(self._scalar("I"))
        self.places = self._places(tensors)

    def _places(self, count: int) -> dict[str, Place]:
        found = {}
        for i in range(count):
            self._doing = f"the description of tensor {i} of {count}"
            name, axes = self._string(), self._scalar("I")
            if axes > 8:
                raise self._bad(f"tensor {name!r} has {axes} axes")
            shape = tuple(reversed([self._scalar("Q") for _ in range(axes)]))
            found[name] = (shape, self._scalar("I"), self._scalar("Q"))
        step = self.values.get("general.alignment", ALIGNMENT)
        if not isinstance(step, int) or step < 1:
            raise self._bad(f"general.alignment is {step!r}")
        start = -(-self._at // step) * step
        places = {}
        for name, (shape, kind, offset) in found.items():
            try:
                block, packed = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(kind)]
            except (KeyError, ValueError):
                raise self._bad(
                    f"tensor {name!r} is packed in a way ({kind}) that gguf does not know"
                ) from None
            elements = int(np.prod(shape, dtype=object)) if shape else 1
            if not shape or shape[-1] % block:
                raise self._bad(f"tensor {name!r} of shape {shape} is not made of blocks of {block}")
            size = elements // block * packed
            if start + offset + size > len(self._data):
                raise InputError(
                    f"{self.path} is cut off: tensor {name!r} ends at byte {start + offset + size:,}, the file at "
                    f"{len(self._data):,}; fetch it again"
                )
            places[name] = Place(shape, kind, start + offset, size)
        return places

    def tensor(self, name: str) -> Tensor:
        """One tensor, unpacked to float32."""
        place = self.places[name]
        kind = self._gguf.GGMLQuantizationType(place.kind)
        raw = np.frombuffer(self._data, np.uint8, place.size, place.first)
        plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(kind.name)
        if plain is not None:
            return torch.from_numpy(raw.view(plain).reshape(place.shape).astype(np.float32))
        try:
            out = self._gguf.dequantize(raw.reshape(*place.shape[:-1], -1), kind)
        except NotImplementedError as e:
            raise self._bad(f"tensor {name!r} is packed as {kind.name}, which gguf cannot unpack") from e
        return torch.from_numpy(np.ascontiguousarray(out.reshape(place.shape), dtype=np.float32))

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    # ---- the header's parts ------------------------------------------------------------------------------------

    def _bad(self, what: str) -> InputError:
        return InputError(f"{self.path} is damaged or of a kind that is not known: {what}")

    def _take(self, size: int) -> int:
        """Go on by `size` bytes; gives where they begin."""
        at = self._at
        if size > len(self._data) - at:
            raise InputError(
                f"{self.path} is cut off or damaged: {self._doing} wants {size:,} bytes, {len(self._data) - at:,} are left"
            )
        self._at = at + size
        return at

    def _scalar(self, letter: str) -> Any:
        size = struct.calcsize("<" + letter)
        return struct.unpack_from("<" + letter, self._data, self._take(size))[0]

    def _string(self) -> str:
        size = self._scalar("Q")
        at = self._take(size)
        try:
            return self._data[at : at + size].decode()
        except UnicodeDecodeError as e:
            raise self._bad(f"{self._doing} is not UTF-8") from e

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise self._bad(f"{self._doing} is of type {kind}")
        of, count = self._scalar("I"), self._scalar("Q")
        if of in SCALARS:
            size = struct.calcsize("<" + SCALARS[of])
            at = self._take(count * size)
            return np.frombuffer(self._data, np.dtype(SCALARS[of]).newbyteorder("<"), count, at).tolist()
        self._doing += f" (an array of {count:,})"
        if of == ARRAY:
            raise self._bad(f"{self._doing} holds arrays")
        if count > len(self._data) - self._at:  # each needs a byte at least
            self._take(count)
        return [self._value(of) for _ in range(count)]
