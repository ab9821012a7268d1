"""Time series: against PatchTST's own modules, on real quotes with gaps, and every way a table can be wrong."""

import math
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers.series.read import read_series

STOCKS = (
    Path(matplotlib.get_data_path()) / "sample_data" / "Stocks.csv"
)  # ten quotes since 1990, half the rows blank
NAN = float("nan")


@pytest.fixture(scope="module")
def quotes():
    """(3, 524) of real prices; AMZN begins late, every second row is missing."""
    values, names = read_series(STOCKS, ["IBM", "AMZN", "MSFT"])
    assert names == ["IBM", "AMZN", "MSFT"] and np.isnan(values).mean() > 0.3
    return values


def front(**options):
    torch.manual_seed(0)
    return wt.SeriesTokenizer(16, **options)


# ---- the contract ----------------------------------------------------------------------------------------------

BAD = [b"", b"a,b\n", "/no/such/file.csv", 3, np.zeros((2, 8)), np.full((3, 8), NAN), np.zeros((3, 0))]
BAD += [np.array([["x"] * 4] * 3), torch.zeros(3, 4, dtype=torch.complex64), np.full((3, 8), np.inf)]


@pytest.mark.parametrize(
    "options",
    [
        {"mix": "attention"},
        {"mix": "attention", "empty": "token", "positions": "learned", "max_patches": 66},
        {"mix": "patch", "stride": 16},
        {"mix": "patch", "empty": "token", "normalize": False},
    ],
)
def test_the_contract_on_real_quotes(quotes, options):
    options = {"columns": ["IBM", "AMZN", "MSFT"], "channels": 3, **options}
    samples = [STOCKS, quotes[:, :100], quotes[:, 400:423], torch.from_numpy(quotes[:, 60:77])]
    samples.append(np.concatenate([quotes[:, :30], np.full((3, 40), NAN), quotes[:, 70:99]], 1))  # an outage
    # prices as they are run into the thousands, and so do float32's last digits
    tolerance = 1e-5 if options.get("normalize", True) else 1e-3
    run = check_tokenizer(front(**options), samples, bad=BAD, tolerance=tolerance)
    assert "check_refused" in run


def test_the_contract_with_one_channel_by_itself(quotes):
    check_tokenizer(front(mix="none"), [quotes[0], quotes[0, 300:], quotes[2, :19]], bad=BAD)


# ---- PatchTST --------------------------------------------------------------------------------------------------


def test_equal_to_patchtst(quotes):
    """Scaled, cut and embedded as in transformers' PatchTST; max abs difference below 1e-4 (5e-6 comes from its eps)."""
    m = pytest.importorskip("transformers.models.patchtst.modeling_patchtst")
    series = torch.from_numpy(quotes[[0, 2], ::2][:, :64])  # P + k S steps, IBM and MSFT, nothing missing
    series = torch.cat([series, series.log()])  # another two channels
    series[3, 10:13] = NAN
    config = m.PatchTSTConfig(
        num_input_channels=4,
        context_length=64,
        patch_length=16,
        patch_stride=8,
        d_model=16,
        positional_dropout=0.0,
    )
    scaler, cut, embed = m.PatchTSTStdScaler(config), m.PatchTSTPatchify(config), m.PatchTSTEmbedding(config)
    place = m.PatchTSTPositionalEncoding(config, 7)
    ours = front(mix="none", channels=None, positions="learned", max_patches=7)
    with torch.no_grad():
        ours.value.weight.copy_(embed.input_embedding.weight)
        ours.value.bias.copy_(embed.input_embedding.bias.normal_())
        ours.position.copy_(place.position_enc.normal_())
        ours.gap.weight.zero_()  # PatchTST is not told what is missing
    there = ~series.isnan()
    data = series.nan_to_num().T[None].double()
    scaled, loc, scale = scaler(data, there.T[None])
    want = place(embed(cut((scaled * there.T[None]).float())))[0]  # (C, n, D)
    batch = ours.collate([ours.read(series)])
    got = ours(batch)
    assert got.x.shape == (1, 28, 16)
    assert (got.x[0] - want.flatten(0, 1)).abs().max() < 1e-4
    assert torch.allclose(batch["mean"][0].double(), loc[0, 0], rtol=1e-5)
    assert torch.allclose(batch["std"][0].double(), scale[0, 0], rtol=1e-3)


