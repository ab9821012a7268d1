"""Reading of whole files with size limits: shared by the readers of point clouds, meshes, latents, series and cameras."""

from __future__ import annotations

import io
import os
import re
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from worldtokens.errors import InputError

MAX_BYTES = 256 << 20  # of a file, or of its decompressed content
MAX_TEXT = 128 << 20  # bytes of a text file; parsing takes several times as much
MAX_LINES = 2_000_000  # a parsed line takes about 600 bytes
MAX_LINE = 1 << 20  # bytes of one line


def read_bytes(source: Any, suffixes: Sequence[str]) -> tuple[str, bytes, str]:
    """Read a regular file, bytes or a binary file object whole: (name, data, lower-case suffix or "").

    Raises:
        InputError: it does not exist, is empty, is larger than 256 MB, or has a suffix other than `suffixes`.
    """
    expected = f"expected a file that ends in one of .{' .'.join(suffixes)}"
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        try:
            info = os.stat(source)
            if not stat.S_ISREG(info.st_mode):  # a pipe or a device could block, or never end
                what = "a folder" if stat.S_ISDIR(info.st_mode) else "no regular file"
                raise InputError(f"{name}: is {what}, {expected}")
            if info.st_size > MAX_BYTES:
                raise InputError(f"{name}: has {info.st_size:,} bytes, more than the {MAX_BYTES:,} that are read; "
                                 "reduce or split it first")  # fmt: skip
            data = Path(source).read_bytes()
        except FileNotFoundError as e:
            raise InputError(f"{name}: no such file") from e
        except (OSError, ValueError) as e:
            raise InputError(f"{name!r}: cannot be opened: {getattr(e, 'strerror', None) or e}") from e
        named = True
    elif isinstance(source, bytes | bytearray | memoryview):
        name, data, named = f"<{len(source)} bytes>", bytes(source), False
    elif hasattr(source, "read"):
        name = str(getattr(source, "name", f"<{type(source).__name__}>"))
        named = isinstance(getattr(source, "name", None), str)
        try:
            data = source.read(MAX_BYTES + 1)
        except (OSError, ValueError) as e:
            raise InputError(f"{name}: cannot be read as a file: {e}") from e
        if not isinstance(data, bytes):
            raise InputError(f"{name}: is open as text, expected binary: open(path, 'rb')")
    else:
        raise InputError(
            f"{type(source).__name__} {repr(source)[:60]} cannot be read: {expected}, bytes or an array"
        )
    if len(data) > MAX_BYTES:
        raise InputError(f"{name}: has more than the {MAX_BYTES:,} bytes that are read")
    if not data:
        raise InputError(f"{name}: is empty (0 bytes), {expected}")
    suffix = Path(name).suffix[1:].lower() if named else ""
    if suffix and suffix not in suffixes:
        raise InputError(f"{name}: ends in .{suffix}, {expected}")
    return name, data, suffix


def read_arrays(data: bytes, name: str) -> dict[str, np.ndarray]:
    """The arrays of an .npy (under ``"data"``) or .npz file; pickled objects are never loaded.

    Raises:
        InputError: it is damaged, contains objects, or decompresses to more than 256 MB.
    """
    try:
        if data[:2] != b"PK":
            return {"data": np.load(io.BytesIO(data), allow_pickle=False)}
        with zipfile.ZipFile(io.BytesIO(data)) as z:
            size = sum(i.file_size for i in z.infolist())
        if size > MAX_BYTES:
            raise InputError(
                f"{name}: decompresses to {size:,} bytes, more than the {MAX_BYTES:,} that are read"
            )
        with np.load(io.BytesIO(data), allow_pickle=False) as z:
            return {k: z[k] for k in z.files}
    except InputError:
        raise
    except Exception as e:  # zipfile, zlib and numpy each raise their own
        raise InputError(
            f"{name}: cannot be read as a NumPy file ({type(e).__name__}: {str(e)[:200]}); write it with np.save or "
            "np.savez, numbers only"
        ) from e


def read_text(data: bytes, name: str) -> str:
    """Bytes of a text file with one record per line -> str; invalid UTF-8 is replaced.

    Raises:
        InputError: it is too large, has too many or too long lines, or contains zero bytes.
    """
    lines = data.count(b"\n")
    if len(data) > MAX_TEXT or lines > MAX_LINES:
        raise InputError(
            f"{name}: has {len(data):,} bytes in {lines:,} lines of text, and no more than {MAX_TEXT:,} in {MAX_LINES:,} "
            "are read; save it in a binary format (.ply, .npz)"
        )
    if re.search(rb"[^\n]{%d}" % MAX_LINE, data):
        raise InputError(
            f"{name}: a line has more than {MAX_LINE:,} bytes, expected one point or face per line"
        )
    if b"\0" in data:
        raise InputError(f"{name}: contains zero bytes, expected text")
    return data.decode("utf-8", "replace")
