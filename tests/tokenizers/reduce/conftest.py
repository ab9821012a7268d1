"""Samples of distinct tokens, and the forms in which a batch of them may come."""

import dataclasses

import pytest
import torch

import worldtokens as wt

DIM = 8


@pytest.fixture(scope="session")
def sample():
    """A function that makes one sample (1, n, DIM) of distinct tokens."""

    def make(n, seed=0, order="bidirectional", ids=False):
        g = torch.Generator().manual_seed(1000 * seed + n)
        t = wt.Tokens(
            torch.randn(1, n, DIM, generator=g),
            pos=torch.randn(1, n, 3, generator=g),
            modality=torch.full((1, n), 1),
            ids=torch.arange(n)[None] + 100 * seed if ids else None,
            layout=wt.Layout.simple([n], order),
        )
        return t.causal() if order == "causal" else t

    return make


@pytest.fixture(scope="session")
def nan_padded():
    """A function that puts NaN at padding."""
    return lambda t: t.replace(x=t.x.masked_fill(~t.valid[..., None], float("nan")), layout=t.layout)


@pytest.fixture(scope="session")
def forms(nan_padded):
    """A function that gives a batch in three forms: with layout, without, and with NaN at padding."""
    return lambda t: [t, dataclasses.replace(t, layout=None), nan_padded(t)]


@pytest.fixture(scope="session")
def interleaved(sample):
    """One row in which two samples alternate, with gaps."""
    return sample(9).replace(
        segment=torch.tensor([[1, 0, 1, 0, 1, 0, 1, 0, 0]]),
        valid=torch.tensor([[True, True, False, True, True, True, True, False, True]]),
    )


@pytest.fixture(scope="session")
def half_empty(sample):
    """Two rows, one without tokens."""
    empty = wt.Tokens(torch.zeros(1, 0, DIM), layout=wt.Layout.simple([0], "bidirectional"))
    return wt.Tokens.stack([sample(4), empty])