def test_the_second_map_adds_nothing_where_all_is_there():
    tok = front(mix="none", positions="none")
    t = tok.tokens([np.sin(np.arange(32.0))])
    batch = tok.collate([tok.read(np.sin(np.arange(32.0)))])
    assert torch.equal(t.x, tok.value(batch["patches"]))


# ---- patches and positions -------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 70), st.integers(1, 20), st.integers(1, 20))
def test_nothing_is_dropped(steps, patch, stride):
    """Every step stands in a patch, at its place; the rest of the last patch is told to be missing."""
    stride = min(stride, patch)
    tok = wt.SeriesTokenizer(4, patch=patch, stride=stride, normalize=False)
    series = torch.arange(1.0, steps + 1)
    batch = tok.collate([tok.read(series)])
    n = tok.patches_of(steps)
    assert batch["patches"].shape == (1, n, patch) and batch["lengths"] == ((n,),)
    seen = set()
    for i in range(n):
        for j in range(patch):
            at = i * stride + j
            if at < steps:
                assert batch["patches"][0, i, j] == series[at] and not batch["missing"][0, i, j]
                seen.add(at)
            else:
                assert batch["patches"][0, i, j] == 0 and batch["missing"][0, i, j]
    assert seen == set(range(steps))
    # and no patch is one too many
    assert n == 1 or (n - 2) * stride + patch < steps


def test_positions_are_patch_and_channel():
    t = front(channels=2, patch=4, stride=4).tokens([torch.arange(20.0).view(2, 10)])
    assert t.pos[0].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0], [1, 1, 0], [2, 1, 0]]
    t = front(channels=2, patch=4, stride=4, mix="patch").tokens([torch.arange(20.0).view(2, 10)])
    assert t.pos[0].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]


def test_patches_of_mixed_channels_hold_all_of_them():
    tok = front(channels=2, patch=3, stride=3, mix="patch", normalize=False)
    batch = tok.collate([tok.read(np.array([[1, 2, 3, 4], [5, 6, NAN, 8]]))])
    assert batch["patches"][0].tolist() == [[1, 2, 3, 5, 6, 0], [4, 0, 0, 8, 0, 0]]
    assert batch["missing"][0].int().tolist() == [[0, 0, 0, 0, 0, 1], [0, 1, 1, 0, 1, 1]]


def test_channels_apart_share_nothing_but_weights(quotes):
    """mix="none": a channel gives, through a trunk too, what it gives as a series by itself; another may change."""
    tok = front(mix="none", channels=None)
    trunk = wt.Transformer(16, 2, 2, rope=1).eval()
    t = tok.tokens([quotes, quotes[:2, 300:350]])
    out = trunk(t)
    assert (trunk(t.replace(layout=None)).x - out.x)[t.valid].abs().max() < 1e-5
    pooled = out.pool()
    assert pooled.shape == (5, 16)
    alone = [trunk(tok.tokens([c])).pool() for c in [*quotes, *quotes[:2, 300:350]]]
    assert (pooled - torch.cat(alone)).abs().max() < 1e-5
    changed = quotes.copy()
    changed[1] = changed[1] ** 2
    assert torch.equal(
        trunk(tok.tokens([changed, quotes[:2, 300:350]])).pool()[[0, 2, 3, 4]], pooled[[0, 2, 3, 4]]
    )


def test_channels_that_read_each_other(quotes):
    tok = front(channels=3)
    trunk = wt.Transformer(16, 2, 2, rope=2).eval()
    t = tok.tokens([quotes])
    changed = quotes.copy()
    changed[1] = changed[1] ** 2
    mine = t.pos[0, :, 1] == 0
    assert (trunk(t).x - trunk(tok.tokens([changed])).x)[0, mine].abs().max() > 1e-3


# ---- normalisation ---------------------------------------------------------------------------------------------


def test_mean_and_spread_by_hand():
    tok = front(channels=2, patch=4)
    batch = tok.collate([tok.read(np.array([[1.0, 2, 3, NAN], [7, 7, 7, 7]]))])
    assert batch["mean"].tolist() == [[2, 7]]
    assert batch["std"][0, 0].item() == pytest.approx(math.sqrt(2 / 3)) and batch["std"][0, 1] == 1
    edge = 1 / math.sqrt(2 / 3)
    assert batch["patches"][0].tolist() == [pytest.approx([-edge, 0, edge, 0]), [0, 0, 0, 0]]


