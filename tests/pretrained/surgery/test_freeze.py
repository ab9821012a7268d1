"""Freezing by name: the optimizer, drop path and gradients skip what is frozen."""

from __future__ import annotations

import copy

import pytest
import torch

import worldtokens as wt
from worldtokens.training.optim import OptimSettings, param_groups


def test_parameters_are_frozen_by_name(make_classifier):
    model = make_classifier()
    frozen = wt.freeze(model, "tokenizers", "trunk.blocks.[0-0].*")
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == set(frozen)
    assert "tokenizers.image.pos_embed" in frozen and "trunk.blocks.0.attn.qkv.weight" in frozen
    assert not any(n.startswith(("trunk.blocks.1", "head", "trunk.norm")) for n in frozen)
    # the optimizer, and so weight decay, skips them
    optimized = {id(p) for g in param_groups(model, OptimSettings()) for p in g["params"]}
    assert optimized == {id(p) for p in model.parameters() if p.requires_grad}
    wt.unfreeze(model, "*")
    assert all(p.requires_grad for p in model.parameters())
    wt.freeze(model, "*")
    assert wt.unfreeze(model, "head") == ["head.weight", "head.bias"]


def test_frozen_modules_stay_in_eval_mode(make_classifier):
    """Drop path would change their output at random; a block that is trained keeps drop path."""
    model = make_classifier().train()
    x = torch.randn(8, 3, 32, 24)
    wt.freeze(model, "trunk")
    assert not model.trunk.training and not model.trunk.blocks[1].training and model.head.training
    model.train()  # as the loop calls it
    assert not model.trunk.blocks[1].training and model.tokenizers["image"].training
    torch.testing.assert_close(model({"image": x}), model({"image": x}), atol=0, rtol=0)
    wt.unfreeze(model, "trunk.blocks.1.norm1.weight")
    assert model.trunk.training and model.trunk.blocks[1].training and not model.trunk.blocks[0].training
    assert not torch.equal(model({"image": x}), model({"image": x}))
    assert not copy.deepcopy(model).train().trunk.blocks[0].training


def test_a_pattern_without_match_is_an_error_with_close_names(make_classifier):
    with pytest.raises(
        wt.InputError, match=r"'trunk.block.0' matches nothing in Classifier; close names: \['trunk.blocks"
    ):
        wt.freeze(make_classifier(), "trunk.block.0")
    with pytest.raises(wt.InputError, match=r"close names: \['tokenizers', 'trunk', 'head'\]"):
        wt.freeze(make_classifier(), "zzz")
    with pytest.raises(wt.InputError, match="one or more patterns"):
        wt.freeze(make_classifier())
