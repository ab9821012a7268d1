"""Reads time series from CSV files with a header -> (C, T) with NaN at missing values.

Notable: a time column places every row at its time step, so missing rows become NaN steps and not jumps in time. Every
error names the line.
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
LIMIT = 1e37  # of absolute values: float32 with headroom for the variance


def read_series(
    source: Any, columns: Sequence[str] | None = None, time: str | None = None
) -> tuple[np.ndarray, list[str]]:
    """A CSV file -> its values and its column names.

    The first line after comments (``#``) has the column names. The delimiter is a comma, semicolon or tab, whichever is
    most frequent in the first line. Empty fields, ``nan``, ``na``, ``n/a``, ``null``, ``none``, ``-`` and ``?`` are missing
    values.

    Args:
        source: path, bytes or binary file, UTF-8.
        columns: the columns to use as channels, in this order. None: all but the time column.
        time: the column of time stamps, numbers or ISO 8601, ascending. Missing time steps become NaN. None: every row is
            one step.

    Returns:
        (C, T) float64 and C names.

    Raises:
        InputError: the file is invalid; names file, line and column.
    """
    data, name = _data(source)
    rows = _rows(data, name)
    _, header = next(rows, (1, []))
    if not header:
        raise InputError(f"{name}: is empty, expected a line of column names and rows of numbers")
    header = [cell.strip() for cell in header]
    indices = _column_indices(header, columns, time, name)
    stamps: list[tuple[int, str]] = []
    values = [array("d") for _ in indices]
    blank = None
    for line, cells in rows:
        if not cells:
            blank = blank or line
            continue
        if blank is not None:
            raise InputError(
                f"{name}, line {blank}: is blank between rows; remove it, or write nan for missing values"
            )
        if len(cells) != len(header):
            raise InputError(
                f"{name}, line {line}: found {len(cells)} fields, expected {len(header)} ({', '.join(header)})"
            )
        for out, i in zip(values, indices, strict=True):
            out.append(_number(cells[i], name, line, header[i]))
        if time is not None:
            stamps.append((line, cells[header.index(time)].strip()))
    table = np.array([np.frombuffer(v, np.float64) if v else np.empty(0) for v in values])
    if not table.shape[1]:
        raise InputError(f"{name}: has column names and no rows")
    if time is not None:
        table = _on_regular_grid(table, stamps, name, time)
    return table, [header[i] for i in indices]


def _data(source: Any) -> tuple[bytes, str]:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), f"<{len(source)} bytes>"
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        try:
            mode = os.stat(source).st_mode
            if not stat.S_ISREG(mode):  # a pipe or a device could block or never end
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
    """(line number, fields) of every row; a blank line has no fields."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise InputError(
            f"{name}, line {line}: has byte 0x{data[e.start]:02X}, which is not UTF-8; save the file as UTF-8"
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


def _column_indices(
    header: list[str], columns: Sequence[str] | None, time: str | None, name: str
) -> list[int]:
    """Indices of the channels in the header."""
    if all(_is_number(cell) for cell in header):
        raise InputError(
            f"{name}, line 1: has numbers ({', '.join(header[:4])}), expected column names; add a first line such as "
            "load,temperature"
        )
    for cell in header:
        if not cell or header.count(cell) > 1:
            what = f"occurs {header.count(cell)} times" if cell else "has no name"
            raise InputError(f"{name}, line 1: column {cell!r} {what}; give each column a unique name")
    for column in [*(columns or ()), *([time] if time is not None else ())]:
        if column not in header:
            raise InputError(f"{name}, line 1: no column {column!r}; found {', '.join(header)}")
    chosen = columns if columns is not None else [cell for cell in header if cell != time]
    if not chosen:
        raise InputError(f"{name}, line 1: has only the time column {time!r}, expected channels")
    return [header.index(cell) for cell in chosen]


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
        hint = f"; if it is the time column, pass time={column!r}" if _seconds(cell) is not None else ""
        raise InputError(
            f"{name}, line {line}, column {column!r}: found {cell[:40]!r}, expected a number with a decimal point, or "
            f"an empty field for a missing value{hint}"
        ) from e
    if not abs(value) < LIMIT:
        raise InputError(
            f"{name}, line {line}, column {column!r}: found {cell[:40]!r}, expected a finite number below {LIMIT:g}; "
            "leave the field empty for a missing value"
        )
    return value


def _seconds(cell: str) -> float | None:
    """A number unchanged, or an ISO 8601 time stamp in seconds; None if neither. Without a time zone it is UTC."""
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


def _on_regular_grid(table: np.ndarray, stamps: list[tuple[int, str]], name: str, time: str) -> np.ndarray:
    """Rows on a regular time grid, with NaN at missing steps.

    The step is the median of the short differences. Each difference is rounded separately, so rounded time stamps (0.333,
    0.667) do not drift, and months or years count as regular.
    """
    times = []
    for line, cell in stamps:
        second = _seconds(cell)
        if second is None or not np.isfinite(second):
            raise InputError(
                f"{name}, line {line}, column {time!r}: found {cell[:40]!r}, expected a number or an ISO 8601 time such "
                "as 2024-05-01T12:00"
            )
        times.append(second)
    gaps = np.diff(np.array(times))
    if not len(gaps):
        return table
    wrong = np.flatnonzero(gaps <= 0)
    if len(wrong):
        (_, before), (line, cell) = stamps[wrong[0]], stamps[wrong[0] + 1]
        raise InputError(
            f"{name}, line {line}: time {cell} is not after {before} in the previous row; sort the rows, one per time"
        )
    step = float(np.median(gaps[gaps < 1.5 * gaps.min()]))
    steps = np.maximum(1, np.round(gaps / step))
    off = np.flatnonzero(np.abs(gaps / step - steps) > 0.1)
    if len(off):
        line, cell = stamps[off[0] + 1]
        raise InputError(
            f"{name}, line {line}: time {cell} is {gaps[off[0]]:g} after the previous row, which is no integer multiple of "
            f"the step {step:g}; resample to a regular step, or choose columns= and use time=None (one row per step)"
        )
    if steps.sum() + 1 > max(1_000_000, 100 * len(times)):
        raise InputError(
            f"{name}: {len(times)} rows over {steps.sum() + 1:.0f} steps of {step:g}, nearly all missing; split the "
            "file at its long gaps"
        )
    indices = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
    grid = np.full((len(table), indices[-1] + 1), np.nan)
    grid[:, indices] = table
    return grid
