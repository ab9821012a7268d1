"""torch.compile: one graph per attention mode, whatever the lengths and the number of rows."""

import pytest
import torch

import worldtokens as wt
from worldtokens.testing import randomised

DIM, HEADS = 32, 4


def graphs(batches, backend="eager", **options):
    """Compile a trunk, run it over batches forward and backward, and count the graphs that Dynamo made."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    trunk = randomised(wt.Transformer(DIM, 1, HEADS, rope=1, kv_heads=2, **options))
    compiled = torch.compile(trunk, dynamic=True, fullgraph=True, backend=backend)
    for t, *context in batches:
        x = t.x.clone().requires_grad_()
        got = compiled(t.replace(x=x), *context).x
        assert (got - trunk(t, *context).x).abs().max() < 1e-5
        got.square().sum().backward()
        assert x.grad.isfinite().all()
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


# no axis of the first has the size 3, as that of pos: Dynamo would unify equal sizes
RAGGED = [(5, 7, 2, 6), (11, 2), (4, 8, 9), (13, 13, 2, 4), (6, 17, 5), (21, 9, 20), (2, 6, 3)]


@pytest.mark.parametrize("order", ["bidirectional", "causal"])
def test_compiles_once_for_all_lengths(order, tokens):
    """No graph breaks, and one graph each for full and for padded rows, whatever their lengths and number."""
    full = [(tokens([n] * b, order),) for n, b in ((4, 5), (9, 2), (17, 3), (6, 5), (23, 2))]
    padded = [(tokens(ns, order),) for ns in RAGGED]
    assert graphs([pair for both in zip(full, padded, strict=False) for pair in both]) == 2


def test_compiles_once_for_all_masks(tokens):
    """Windows, packed rows, tokens without a layout, and contexts."""
    padded = [tokens(ns, "causal") for ns in RAGGED]
    packed = [wt.pack([tokens((n,)) for n in ns] * 2, 30) for ns in RAGGED]
    assert graphs([(t,) for t in padded], window=3) == 1
    assert graphs([(t,) for t in packed if len(t) > 1]) == 1
    assert graphs([(t.replace(layout=None),) for t in padded]) == 1
    assert graphs([(t, tokens(ns[::-1])) for t, ns in zip(padded, RAGGED, strict=True)], cross=True) == 1


@pytest.mark.slow
def test_compiles_once_with_a_traced_backward(tokens):
    assert graphs([(tokens(ns, "causal"),) for ns in RAGGED], backend="aot_eager") == 1
