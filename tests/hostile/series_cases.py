"""Hostile time series in CSV files."""

from __future__ import annotations

from cases import case
from image_cases import encode, noise


def table(rows: int, **at: str) -> bytes:
    """Two columns of integers, except for rows given as row3="nan,1"."""
    lines = [at.get(f"row{i}", f"{i},{i * i}") for i in range(rows)]
    return ("load,heat\n" + "\n".join(lines) + "\n").encode()


def stamped(*times: str) -> bytes:
    return ("time,load,heat\n" + "".join(f"{t},{i},{i}\n" for i, t in enumerate(times))).encode()


S = "series"  # two channels, patch 4, stride 2
case(S, "20-rows.csv", 2 * 9, lambda: table(20))
case(S, "one-row.csv", 2, lambda: table(1))
case(S, "5-rows.csv", 2 * 2, lambda: table(5))
case(S, "missing-values.csv", 2 * 9, lambda: table(20, row3="nan,", row9="-,81"))
case(S, "semicolons.csv", 2, lambda: b"load;heat\n1;2\n")
case(S, "nothing-observed.csv", "", lambda: table(3, row0=",", row1=",", row2=","))
case(S, "decimal-commas.csv", "line 2", lambda: b'load,heat\n"1,5",2\n')
case(S, "ragged.csv", "line 5: found 3 fields", lambda: table(9, row3="1,2,3"))
case(S, "text-in-a-cell.csv", "line 4, column 'heat'", lambda: table(9, row2="1,warm"))
case(S, "infinite.csv", "finite", lambda: table(9, row2="1,inf"))
case(S, "1e300.csv", "finite", lambda: table(9, row2="1,1e300"))
case(S, "no-names.csv", "line 1", lambda: b"1,2\n3,4\n")
case(S, "twice-named.csv", "2 times", lambda: b"load,load\n1,2\n")
case(S, "names-alone.csv", "no rows", lambda: b"load,heat\n")
case(S, "three-columns.csv", "", lambda: b"a,b,c\n1,2,3\n")
case(S, "empty.csv", "", lambda: b"")
case(S, "blank-between.csv", "blank", lambda: table(9, row3=""))
case(S, "byte-0x92.csv", "line 2: has byte 0x92", lambda: b"load,heat\n1,it\x92s\n")
case(S, "open-quote.csv", "", lambda: b'load,heat\n"1,2\n3,4\n')
case(S, "zero-bytes.csv", "", lambda: b"load,heat\n\0\0,\0\n")
case(S, "field-of-a-megabyte.csv", "", lambda: b"load,heat\n" + b"1" * (1 << 20) + b",2\n")
case(S, "image.csv", "", lambda: encode(noise(8, 8, 3)))
Z = "series timed"
case(Z, "a-row-left-out.csv", 2 * 2, lambda: stamped("0", "1", "2", "4"))
case(Z, "backwards.csv", "is not after", lambda: stamped("2", "1"))
case(Z, "ages-apart.csv", "nearly all missing", lambda: stamped("0", "1", "1e12"))
case(Z, "no-time.csv", "", lambda: stamped("0", "yesterday"))
case(Z, "endless.csv", "", lambda: stamped("0", "1e999"))
