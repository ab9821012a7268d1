"""`SeriesTokenizer`: equal to PatchTST's modules, patches, positions, normalisation and missing values on real quotes."""

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

# real monthly quotes since 1990, half of the rows blank
STOCKS = Path(matplotlib.get_data_path()) / "sample_data" / "Stocks.csv"
NAN = float("nan")


@pytest.fixture(scope="module")
def quotes():
    """(3, 524) of real prices; AMZN starts late, every second row is missing."""
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
    # prices without normalisation are in the thousands, and so is the rounding error of float32
    tolerance = 1e-5 if options.get("normalize", True) else 1e-3
    run = check_tokenizer(front(**options), samples, bad=BAD, tolerance=tolerance)
    assert "check_refused" in run


def test_the_contract_with_one_channel_by_itself(quotes):
    check_tokenizer(front(mix="none"), [quotes[0], quotes[0, 300:], quotes[2, :19]], bad=BAD)


# ---- PatchTST --------------------------------------------------------------------------------------------------


def test_equal_to_patchtst(quotes):
    """Normalised, patchified and embedded as in transformers' PatchTST; max abs difference below 1e-4 (5e-6 comes from its eps)."""
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
    position = m.PatchTSTPositionalEncoding(config, 7)
    ours = front(mix="none", channels=None, positions="learned", max_patches=7)
    with torch.no_grad():
        ours.proj.weight.copy_(embed.input_embedding.weight)
        ours.proj.bias.copy_(embed.input_embedding.bias.normal_())
        ours.pos_embed.copy_(position.position_enc.normal_())
        ours.missing.weight.zero_()  # PatchTST does not embed the mask of missing values
    observed = ~series.isnan()
    data = series.nan_to_num().T[None].double()
    scaled, loc, scale = scaler(data, observed.T[None])
    want = position(embed(cut((scaled * observed.T[None]).float())))[0]  # (C, n, D)
    batch = ours.collate([ours.read(series)])
    got = ours(batch)
    assert got.x.shape == (1, 28, 16)
    assert (got.x[0] - want.flatten(0, 1)).abs().max() < 1e-4
    assert torch.allclose(batch["mean"][0].double(), loc[0, 0], rtol=1e-5)
    assert torch.allclose(batch["std"][0].double(), scale[0, 0], rtol=1e-3)


def test_the_missing_mask_adds_nothing_without_missing_values():
    tok = front(mix="none", positions="none")
    t = tok.tokens([np.sin(np.arange(32.0))])
    batch = tok.collate([tok.read(np.sin(np.arange(32.0)))])
    assert torch.equal(t.x, tok.proj(batch["patches"]))


# ---- patches and positions -------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 70), st.integers(1, 20), st.integers(1, 20))
def test_every_step_is_in_a_patch(steps, patch, stride):
    """Every step is in a patch at its index; the padding of the last patch is marked as missing."""
    stride = min(stride, patch)
    tok = wt.SeriesTokenizer(4, patch=patch, stride=stride, normalize=False)
    series = torch.arange(1.0, steps + 1)
    batch = tok.collate([tok.read(series)])
    n = tok.num_patches(steps)
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
    # and no patch is redundant
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


def test_independent_channels_share_only_weights(quotes):
    """mix="none": a channel gives, also through a Transformer, what it gives as a single series, whatever the others are."""
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


def test_channels_attend_to_each_other(quotes):
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


def test_denormalize_inverts_the_normalisation(quotes):
    tok = front(channels=3, patch=8, stride=8)
    batch = tok.collate([tok.read(quotes[:, :80]), tok.read(quotes[:, 300:348])])
    back = tok.denormalize(batch["patches"].new_zeros(2, 3, 5), batch)
    assert torch.equal(back, batch["mean"][..., None].expand(2, 3, 5))
    # AMZN has no value in the first 80 rows, so IBM's and MSFT's ten patches each are there
    values = batch["patches"][0].view(-1, 8)[:10].reshape(1, 1, 80)
    ibm = tok.denormalize(values, {k: batch[k][:1, :1] for k in ("mean", "std")})[0, 0]
    observed = ~np.isnan(quotes[0, :80])
    assert (
        np.abs(ibm[observed].numpy() - quotes[0, :80][observed]).max() < 1e-5 * quotes[0, :80][observed].max()
    )


@pytest.mark.parametrize("scale, shift", [(1e-20, 0), (1e20, 0), (1, 1e9), (-3, 100)])
def test_scale_and_shift_change_nothing(quotes, scale, shift):
    """A series in other units gives the same tokens (negated for a negative scale); a large offset loses no precision."""
    tok = front(mix="none", positions="none")
    with torch.no_grad():
        tok.proj.bias.zero_(), tok.missing.weight.zero_()
    a, b = tok.tokens([quotes[0]]).x, tok.tokens([quotes[0] * scale + shift]).x
    assert (a * math.copysign(1, scale) - b).abs().max() < 1e-5


# ---- missing values --------------------------------------------------------------------------------------------


def test_missing_values_differ_from_zeros():
    tok = front(patch=4, normalize=False)
    a = tok.tokens([np.array([1.0, 0, 3, 4])]).x
    b = tok.tokens([np.array([1.0, NAN, 3, 4])]).x
    assert a.isfinite().all() and b.isfinite().all() and (a - b).abs().max() > 1e-3
    masked = np.ma.array([1.0, 99, 3, 4], mask=[0, 1, 0, 0])
    assert torch.equal(tok.tokens([masked]).x, b)


def test_patches_without_observed_values():
    series = np.array([[NAN] * 4 + [1, 2, 3, 4] + [NAN] * 4, [1, 2] * 6])
    drop = front(channels=2, patch=4, stride=4).tokens([series])
    assert drop.layout.lengths == ((4,),) and drop.valid.all()
    assert drop.pos[0, :, :2].tolist() == [[1, 0], [0, 1], [1, 1], [2, 1]]
    tok = front(channels=2, patch=4, stride=4, empty="token", positions="none")
    token = tok.tokens([series])
    assert token.shape[1] == 6
    empty = tok.empty_token + tok.channel_embed.weight[0]
    assert torch.equal(token.x[0, 0], empty) and torch.equal(token.x[0, 2], empty)
    apart = front(channels=2, patch=4, stride=4, mix="none").tokens([series])
    assert apart.layout.lengths == ((1, 3),) and apart.segment.tolist() == [[0, 1, 1, 1]]


# ---- arguments ---------------------------------------------------------------------------------------------------


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


def test_channels_last_raises(quotes):
    with pytest.raises(wt.InputError, match=r"524 channels, expected 3; an array is \(C, T\)"):
        front(channels=3).read(quotes.T)