def test_restore_takes_values_back(quotes):
    tok = front(channels=3, patch=8, stride=8)
    batch = tok.collate([tok.read(quotes[:, :80]), tok.read(quotes[:, 300:348])])
    back = tok.restore(batch["patches"].new_zeros(2, 3, 5), batch)
    assert torch.equal(back, batch["mean"][..., None].expand(2, 3, 5))
    # AMZN has no value in the first 80 rows, so IBM's and MSFT's ten patches each stand there
    values = batch["patches"][0].view(-1, 8)[:10].reshape(1, 1, 80)
    ibm = tok.restore(values, {k: batch[k][:1, :1] for k in ("mean", "std")})[0, 0]
    there = ~np.isnan(quotes[0, :80])
    assert np.abs(ibm[there].numpy() - quotes[0, :80][there]).max() < 1e-5 * quotes[0, :80][there].max()


@pytest.mark.parametrize("scale, shift", [(1e-20, 0), (1e20, 0), (1, 1e9), (-3, 100)])
def test_scale_and_shift_leave_no_trace(quotes, scale, shift):
    """A series in other units gives the same tokens (mirrored for a negative scale); a far zero point costs no digits."""
    tok = front(mix="none", positions="none")
    with torch.no_grad():
        tok.value.bias.zero_(), tok.gap.weight.zero_()
    a, b = tok.tokens([quotes[0]]).x, tok.tokens([quotes[0] * scale + shift]).x
    assert (a * math.copysign(1, scale) - b).abs().max() < 1e-5


# ---- missing values --------------------------------------------------------------------------------------------


def test_missing_values_are_told_and_not_zeros():
    tok = front(patch=4, normalize=False)
    a = tok.tokens([np.array([1.0, 0, 3, 4])]).x
    b = tok.tokens([np.array([1.0, NAN, 3, 4])]).x
    assert a.isfinite().all() and b.isfinite().all() and (a - b).abs().max() > 1e-3
    masked = np.ma.array([1.0, 99, 3, 4], mask=[0, 1, 0, 0])
    assert torch.equal(tok.tokens([masked]).x, b)


def test_patches_with_nothing_observed():
    series = np.array([[NAN] * 4 + [1, 2, 3, 4] + [NAN] * 4, [1, 2] * 6])
    drop = front(channels=2, patch=4, stride=4).tokens([series])
    assert drop.layout.lengths == ((4,),) and drop.valid.all()
    assert drop.pos[0, :, :2].tolist() == [[1, 0], [0, 1], [1, 1], [2, 1]]
    tok = front(channels=2, patch=4, stride=4, empty="token", positions="none")
    token = tok.tokens([series])
    assert token.shape[1] == 6
    empty = tok.absent + tok.channel.weight[0]
    assert torch.equal(token.x[0, 0], empty) and torch.equal(token.x[0, 2], empty)
    apart = front(channels=2, patch=4, stride=4, mix="none").tokens([series])
    assert apart.layout.lengths == ((1, 3),) and apart.segment.tolist() == [[0, 1, 1, 1]]


# ---- CSV -------------------------------------------------------------------------------------------------------


def test_csv_forms():
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


