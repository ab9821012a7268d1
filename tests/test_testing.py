"""`check_tokenizer`: a correct front-end passes, and each kind of broken contract is found."""

import pytest
import torch
from torch import nn

import worldtokens as wt
from worldtokens.testing import check_tokenizer


class Letters(wt.Tokenizer):
    """A small correct front-end: lower-case letters with learned positions, padded on the right."""

    modality = "letters"

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.dim = dim
        self.letter = nn.Embedding(27, dim)
        self.position = nn.Parameter(torch.randn(16, dim))

    def read(self, source):
        if not isinstance(source, str) or not source:
            raise wt.InputError(f"{source!r} is not a string of letters")
        return torch.tensor([ord(c) - 96 for c in source])

    def collate(self, raws):
        n = max(len(r) for r in raws)
        ids = torch.zeros(len(raws), n, dtype=torch.long)
        for row, r in zip(ids, raws, strict=True):
            row[: len(r)] = r
        return wt.Batch(ids=ids, lengths=tuple(len(r) for r in raws))

    def embed(self, ids):
        return self.letter(ids) + self.position[: ids.shape[1]]

    def forward(self, batch):
        return self.wrap(self.embed(batch["ids"]), batch["lengths"], ids=batch["ids"])


class MaskInverted(Letters):
    def forward(self, batch):
        t = super().forward(batch)
        return t.replace(valid=~t.valid)


class MaskIgnored(Letters):
    """Marks padding as valid."""

    def forward(self, batch):
        return self.wrap(self.embed(batch["ids"]), [batch["ids"].shape[1]] * len(batch["ids"]))


class PaddingLeaks(Letters):
    """Adds the mean over the row, padding included."""

    def embed(self, ids):
        x = super().embed(ids)
        return x + x.mean(1, keepdim=True)


class BatchDependent(Letters):
    """Normalises over the batch."""

    def embed(self, ids):
        x = super().embed(ids)
        return x - x.mean((0, 1))


class PositionsLost(Letters):
    def forward(self, batch):
        t = super().forward(batch)
        return t.replace(pos=torch.zeros_like(t.pos))


class DeadParameter(Letters):
    def __init__(self, dim: int = 8) -> None:
        super().__init__(dim)
        self.unused = nn.Parameter(torch.zeros(dim))


class ZeroGradient(Letters):
    def __init__(self, dim: int = 8) -> None:
        super().__init__(dim)
        self.unused = nn.Parameter(torch.zeros(dim))

    def embed(self, ids):
        return super().embed(ids) + 0 * self.unused


class OrderChanged(Letters):
    """Sorts the batch by length and does not restore the order."""

    def collate(self, raws):
        return super().collate(sorted(raws, key=len))


class WrongLayout(Letters):
    """`valid` is right and the layout is not, so the fast path attends to padding."""

    def forward(self, batch):
        t = super().forward(batch)
        n = t.shape[1]
        return t.replace(layout=wt.Layout.simple([n] * len(t), "bidirectional"))


class MissingSetting(Letters):
    """`scale` is not in the saved config."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__(dim)
        self.scale = 1.0

    def embed(self, ids):
        return super().embed(ids) * self.scale


class AcceptsAnything(Letters):
    def read(self, source):
        return super().read(source or "a")


class WrongError(Letters):
    def read(self, source):
        return super().read(source[0] + source[1:])


SAMPLES = ["token", "is", "attention", "an"]


def test_a_correct_front_end_passes():
    run = check_tokenizer(Letters, SAMPLES, bad=["", 3])
    assert "check_padding" in run and "check_refused" in run
    assert len(run) == 13


@pytest.mark.parametrize(
    "broken, found",
    [
        (MaskInverted, "fields|validity|batch invariance|padding"),
        (MaskIgnored, "batch invariance|validity"),
        (PaddingLeaks, "batch invariance"),
        (BatchDependent, "fields|batch invariance"),
        (PositionsLost, "positions"),
        (DeadParameter, "no gradient reaches the parameter 'unused'"),
        (ZeroGradient, "gradient of 'unused' is zero"),
        (OrderChanged, "batch invariance|order"),
        (WrongLayout, "padding: layout and tensors disagree|padding: NaN"),
    ],
)
def test_a_broken_front_end_is_found(broken, found):
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match=found):
        check_tokenizer(broken(), SAMPLES)


def test_a_setting_missing_in_the_config_is_found():
    front = MissingSetting()
    front.scale = 2.0
    with pytest.raises(AssertionError, match="state dict: `x` of sample 0 changes"):
        check_tokenizer(front, SAMPLES)


def test_a_bad_source_must_raise_input_error():
    with pytest.raises(AssertionError, match="was accepted"):
        check_tokenizer(AcceptsAnything, SAMPLES, bad=[""])
    with pytest.raises(AssertionError, match="raised IndexError"):
        check_tokenizer(WrongError, SAMPLES, bad=[""])


def test_too_few_samples():
    with pytest.raises(ValueError, match="at least 2 samples"):
        check_tokenizer(Letters, ["a"])
