"""Prepacked weights for decoding: the same numbers, the model unchanged, plain layers where prepacking does not apply."""

import pytest
import torch
from torch import nn

import worldtokens as wt
from worldtokens.backbone import prepacked as module
from worldtokens.backbone.prepacked import PrepackedLinear, prepacked, prepacked_linear

NEEDS = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def prepack_small_layers(monkeypatch):
    monkeypatch.setattr(module, "MIN_WEIGHTS", 1)


def trunk():
    torch.manual_seed(0)
    return wt.Transformer(64, 3, 4, rope=1, activation="swiglu", norm="rms", kv_heads=2).eval()


@NEEDS
@pytest.mark.parametrize("rows", [2, 8, 32])
def test_the_copy_gives_the_same_numbers_and_the_model_is_unchanged(rows):
    own = trunk()
    names, kinds = list(own.state_dict()), [type(m) for m in own.modules()]
    twin = prepacked(own, rows, 100)
    assert twin is not own and any(isinstance(m, PrepackedLinear) for m in twin.modules())
    assert list(own.state_dict()) == names and [type(m) for m in own.modules()] == kinds
    tokens = wt.Tokens(x=torch.randn(rows, 5, 64)).causal()
    with torch.inference_mode():
        a, b = own(tokens).x, twin(tokens).x
        assert (a - b).abs().max() < 1e-5
        caches = own.cache(rows), own.cache(rows)
        for _ in range(3):
            one = wt.Tokens(x=torch.randn(rows, 1, 64), layout=wt.Layout.simple((1,) * rows, "causal"))
            outs = [m(c.offset(one), cache=c).x for m, c in zip((own, twin), caches, strict=True)]
            assert (outs[0] - outs[1]).abs().max() < 1e-5
    own.train()
    own(tokens).x.sum().backward()  # and it can be trained further


@NEEDS
def test_a_later_generation_sees_changed_weights():
    front = wt.TextTokenizer.train(["the cat sat on the mat"], vocab_size=280, dim=64, start="<|s|>")
    model = wt.LanguageModel(front, trunk())
    prompts = ["the", "the cat"]
    before = model.continuations(prompts, 16)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    after = model.continuations(prompts, 16)
    assert before != after
    assert after == [model.continuations([p], 16)[0] for p in prompts]  # one row is not prepacked


def test_where_it_does_not_apply_the_module_itself_is_returned(monkeypatch):
    own = trunk()
    assert prepacked(own, 1, 100) is own and prepacked(own, 64, 100) is own and prepacked(own, 8, 2) is own
    monkeypatch.setattr(module, "MIN_WEIGHTS", 1 << 18)
    assert prepacked(own, 8, 100) is own  # its layers are too small
    monkeypatch.setattr(module, "MIN_WEIGHTS", 1)
    half = trunk().bfloat16()
    assert prepacked(half, 8, 100) is half
    lstm = wt.Recurrent("lstm", 16, 1)
    assert prepacked(lstm, 8, 100) is lstm
    with torch.autocast("cpu", torch.bfloat16):
        assert prepacked(own, 8, 100) is own


@NEEDS
def test_a_linear_layer_with_a_hook_is_not_prepacked():
    own = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    calls = []
    own[1].register_forward_hook(lambda *a: calls.append(1))
    twin = prepacked(own, 4, 100)
    assert isinstance(twin[0], PrepackedLinear) and twin[1] is own[1]
    twin(torch.randn(4, 8))
    assert calls
    x, weight, bias = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    for rows in (1, 4):
        out = prepacked_linear(weight, bias, rows, 100)(x)
        assert (out - nn.functional.linear(x, weight, bias)).abs().max() < 1e-5