def test_a_csv_file_equals_its_array(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("t,load,heat\n0,1.5,2\n1,2.5,\n2,3.5,4\n")
    tok = front(channels=2, time="t")
    with open(path, "rb") as f:
        sources = [path, str(path), path.read_bytes(), f]
        for source in sources:
            assert torch.equal(
                tok.read(source).nan_to_num(-1), torch.tensor([[1.5, 2.5, 3.5], [2, -1, 4]]).double()
            )


@pytest.mark.parametrize(
    "stamps, places",
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
def test_rows_stand_at_their_time(stamps, places):
    values, _ = read_series(
        ("t,v\n" + "\n".join(f"{t},{i}" for i, t in enumerate(stamps))).encode(), time="t"
    )
    want = np.full((1, places[-1] + 1), NAN)
    want[0, places] = range(len(stamps))
    assert np.array_equal(values, want, equal_nan=True)


@pytest.mark.parametrize(
    "text, options, found",
    [
        (b"", {}, "is empty"),
        (b"a,b\n", {}, "no rows"),
        (b"1,2\n3,4\n", {}, "line 1: holds numbers"),
        (b"a,b\n1,2\n3\n", {}, "line 3: found 1 fields, expected 2"),
        (b"a,b\n1,2\n3,x\n", {}, "line 3, column 'b': found 'x'"),
        (b"a,b\n1,2\n3,1e99\n", {}, "line 3, column 'b'.*finite"),
        (b"a,b\n1,inf\n", {}, "line 2, column 'b'.*finite"),
        (b"a;b\n1,5;2\n", {}, "line 2, column 'a'.*decimal point"),
        (b"d,b\n2024-01-01,2\n", {}, "line 2, column 'd'.*pass time='d'"),
        (b"a,b\n1,2\n\n3,4\n", {}, "line 3: is blank"),
        (b"a,b\n1,2\n3,\x92\n", {}, "line 3: holds byte 0x92"),
        (b'a,b\n1,2\n"3,4\n', {}, "line 3"),
        (b"a,a\n1,2\n", {}, "'a' comes 2 times"),
        (b"a,\n1,2\n", {}, "has no name"),
        (b"a,b\n1,2\n", {"columns": ["c"]}, "no column 'c'; found a, b"),
        (b"a,b\n1,2\n", {"time": "c"}, "no column 'c'"),
        (b"a\n1\n", {"time": "a"}, "and no other"),
        (b"t,b\n1,2\n1,3\n", {"time": "t"}, "line 3: time 1 doesn't come after 1"),
        (b"t,b\n1,2\nsoon,3\n", {"time": "t"}, "line 3, column 't': found 'soon'"),
        (b"t,b\n0,1\n1,2\n2.5,3\n", {"time": "t"}, "line 4: time 2.5 lies 1.5 after"),
        (b"t,b\n0,1\n1,2\n1e12,3\n", {"time": "t"}, "nearly all missing"),
    ],
)
def test_a_bad_table_is_named_by_line(tmp_path, text, options, found):
    path = tmp_path / "bad.csv"
    path.write_bytes(text)
    with pytest.raises(wt.InputError, match=f"bad.csv.*{found}"):
        wt.SeriesTokenizer(8, None, mix="none", **options).read(path)


def test_real_dates_that_are_uneven_are_refused():
    """The quotes' dividend rows stand between the months; the complaint names the first."""
    with pytest.raises(wt.InputError, match=r"Stocks.csv, line \d+: time \S+ lies"):
        read_series(STOCKS, time="Date")


def test_folders_and_text_files_are_refused(tmp_path):
    with pytest.raises(wt.InputError, match="is a folder"):
        front().read(tmp_path)
    (tmp_path / "a.csv").write_text("a\n1\n")
    with open(tmp_path / "a.csv") as f, pytest.raises(wt.InputError, match="open as text"):
        front().read(f)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bytes_read_or_say_so(data):
    """Real lines with bytes changed: tokens or InputError, nothing else."""
    raw = bytearray(b"".join(STOCKS.read_bytes().splitlines(keepends=True)[1:12]))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    tok = wt.SeriesTokenizer(4, None, mix="none", time=data.draw(st.sampled_from([None, "Date"])))
    try:
        assert tok.tokens([bytes(raw)]).x.isfinite().all()
    except wt.InputError as e:
        assert len(str(e)) > 10


@pytest.mark.parametrize(
    "options",
    [
        {"patch": 0},
        {"patch": 4, "stride": 5},
        {"mix": "all"},
        {"channels": None},
        {"channels": 0},
        {"columns": "ab", "channels": 2},
        {"columns": ["a"], "channels": 2},
        {"empty": "zero"},
        {"positions": "rope"},
    ],
)
def test_settings_out_of_range(options):
    with pytest.raises(wt.InputError):
        wt.SeriesTokenizer(8, **options)


def test_too_long_for_learned_positions():
    tok = front(patch=4, stride=4, positions="learned", max_patches=3)
    tok.tokens([np.arange(12.0)])
    with pytest.raises(wt.InputError, match="13 steps, 4 patches, more than max_patches=3"):
        tok.tokens([np.arange(13.0)])


def test_channels_last_is_not_guessed(quotes):
    with pytest.raises(wt.InputError, match=r"524 channels, expected 3; an array is \(C, T\)"):
        front(channels=3).read(quotes.T)
