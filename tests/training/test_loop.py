"""The training loop: what is minimised, mixed precision, frozen parameters, EMA, progress lines."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import torch
from torch import nn

from worldtokens.errors import InputError
from worldtokens.training import loop
from worldtokens.training.loop import train
from worldtokens.training.optim import OptimSettings, lr_at, make_optimizer
from worldtokens.training.settings import TrainSettings


def test_training_beats_byte_counts_on_held_out_text(tmp_path, toy):
    """The bigram model predicts a byte better than a unigram model of byte counts."""
    held_out, training = toy.ROWS[::5], [r for i, r in enumerate(toy.ROWS) if i % 5]
    counts = Counter(b for r in training for b in r["text"].encode())
    n = sum(counts.values())
    targets = [b for r in held_out for b in r["text"].encode()[1:]]
    unigram = -sum(math.log((counts[b] + 1) / (n + 256)) for b in targets) / len(targets)
    task = toy.model(dim=32)
    optim = OptimSettings(lr=2e-2, weight_decay=0.0)
    report = train(
        task, training, held_out, train=toy.settings(tmp_path, epochs=6, eval_every=50), optim=optim
    )
    assert report.best["loss"] < unigram - 0.3
    best = toy.checkpointed(tmp_path / "best", task)
    assert report.best["loss"] == pytest.approx(best.evaluate(held_out)["loss"], abs=1e-5)
    assert report.samples_per_second > 0 and report.skipped_steps == 0 and not task.training


def test_gradient_accumulation_is_a_mean_over_all_rows_not_of_means(tmp_path, toy):
    """Texts of 11 and 101 bytes as two micro-batches give the same step as one batch; a mean of means does not."""
    rows = [{"text": toy.TEXT[200:211]}, {"text": toy.TEXT[300:401]}]
    optim = OptimSettings(lr=0.01, warmup=0, max_grad_norm=None)
    whole, micro = toy.model(), toy.model()
    train(whole, rows, train=toy.settings(tmp_path / "a", steps=4, batch_size=2), optim=optim)
    train(
        micro,
        rows,
        train=toy.settings(tmp_path / "b", steps=4, batch_size=2, gradient_accumulation_steps=2),
        optim=optim,
    )
    worst = max(
        float((p - q).detach().abs().max())
        for p, q in zip(whole.parameters(), micro.parameters(), strict=True)
    )
    assert worst < 2e-6

    def gradient(losses):
        task = toy.model()
        sum(losses(task)).backward()
        return task.head.bias.grad

    def each(task):
        return [(task.loss(b)["loss"], b["weight"]) for b in (task.collate([task.read(r)]) for r in rows)]

    right = gradient(lambda t: [loss * w / 110 for loss, w in each(t)])
    wrong = gradient(lambda t: [loss / 2 for loss, _ in each(t)])
    assert (right - wrong).abs().max() > 1e-2  # so the comparison above distinguishes them


def test_matches_a_loop_written_by_hand(tmp_path, toy):
    rows = toy.ROWS[:8]
    optim = OptimSettings(lr=0.01, weight_decay=0.1, max_grad_norm=0.05)
    ours, hand = toy.model(), toy.model()
    train(ours, rows, train=toy.settings(tmp_path, steps=5), optim=optim)
    split = [
        {"params": [hand.tokenizers["text"].embedding.weight, hand.head.weight], "weight_decay": 0.1},
        {"params": [hand.head.bias], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(split, betas=optim.betas, fused=False)
    for step in range(5):
        for group in adam.param_groups:
            group["lr"] = lr_at(step, 5, optim)
        batch = hand.collate([hand.read(r) for r in rows])
        adam.zero_grad()
        hand.loss(batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(hand.parameters(), 0.05)
        adam.step()
    worst = max(
        float((p - q).detach().abs().max()) for p, q in zip(ours.parameters(), hand.parameters(), strict=True)
    )
    assert worst < 1e-5


def test_lr_counts_optimizer_steps_through_accumulation_and_resume(tmp_path, monkeypatch, toy):
    used, real = [], loop.optimizer_step
    monkeypatch.setattr(
        loop, "optimizer_step", lambda o, p, lr, *rest: used.append(lr) or real(o, p, lr, *rest)
    )
    optim = OptimSettings(lr=0.1, warmup=3)
    with pytest.raises(KeyboardInterrupt):
        train(
            toy.Stopping(at=4),
            toy.ROWS,
            train=toy.settings(tmp_path, steps=10, gradient_accumulation_steps=4),
            optim=optim,
        )
    train(
        toy.model(),
        toy.ROWS,
        train=toy.settings(tmp_path, steps=10, gradient_accumulation_steps=4, resume=True),
        optim=optim,
    )
    assert used == [lr_at(s, 10, optim) for s in range(10)]


def test_a_nonfinite_step_changes_nothing_and_is_counted(tmp_path, capsys, toy):
    optim = OptimSettings(lr=0.02, warmup=0, min_lr_ratio=1.0)  # constant lr: skipped steps do not shift it
    poisoned, steps = toy.NonFinite(at=[3, 4, 7]), []
    real = toy.Bigram.collate
    poisoned.collate = lambda rows: steps.append(rows) or real(poisoned, rows)
    report = train(poisoned, toy.ROWS, train=toy.settings(tmp_path / "a", steps=8), optim=optim)
    assert report.skipped_steps == 3 and math.isfinite(report.loss)
    assert "3 steps were skipped" in capsys.readouterr().out
    clean = toy.model()
    adam = make_optimizer(clean, optim)
    for number, rows in enumerate(steps, 1):
        if number in (3, 4, 7):
            continue
        adam.zero_grad()
        clean.loss(clean.collate(rows))["loss"].backward()
        nn.utils.clip_grad_norm_(clean.parameters(), optim.max_grad_norm)
        adam.step()
    worst = max(
        float((p - q).detach().abs().max())
        for p, q in zip(poisoned.parameters(), clean.parameters(), strict=True)
    )
    assert worst < 1e-6


def test_persistent_nan_raises_an_error_with_advice(tmp_path, toy):
    with pytest.raises(InputError, match=r"in 5 steps in a row.*Lower optim.lr"):
        train(
            toy.NonFinite(at=range(2, 99)),
            toy.ROWS,
            train=toy.settings(tmp_path, steps=50, log_every=1, max_nonfinite_steps=5),
        )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_with_fp32_weights(tmp_path, precision, toy):
    task = toy.model(dim=32)
    optim = OptimSettings(lr=2e-2, warmup=0)
    before = task.evaluate(toy.ROWS)["loss"]
    report = train(
        task, toy.ROWS, toy.ROWS, train=toy.settings(tmp_path, epochs=3, precision=precision), optim=optim
    )
    assert report.metrics["loss"] < before - 1.0
    assert all(p.dtype == torch.float32 for p in task.parameters())


def test_frozen_parameters_stay_and_the_rest_trains(tmp_path, toy):
    task = toy.model()
    task.tokenizers["text"].requires_grad_(False)
    embedding, head = task.tokenizers["text"].embedding.weight.clone(), task.head.weight.clone()
    train(task, toy.ROWS, train=toy.settings(tmp_path, steps=4))
    assert torch.equal(task.tokenizers["text"].embedding.weight, embedding)
    assert not torch.equal(task.head.weight, head)
    train(task, toy.ROWS, train=toy.settings(tmp_path, steps=6, resume=True))
    task.requires_grad_(False)
    with pytest.raises(InputError, match="every parameter is frozen"):
        train(task, toy.ROWS, train=toy.settings(tmp_path / "b", steps=4))


def test_ema_weights_are_saved(tmp_path, toy):
    """Two steps by hand: the decay is (1 + step) / (10 + step) while that is below the set one."""
    task = toy.model()
    start = {n: p.detach().clone() for n, p in task.named_parameters()}
    optim = OptimSettings(lr=0.05, warmup=0, min_lr_ratio=1.0, ema=0.5, weight_decay=0.0)
    plain = toy.model()
    rows = toy.ROWS[:8]
    train(
        plain,
        rows,
        train=toy.settings(tmp_path / "a", steps=2),
        optim=OptimSettings(**{**vars(optim), "ema": None}),
    )
    train(task, rows, train=toy.settings(tmp_path / "b", steps=2), optim=optim)
    one = toy.model()
    train(
        one,
        rows,
        train=toy.settings(tmp_path / "c", steps=1),
        optim=OptimSettings(**{**vars(optim), "ema": None}),
    )
    for n, p in task.named_parameters():
        # decay 1/10, then 2/11
        after_one = start[n] * 0.1 + dict(one.named_parameters())[n] * 0.9
        want = after_one * (2 / 11) + dict(plain.named_parameters())[n] * (9 / 11)
        assert torch.allclose(p, want, atol=1e-6)
    assert toy.same(task, toy.checkpointed(tmp_path / "b" / "last", task))


def test_progress_lines_and_tensorboard_curves(tmp_path, capsys, toy):
    pytest.importorskip("tensorboard")
    train(
        toy.model(),
        toy.ROWS,
        toy.ROWS[:9],
        train=toy.settings(tmp_path, steps=6, log_every=2, eval_every=3, tensorboard=True),
    )
    out = capsys.readouterr().out
    assert re.search(r"(?m)^step 6/6  loss \d\.\d+ .* lr 0\.0e\+00  [\d,]+ samples/s  eta 0:00$", out), out
    assert "step 6/6  validation: loss" in out
    last = out.splitlines()[-1]
    assert (
        last.startswith("trained 6 steps in 0:0")
        and f"checkpoints: {tmp_path / 'last'}, {tmp_path / 'best'}" in last
    )
    assert "\x1b" not in out and len(out.splitlines()) <= 5
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4, 6]
    assert [e.step for e in events.Scalars("validation/loss")] == [3, 6]
    optim = OptimSettings()
    assert events.Scalars("train/lr")[0].value == pytest.approx(lr_at(1, 6, optim))


def test_invalid_settings_raise(toy):
    for wrong, message in (
        ({}, "train.steps or train.epochs"),
        ({"steps": 1, "epochs": 1}, "found both"),
        ({"steps": 0}, "more than 0"),
        ({"steps": 1, "precision": "int8"}, "fp32, bf16 or fp16"),
    ):
        with pytest.raises(InputError, match=message):
            TrainSettings(**wrong)
    with pytest.raises(InputError, match=r"optim.lr is -1"):
        OptimSettings(lr=-1)
    with pytest.raises(InputError, match="fewer than one batch of 64"):
        train(toy.model(), toy.ROWS[:5], train=TrainSettings(steps=1, device="cpu"))


def test_a_missing_metric_raises(tmp_path, toy):
    task = toy.model()
    task.metric = ("accuracy", "max")
    with pytest.raises(InputError, match=r"'accuracy', but evaluate returned \['bytes', 'loss'\]"):
        train(task, toy.ROWS, toy.ROWS, train=toy.settings(tmp_path, steps=1))
