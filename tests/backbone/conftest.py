"""Tokens and weights shared by the tests of the Transformer."""

import pytest
import torch

import worldtokens as wt

DIM = 32


@pytest.fixture(scope="session")
def randomise():
    """A function that moves every parameter away from its initial value: fresh weights hide swapped or missing terms."""

    def randomise(module):
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn(p.shape, generator=g) * 0.2)
        return module

    return randomise


@pytest.fixture(scope="session")
def tokens():
    """A function that makes random tokens, one sample per row."""

    def tokens(lengths=(7, 4, 5), order="bidirectional", dim=DIM):
        g = torch.Generator().manual_seed(1)
        rows = [
            wt.Tokens(torch.randn(1, n, dim, generator=g), layout=wt.Layout.simple([n], order))
            for n in lengths
        ]
        t = wt.Tokens.stack(rows)
        return t.causal() if order == "causal" else t

    return tokens


@pytest.fixture
def ragged():
    """Three rows of 6, 4 and 2 tokens, with NaN in the padding."""
    torch.manual_seed(1)
    x = torch.randn(3, 6, 32)
    lengths = [6, 4, 2]
    valid = torch.arange(6) < torch.tensor(lengths)[:, None]
    x[~valid] = float("nan")
    return wt.Tokens(x=x, valid=valid, layout=wt.Layout.simple(lengths, "bidirectional"))
