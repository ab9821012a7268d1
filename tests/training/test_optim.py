"""Parameter groups, the learning-rate schedule, the order unscale, clip, step, and EMA."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch import nn

import worldtokens as wt
from worldtokens.errors import InputError
from worldtokens.training.optim import EMA, OptimSettings, lr_at, make_optimizer, optimizer_step, param_groups

Alias = nn.LayerNorm


class MyNorm(nn.RMSNorm):
    pass


class MyLinear(nn.Linear):
    pass


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(9, 4)
        self.position_embedding = nn.Embedding(9, 4)
        self.pos_embed = nn.Parameter(torch.zeros(1, 9, 4))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.mask_token = nn.Parameter(torch.zeros(2, 4))
        self.latents = nn.Parameter(torch.zeros(6, 4))
        self.text_projection = nn.Parameter(torch.zeros(4, 4))
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.gamma = nn.Parameter(torch.zeros(4))
        self.norm, self.mine = Alias((3, 4)), MyNorm((3, 4))  # norm weights with two axes
        self.batch_norm = nn.BatchNorm2d(3)
        self.lin, self.one = MyLinear(4, 4), nn.Linear(4, 1)
        self.conv = nn.Conv2d(3, 4, 2)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.lstm = nn.LSTM(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.word.weight  # tied

    DECAY = {
        "word.weight",
        "text_projection",
        "lin.weight",
        "one.weight",
        "conv.weight",
        "attention.in_proj_weight",
    }
    DECAY |= {"attention.out_proj.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0"}


def names(model, settings=OptimSettings(weight_decay=0.1)):
    """{name: weight decay}; asserts that the groups are an exact partition of the trainable parameters."""
    found = [(id(p), g["weight_decay"]) for g in param_groups(model, settings) for p in g["params"]]
    wanted = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    assert len(found) == len(dict(found)) == len(wanted) and dict(found).keys() == wanted.keys()
    return {wanted[i]: decay for i, decay in found}


def test_exact_partition_of_every_kind_of_parameter():
    found = names(Zoo())
    assert {n for n, decay in found.items() if decay == 0.1} == Zoo.DECAY
    assert {decay for n, decay in found.items() if n not in Zoo.DECAY} == {0.0}


def test_partition_of_our_clip():
    clip = wt.CLIP(
        tokenizers={
            "image": wt.ImageTokenizer(dim=32, patch=16, size=32, class_token=True),
            "text": wt.TextTokenizer.train(["some words to learn"], vocab_size=300, dim=32, context=9),
        },
        trunk=wt.Transformer(dim=32, depth=1, heads=2, qk_norm=True, config={"layer_scale": 0.1}),
        loss="siglip",
    )
    found = names(clip)
    decaying = sorted(n for n, decay in found.items() if decay)
    assert decaying == [
        "projections.image.weight",
        "projections.text.weight",
        "tokenizers.image.proj.weight",
        "tokenizers.text.embedding.weight",
        "trunk.blocks.0.attn.proj.weight",
        "trunk.blocks.0.attn.qkv.weight",
        "trunk.blocks.0.mlp.fc1.weight",
        "trunk.blocks.0.mlp.fc2.weight",
    ]


def test_partition_agrees_with_timm_on_a_vit():
    from timm.optim import param_groups_weight_decay

    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5, reg_tokens=2)
    theirs = param_groups_weight_decay(vit, 0.1, no_weight_decay_list=vit.no_weight_decay())
    by_id = {id(p): n for n, p in vit.named_parameters()}
    want = {by_id[id(p)]: g["weight_decay"] for g in theirs for p in g["params"]}
    ours = names(vit)
    assert {n for n in want if want[n] != ours[n]} <= {"reg_token"}  # ours exempts learned tokens


def test_a_frozen_model_raises():
    with pytest.raises(InputError, match="every parameter is frozen"):
        make_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimSettings())


def test_lr_schedule_by_hand():
    s = OptimSettings(lr=2.0, warmup=4, min_lr_ratio=0.1)
    assert [lr_at(i, 104, s) for i in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert lr_at(4, 104, s) == 2.0
    assert lr_at(103, 104, s) == pytest.approx(0.2)
    middle = lr_at(4 + 33, 104, s)  # a third of the way: (1 + cos 60 degrees) / 2 = 0.75
    assert middle == pytest.approx(2.0 * (0.1 + 0.9 * 0.75))
    assert (
        lr_at(9, 100, OptimSettings(lr=1.0, warmup=0.1))
        == 1.0
        == lr_at(0, 1, OptimSettings(lr=1.0, warmup=0))
    )
    steps = [lr_at(i, 104, s) for i in range(4, 104)]
    assert steps == sorted(steps, reverse=True)
    assert all(math.isfinite(lr_at(i, n, s)) for n in (1, 4, 5, 6) for i in range(n))


def three_steps(scale, max_grad_norm=0.1, poison=False):
    torch.manual_seed(0)
    lin = nn.Linear(6, 3)
    adam = make_optimizer(lin, OptimSettings(lr=0.1, weight_decay=0.0))
    scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
    norms = []
    for i in range(3):
        loss = lin(torch.randn(5, 6)).square().mean() * 100
        loss = loss * float("nan") if poison and i == 1 else loss
        scaler.scale(loss).backward()
        norm, taken = optimizer_step(
            adam, list(lin.parameters()), 0.1 / (i + 1), max_grad_norm, loss.detach(), scaler
        )
        norms.append(float(norm))
        assert bool(taken) != (poison and i == 1)
    return lin, adam, norms


def test_gradients_are_unscaled_before_they_are_clipped():
    """With a loss scaled by 4096 the clipped norm is that of the unscaled gradient, and the step is the same."""
    plain, _, norms = three_steps(None)
    scaled, _, again = three_steps(4096.0)
    assert min(norms) > 1 and norms == pytest.approx(again, rel=1e-5)
    assert all(
        torch.allclose(p, q, atol=1e-6) for p, q in zip(plain.parameters(), scaled.parameters(), strict=True)
    )
    # Adam's first moment shows the size of the clipped gradients: a weighted sum of gradients of norm <= 0.1
    _, adam, _ = three_steps(4096.0)
    moment = torch.cat([adam.state[p]["exp_avg"].flatten() for g in adam.param_groups for p in g["params"]])
    assert moment.norm() <= 0.1 * (1 - 0.9**3) + 1e-6


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_nonfinite_step_leaves_weights_moments_and_count(fused, scale, monkeypatch):
    if not fused:
        real = torch.optim.AdamW
        monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: real(*a, **{**k, "fused": False}))
    lin, adam, _ = three_steps(scale, poison=True)
    state = adam.state[lin.weight]
    assert float(state["step"]) == 2 and all(torch.isfinite(v).all() for v in state.values())
    assert torch.isfinite(lin.weight).all()


def test_ema_weights_are_swapped_in_and_out():
    lin = nn.Linear(2, 2)
    average = EMA(lin, 0.9)
    start = lin.weight.detach().clone()
    with torch.no_grad():
        lin.weight += 1
    with average.swapped():
        assert torch.equal(lin.weight, start)
    assert torch.equal(lin.weight, start + 1)


def test_ema_of_half_precision_weights_is_float32():
    """A change of 2**-9 at decay 0.99 is far below bfloat16 resolution: only a float32 average changes."""
    lin = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(lin.weight)
    average = EMA(lin, 0.99)
    with torch.no_grad():
        lin.weight.fill_(1 + 2**-7)
    for _ in range(3):
        average.update(10_000)
    (value,) = average.values.values()
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(1 + 2**-7 * (1 - 0.99**3), abs=1e-6)
