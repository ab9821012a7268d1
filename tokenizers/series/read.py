"""Reading a table of measurements: CSV with a header -> (C, T) with NaN where a value is missing.

Notable: a time column puts every row at its own step, so a row that was never written is a gap of NaN and not a jump
in time; every complaint names the line.
"""

from __future__ import annotations

import csv
import datetime
import io
import os
import stat
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from worldtokens.errors import InputError

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "-", "?"))
LIMIT = 1e37  # values beyond it do not fit float32 with room for their spread


def read_series(
    source: Any, columns: Sequence[str] | None = None, time: str | None = None
) -> tuple[np.ndarray, list[str]]:
    """A CSV file -> its numbers and its columns' names.

    The first line, but for comments behind ``#``, names the columns; fields are parted by comma, semicolon or tab, whichever the first line has
    most of. An empty field, ``nan``, ``na``, ``n/a``, ``null``, ``none``, ``-`` and ``?`` mean missing.

    Args:
        source: path, bytes or binary file, UTF-8.
        columns: which columns are channels, in this order. None: all but the time column.
        time: the column of time stamps, numbers or ISO 8601, rising. Rows missing at their even steps become
            NaN. None: every row is one step.

    Returns:
        (C, T) float64 and C names.

    Raises:
        InputError: the file cannot be used; names file, line and column.
    """
    data, name = _data(source)
    rows = _rows(data, name)
    _, header = next(rows, (1, []))
    if not header:
        raise InputError(f"{name}: is empty, expected a line of column names and lines of numbers")
    header = [cell.strip() for cell in header]
    wanted = _wanted(header, columns, time, name)
    stamps: list[tuple[int, str]] = []
    values = [array("d") for _ in wanted]
    blank = None
    for line, cells in rows:
        if not cells:
            blank = blank or line
            continue
        if blank is not None:
            raise InputError(
                f"{name}, line {blank}: is blank between rows; remove it, or write nan where a value is missing"
            )
        if len(cells) != len(header):
            raise InputError(
                f"{name}, line {line}: found {len(cells)} fields, expected {len(header)} ({', '.join(header)})"
            )
        for out, at in zip(values, wanted, strict=True):
            out.append(_number(cells[at], name, line, header[at]))
        if time is not None:
            stamps.append((line, cells[header.index(time)].strip()))
    table = np.array([np.frombuffer(v, np.float64) if v else np.empty(0) for v in values])
    if not table.shape[1]:
        raise InputError(f"{name}: has column names and no rows")
    if time is not None:
        table = _on_even_steps(table, stamps, name, time)
    return table, [header[at] for at in wanted]


def _data(source: Any) -> tuple[bytes, str]:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), f"<{len(source)} bytes>"
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        try:
            mode = os.stat(source).st_mode
            if not stat.S_ISREG(mode):  # a pipe or a device could block, or never end
                kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
                raise InputError(f"{name}: is {kind}, expected a CSV file")
            return Path(source).read_bytes(), name
        except FileNotFoundError as e:
            raise InputError(f"{name}: no such file") from e
        except (OSError, ValueError) as e:  # ValueError: a NUL byte in the name
            raise InputError(f"{name!r}: cannot be opened: {getattr(e, 'strerror', None) or e}") from e
    name = str(getattr(source, "name", f"<{type(source).__name__}>"))
    try:
        data = source.read()
    except (OSError, ValueError) as e:
        raise InputError(f"{name}: cannot be read as a file: {e}") from e
    if not isinstance(data, bytes):
        raise InputError(f"{name}: is open as text, expected binary: open(path, 'rb')")
    return data, name


