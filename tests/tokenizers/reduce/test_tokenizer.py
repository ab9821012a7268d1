"""`TokenReducer`: the tokenizer contract with real front-ends, and training mode."""

from pathlib import Path

import matplotlib
import pytest
import torch

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.testing import check_tokenizer
from worldtokens.tokenizers.series.read import read_series


@pytest.fixture(scope="module")
def images():
    rows = samples.open("emoji", split="test")
    return [rows[i]["image"] for i in (0, 40, 90)]


def test_reduced_front_ends_keep_the_contract(images):
    torch.manual_seed(0)
    image = wt.ImageTokenizer(32, patch=16, size=64, class_token=True)
    bad = [b"", b"no image", 7]
    assert "check_refused" in check_tokenizer(wt.TokenReducer(image, 0.5), images, bad=bad)
    check_tokenizer(wt.TokenReducer(image, 0.5, method="merge"), images, bad=bad)


@pytest.mark.parametrize("method", ["random", "merge"])
def test_reduced_front_ends_of_any_length(method):
    """Real prices of unequal lengths: a sample in a padded batch gives what it gives alone."""
    torch.manual_seed(0)
    prices, _ = read_series(Path(matplotlib.get_data_path()) / "sample_data" / "Stocks.csv", ["IBM", "MSFT"])
    prices = prices[:, ::2]
    front = wt.TokenReducer(wt.SeriesTokenizer(32, channels=2, patch=8, stride=8), 0.6, method=method)
    check_tokenizer(
        front, [prices, prices[:, 100:150], prices[:, 30:61], prices[:, 200:]], bad=[b"", prices[:1]]
    )
    tokens = front.train().tokens([prices, prices[:, :20]])
    whole = front.tokenizer.tokens([prices, prices[:, :20]])
    assert whole.layout.lengths == ((66,), (6,))
    # 66 * 0.6 = 39.6 and 6 * 0.6 = 3.6, to the nearest
    assert tokens.layout.lengths == ((40,), (4,)) and tokens.valid.sum(1).tolist() == [40, 4]


def test_random_masking_is_active_in_training_mode_only(images):
    front = wt.TokenReducer(wt.ImageTokenizer(32, patch=16, size=64, class_token=True), keep=0.25)
    whole = front.eval().tokens(images)
    assert whole.shape[1] == 17
    masked = front.train().tokens(images)
    assert masked.shape[1] == 5 and masked.layout.full(5)
    assert torch.equal(masked.x[:, 0], whole.x[:, 0])  # the class token is kept
    assert not torch.equal(masked.pos, front.tokens(images).pos)
    merged = wt.TokenReducer(front.tokenizer, keep=0.25, method="merge").eval().tokens(images)
    assert merged.shape[1] == 5 and torch.equal(merged.x[:, 0], whole.x[:, 0])


def test_wrong_arguments_raise():
    with pytest.raises(wt.InputError, match="expected a front-end"):
        wt.TokenReducer(torch.nn.Linear(2, 2))
    with pytest.raises(wt.InputError, match="'random' or 'merge'"):
        wt.TokenReducer(wt.ImageTokenizer(8), method="drop")
