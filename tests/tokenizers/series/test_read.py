"""Reading of CSV time series: delimiters, missing values, time columns, and every kind of invalid table."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt
from worldtokens.tokenizers.series.read import read_series

# real monthly quotes since 1990, half of the rows blank
STOCKS = Path(matplotlib.get_data_path()) / "sample_data" / "Stocks.csv"
NAN = float("nan")


def test_delimiters_missing_values_and_comments():
    want = np.array([[1, 2, NAN], [0.5, NAN, -2e3]])
    for text in (
        "a,b\n1,.5\n2,\nNaN,-2e3\n",
        "a;b\r\n1;.5\r\n2;n/a\r\n;-2e3\r\n\r\n",
        "a\tb\n1\t.5\n2\t?\nnull\t-2e3",
    ):
        for data in (text.encode(), b"\xef\xbb\xbf" + text.encode(), b"# from somewhere\n" + text.encode()):
            values, names = read_series(data)
            assert names == ["a", "b"] and np.array_equal(values, want, equal_nan=True)
    values, names = read_series(b'"x, y",z\n1,2\n', columns=["z", "x, y"])
    assert values.tolist() == [[2], [1]]


@pytest.mark.parametrize(
    "stamps, indices",
    [
        (["0", "1", "3", "4"], [0, 1, 3, 4]),
        (["0.333", "0.667", "1.0", "2.0"], [0, 1, 2, 5]),  # rounded thirds
        (["2024-01-01", "2024-02-01", "2024-03-01", "2024-06-01"], [0, 1, 2, 5]),  # months
        (
            ["2024-01-01T00:00Z", "2024-01-01T02:00+01:00", "2024-01-01T02:00Z", "2024-01-01T05:00Z"],
            [0, 1, 2, 5],
        ),
    ],
)
def test_rows_are_placed_at_their_time(stamps, indices):
    values, _ = read_series(
        ("t,v\n" + "\n".join(f"{t},{i}" for i, t in enumerate(stamps))).encode(), time="t"
    )
    want = np.full((1, indices[-1] + 1), NAN)
    want[0, indices] = range(len(stamps))
    assert np.array_equal(values, want, equal_nan=True)


@pytest.mark.parametrize(
    "text, options, found",
    [
        (b"", {}, "is empty"),
        (b"a,b\n", {}, "no rows"),
        (b"1,2\n3,4\n", {}, "line 1: has numbers"),
        (b"a,b\n1,2\n3\n", {}, "line 3: found 1 fields, expected 2"),
        (b"a,b\n1,2\n3,x\n", {}, "line 3, column 'b': found 'x'"),
        (b"a,b\n1,2\n3,1e99\n", {}, "line 3, column 'b'.*finite"),
        (b"a,b\n1,inf\n", {}, "line 2, column 'b'.*finite"),
        (b"a;b\n1,5;2\n", {}, "line 2, column 'a'.*decimal point"),
        (b"d,b\n2024-01-01,2\n", {}, "line 2, column 'd'.*pass time='d'"),
        (b"a,b\n1,2\n\n3,4\n", {}, "line 3: is blank"),
        (b"a,b\n1,2\n3,\x92\n", {}, "line 3: has byte 0x92"),
        (b'a,b\n1,2\n"3,4\n', {}, "line 3"),
        (b"a,a\n1,2\n", {}, "'a' occurs 2 times"),
        (b"a,\n1,2\n", {}, "has no name"),
        (b"a,b\n1,2\n", {"columns": ["c"]}, "no column 'c'; found a, b"),
        (b"a,b\n1,2\n", {"time": "c"}, "no column 'c'"),
        (b"a\n1\n", {"time": "a"}, "only the time column"),
        (b"t,b\n1,2\n1,3\n", {"time": "t"}, "line 3: time 1 is not after 1"),
        (b"t,b\n1,2\nsoon,3\n", {"time": "t"}, "line 3, column 't': found 'soon'"),
        (b"t,b\n0,1\n1,2\n2.5,3\n", {"time": "t"}, "line 4: time 2.5 is 1.5 after"),
        (b"t,b\n0,1\n1,2\n1e12,3\n", {"time": "t"}, "nearly all missing"),
    ],
)
def test_an_invalid_table_raises_with_its_line(tmp_path, text, options, found):
    path = tmp_path / "bad.csv"
    path.write_bytes(text)
    with pytest.raises(wt.InputError, match=f"bad.csv.*{found}"):
        wt.SeriesTokenizer(8, None, mix="none", **options).read(path)


def test_real_irregular_dates_raise():
    """The dividend rows of the quotes lie between the months; the error names the first one."""
    with pytest.raises(wt.InputError, match=r"Stocks.csv, line \d+: time \S+ is "):
        read_series(STOCKS, time="Date")


def test_folders_and_text_mode_files_raise(tmp_path):
    with pytest.raises(wt.InputError, match="is a folder"):
        wt.SeriesTokenizer(16).read(tmp_path)
    (tmp_path / "a.csv").write_text("a\n1\n")
    with open(tmp_path / "a.csv") as f, pytest.raises(wt.InputError, match="open as text"):
        wt.SeriesTokenizer(16).read(f)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_changed_bytes_give_tokens_or_an_input_error(data):
    """Real lines with bytes changed: tokens or InputError, nothing else."""
    raw = bytearray(b"".join(STOCKS.read_bytes().splitlines(keepends=True)[1:12]))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    tok = wt.SeriesTokenizer(4, None, mix="none", time=data.draw(st.sampled_from([None, "Date"])))
    try:
        assert tok.tokens([bytes(raw)]).x.isfinite().all()
    except wt.InputError as e:
        assert len(str(e)) > 10