def _rows(data: bytes, name: str):
    """(line number, fields) of every record; no fields on a blank line."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise InputError(
            f"{name}, line {line}: holds byte 0x{data[e.start]:02X}, which is not UTF-8; save the file as UTF-8"
        ) from e
    skipped = 0  # comments before the header
    while text.startswith("#"):
        skipped, text = skipped + 1, text.partition("\n")[2]
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        line = skipped + reader.line_num + 1
        try:
            yield line, next(reader)
        except StopIteration:
            return
        except csv.Error as e:
            raise InputError(f"{name}, line {line}: {e}; expected CSV") from e


def _wanted(header: list[str], columns: Sequence[str] | None, time: str | None, name: str) -> list[int]:
    """Places of the channels' columns."""
    if all(_is_number(cell) for cell in header):
        raise InputError(
            f"{name}, line 1: holds numbers ({', '.join(header[:4])}), expected the columns' names; put a line such as "
            "load,temperature first"
        )
    for cell in header:
        if not cell or header.count(cell) > 1:
            what = f"comes {header.count(cell)} times" if cell else "has no name"
            raise InputError(f"{name}, line 1: column {cell!r} {what}; give each column a name of its own")
    for asked in [*(columns or ()), *([time] if time is not None else ())]:
        if asked not in header:
            raise InputError(f"{name}, line 1: no column {asked!r}; found {', '.join(header)}")
    wanted = columns if columns is not None else [cell for cell in header if cell != time]
    if not wanted:
        raise InputError(f"{name}, line 1: has the time column {time!r} and no other")
    return [header.index(cell) for cell in wanted]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(cell: str, name: str, line: int, column: str) -> float:
    cell = cell.strip()
    if cell.lower() in MISSING:
        return float("nan")
    try:
        value = float(cell)
    except ValueError as e:
        hint = f"; if it tells the time, pass time={column!r}" if _seconds(cell) is not None else ""
        raise InputError(
            f"{name}, line {line}, column {column!r}: found {cell[:40]!r}, expected a number with a decimal point, or "
            f"an empty field where it is missing{hint}"
        ) from e
    if not abs(value) < LIMIT:
        raise InputError(
            f"{name}, line {line}, column {column!r}: found {cell[:40]!r}, expected a finite number below {LIMIT:g}; "
            "leave the field empty where it is missing"
        )
    return value


def _seconds(cell: str) -> float | None:
    """A number as it is, or an ISO 8601 stamp in seconds; None if neither. Stamps without a zone count as UTC."""
    try:
        return float(cell)
    except ValueError:
        pass
    try:
        stamp = datetime.datetime.fromisoformat(cell[:-1] + "+00:00" if cell.endswith(("Z", "z")) else cell)
    except ValueError:
        return None
    if stamp.tzinfo is None:
        stamp = stamp.replace(tzinfo=datetime.UTC)
    return (stamp - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)).total_seconds()


def _on_even_steps(table: np.ndarray, stamps: list[tuple[int, str]], name: str, time: str) -> np.ndarray:
    """Rows put at even steps of time, NaN between where steps were left out.

    The step is what most of the short gaps are. Gaps are rounded one by one, so rounded stamps (0.333, 0.667) do not
    drift, and months or years count as even.
    """
    at = []
    for line, cell in stamps:
        second = _seconds(cell)
        if second is None or not np.isfinite(second):
            raise InputError(
                f"{name}, line {line}, column {time!r}: found {cell[:40]!r}, expected a number or an ISO 8601 time such "
                "as 2024-05-01T12:00"
            )
        at.append(second)
    gaps = np.diff(np.array(at))
    if not len(gaps):
        return table
    back = np.flatnonzero(gaps <= 0)
    if len(back):
        (_, before), (line, cell) = stamps[back[0]], stamps[back[0] + 1]
        raise InputError(
            f"{name}, line {line}: time {cell} does not come after {before} in the row before; sort the rows, one a time"
        )
    step = float(np.median(gaps[gaps < 1.5 * gaps.min()]))
    steps = np.maximum(1, np.round(gaps / step))
    off = np.flatnonzero(np.abs(gaps / step - steps) > 0.1)
    if len(off):
        line, cell = stamps[off[0] + 1]
        raise InputError(
            f"{name}, line {line}: time {cell} lies {gaps[off[0]]:g} after the row before, which is no whole number of "
            f"steps of {step:g}; resample to even steps, or choose columns= and leave time=None to count rows"
        )
    if steps.sum() + 1 > max(1_000_000, 100 * len(at)):
        raise InputError(
            f"{name}: {len(at)} rows spread over {steps.sum() + 1:.0f} steps of {step:g}, nearly all missing; cut the "
            "file at its long gaps"
        )
    places = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
    even = np.full((len(table), places[-1] + 1), np.nan)
    even[:, places] = table
    return even
