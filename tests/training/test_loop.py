"""The training loop: on real text, with a byte bigram model that is small enough to check by hand."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import worldtokens as wt
from worldtokens.errors import InputError
from worldtokens.tasks.base import Task
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.training import checkpoint, loop
from worldtokens.training.loop import train
from worldtokens.training.optim import OptimSettings, rate
from worldtokens.training.settings import TrainSettings

TEXT = (Path(wt.__file__).parent / "LICENSE").read_text(encoding="utf-8")
ROWS = [{"text": line.strip()} for line in TEXT.splitlines() if len(line.strip()) > 10]


class Bytes(Tokenizer):
    modality = "text"

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.dim = dim
        self.embedding = nn.Embedding(256, dim)

    def read(self, source):
        if not source:
            raise InputError("an empty text")
        return torch.tensor(list(source.encode()))

    def collate(self, raws):
        return Batch(ids=nn.utils.rnn.pad_sequence(raws, batch_first=True, padding_value=-1))


class Bigram(Task):
    """The next byte from this one; the mean is over all predicted bytes."""

    def __init__(self, dim: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokenizers = nn.ModuleDict({"text": Bytes(dim)})
        self.head = nn.Linear(dim, 256)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def collate(self, rows):
        batch = super().collate(rows)
        batch["weight"] = sum(len(r["text"]) - 1 for r in rows)
        return batch

    def loss(self, batch):
        ids = batch["text"]["ids"]
        self.seen += len(ids)
        x = self.dropout(self.tokenizers["text"].embedding(ids[:, :-1].clamp(min=0)))
        logits = self.head(x).flatten(0, 1)
        total = F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=-1, reduction="sum")
        return {"loss": total / batch["weight"], "length": float(ids.shape[1])}

    def evaluate(self, rows, batch_size=64):
        was, total, count = self.training, 0.0, 0
        self.eval()
        for i in range(0, len(rows), batch_size):
            batch = self.collate([self.read(r) for r in rows[i : i + batch_size]]).to(self.device)
            seen = self.seen.clone()
            total += float(self.loss(batch)["loss"].detach()) * batch["weight"]
            self.seen.copy_(seen)
            count += batch["weight"]
        self.train(was)
        return {"loss": total / count, "bytes": count}


def model(dropout=0.0, dim=8):
    torch.manual_seed(0)
    return Bigram(dim, dropout)


def setting(out, **changes):
    return TrainSettings(
        **{"out": str(out), "device": "cpu", "tensorboard": False, "batch_size": 8, **changes}
    )


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- what is minimised -----------------------------------------------------------------------------------


def test_beats_letter_counts_on_real_text(tmp_path):
    """After training, a byte is told from the one before better than from counts alone."""
    held, seen = ROWS[::5], [r for i, r in enumerate(ROWS) if i % 5]
    counts = Counter(b for r in seen for b in r["text"].encode())
    n = sum(counts.values())
    targets = [b for r in held for b in r["text"].encode()[1:]]
    unigram = -sum(math.log((counts[b] + 1) / (n + 256)) for b in targets) / len(targets)
    task = model(dim=32)
    optim = OptimSettings(lr=2e-2, weight_decay=0.0)
    report = train(task, seen, held, train=setting(tmp_path, epochs=6, eval_every=50), optim=optim)
    assert report.best["loss"] < unigram - 0.3
    assert report.best["loss"] == pytest.approx(
        wt_loss(checkpointed(tmp_path / "best", task), held), abs=1e-5
    )
    assert report.samples_per_second > 0 and report.skipped_steps == 0 and not task.training


def wt_loss(task, rows):
    return task.evaluate(rows)["loss"]


def checkpointed(folder, like):
    """The saved weights in a copy: a class of a test file cannot be found by name everywhere."""
    from safetensors.torch import load_file

    twin = copy.deepcopy(like)
    twin.load_state_dict(load_file(folder / "model.safetensors"))
    return twin


def test_accumulation_is_a_mean_over_all_not_of_means(tmp_path):
    """Texts of 11 and 101 bytes in two parts give the step that one batch gives; a mean of means does not."""
    rows = [{"text": TEXT[200:211]}, {"text": TEXT[300:401]}]
    optim = OptimSettings(lr=0.01, warmup=0, clip=None)
    whole, parts = model(), model()
    train(whole, rows, train=setting(tmp_path / "a", steps=4, batch_size=2), optim=optim)
    train(
        parts,
        rows,
        train=setting(tmp_path / "b", steps=4, batch_size=2, gradient_accumulation_steps=2),
        optim=optim,
    )
    worst = max(
        float((p - q).detach().abs().max())
        for p, q in zip(whole.parameters(), parts.parameters(), strict=True)
    )
    assert worst < 2e-6

    def gradient(losses):
        task = model()
        sum(losses(task)).backward()
        return task.head.bias.grad

    def each(task):
        return [(task.loss(b)["loss"], b["weight"]) for b in (task.collate([task.read(r)]) for r in rows)]

    right = gradient(lambda t: [loss * w / 110 for loss, w in each(t)])
    wrong = gradient(lambda t: [loss / 2 for loss, _ in each(t)])
    assert (right - wrong).abs().max() > 1e-2  # so the comparison above can tell them apart


def test_matches_a_loop_written_by_hand(tmp_path):
    rows = ROWS[:8]
    optim = OptimSettings(lr=0.01, weight_decay=0.1, clip=0.05)
    ours, hand = model(), model()
    train(ours, rows, train=setting(tmp_path, steps=5), optim=optim)
    split = [
        {"params": [hand.tokenizers["text"].embedding.weight, hand.head.weight], "weight_decay": 0.1},
        {"params": [hand.head.bias], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(split, betas=optim.betas, fused=False)
    for step in range(5):
        for group in adam.param_groups:
            group["lr"] = rate(step, 5, optim)
        batch = hand.collate([hand.read(r) for r in rows])
        adam.zero_grad()
        hand.loss(batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(hand.parameters(), 0.05)
        adam.step()
    worst = max(
        float((p - q).detach().abs().max()) for p, q in zip(ours.parameters(), hand.parameters(), strict=True)
    )
    assert worst < 1e-5


def test_rate_counts_optimizer_steps_through_accumulation_and_resume(tmp_path, monkeypatch):
    used, real = [], loop.update
    monkeypatch.setattr(loop, "update", lambda o, p, lr, *rest: used.append(lr) or real(o, p, lr, *rest))
    optim = OptimSettings(lr=0.1, warmup=3)
    with pytest.raises(KeyboardInterrupt):
        train(
            Stopping(at=4),
            ROWS,
            train=setting(tmp_path, steps=10, gradient_accumulation_steps=4),
            optim=optim,
        )
    train(
        model(),
        ROWS,
        train=setting(tmp_path, steps=10, gradient_accumulation_steps=4, resume=True),
        optim=optim,
    )
    assert used == [rate(s, 10, optim) for s in range(10)]


# ---- stopping, going on ----------------------------------------------------------------------------------


class Stopping(Bigram):
    """Signals or raises in the loss of step `at`."""

    def __init__(
        self, at: int, how: int | None = signal.SIGINT, dropout: float = 0.0, parts: int = 1
    ) -> None:
        torch.manual_seed(0)
        super().__init__(dropout=dropout)
        self.left, self.how = at * parts, how

    def loss(self, batch):
        self.left -= 1
        if self.left == 0:
            if self.how is None:
                raise RuntimeError("the power fails")
            os.kill(os.getpid(), self.how)
        return super().loss(batch)


def noisy(raw):
    """An augmentation that draws from all three global generators."""
    import numpy as np

    keep = 2 + int(torch.randint(len(raw) - 1, ()) + np.random.randint(2) + random.randrange(2)) // 2
    return raw[:keep]


FULL = {"steps": 30, "gradient_accumulation_steps": 2, "eval_every": 12, "batch_size": 16}


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("stop", ["interrupt", "crash"])
def test_resumed_run_is_the_unbroken_run_to_the_bit(tmp_path, stop, ema, capsys):
    """Dropout, drawn captions, augmentation, moments, averages: all go on where they were, in mid-epoch."""
    rows = [{"text": [r["text"], r["text"][::-1]]} for r in ROWS]
    optim = OptimSettings(lr=0.02, ema=ema)
    run = {"optim": optim, "augment": {"text": noisy}}
    whole = model(dropout=0.2)
    first = train(whole, rows, ROWS[:20], train=setting(tmp_path / "a", **FULL), **run)
    out, how = tmp_path / "b", {"interrupt": signal.SIGINT, "crash": None}[stop]
    broken = Stopping(at=17, how=how, dropout=0.2, parts=2)
    with pytest.raises(KeyboardInterrupt if stop == "interrupt" else RuntimeError):
        train(broken, rows, ROWS[:20], train=setting(out, **FULL), **run)
    state = json.loads((out / "last" / "state.json").read_text())
    assert state["step"] == (17 if stop == "interrupt" else 12)
    assert stop == "crash" or "--resume" in capsys.readouterr().out
    torch.manual_seed(99)  # a new process starts anywhere
    again = Bigram(dropout=0.2)
    second = train(again, rows, ROWS[:20], train=setting(out, resume=True, **FULL), **run)
    assert same(whole, again) and first.best == second.best and first.best_step == second.best_step
    for name in ("last", "best"):
        a, b = (tmp_path / x / name / "model.safetensors" for x in "ab")
        assert same(checkpointed(a.parent, whole), checkpointed(b.parent, whole))


def test_terminate_saves_and_leaves_with_its_status(tmp_path):
    with pytest.raises(SystemExit) as e:
        train(Stopping(at=3, how=signal.SIGTERM), ROWS, train=setting(tmp_path, steps=9))
    assert e.value.code == 143
    assert json.loads((tmp_path / "last" / "state.json").read_text())["step"] == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_is_not_written_over_unasked(tmp_path):
    train(model(), ROWS, train=setting(tmp_path, steps=2))
    with pytest.raises(InputError, match=r"holds a run already.*--resume"):
        train(model(), ROWS, train=setting(tmp_path, steps=2))
    train(model(), ROWS, train=setting(tmp_path, steps=3, overwrite=True))
    assert json.loads((tmp_path / "last" / "state.json").read_text())["step"] == 3
    with pytest.raises(InputError, match="batch_size = 8, now it is 4"):
        train(model(), ROWS, train=setting(tmp_path, steps=5, batch_size=4, resume=True))
    with pytest.raises(InputError, match="nothing to resume"):
        train(model(), ROWS, train=setting(tmp_path / "none", steps=5, resume=True))
    with pytest.raises(InputError, match=r"optim\.ema"):
        train(model(), ROWS, train=setting(tmp_path, steps=5, resume=True), optim=OptimSettings(ema=0.9))


def test_a_save_that_is_killed_keeps_the_one_before(tmp_path, monkeypatch):
    task = model()
    train(task, ROWS, train=setting(tmp_path, steps=2))
    kept = {p.name: p.read_bytes() for p in (tmp_path / "last").iterdir()}

    def now():
        return {p.name: p.read_bytes() for p in (tmp_path / "last").iterdir()}

    def die(*a, **k):
        raise KeyboardInterrupt

    def go_on():
        with pytest.raises(KeyboardInterrupt):
            train(model(), ROWS, train=setting(tmp_path, steps=4, resume=True))

    with monkeypatch.context() as m:  # in the middle of writing: the model is there, the state is not
        m.setattr("safetensors.torch.save_file", die)
        go_on()
    assert now() == kept
    real, calls = os.replace, []

    def second_dies(a, b):
        # the folder's own renames: the old one away, then the new one in; killed for good, no clean-up runs
        if Path(b).name == "last" and Path(a).name == ".last.part":
            calls.append(a)
            raise KeyboardInterrupt
        return real(a, b)

    with monkeypatch.context() as m:
        m.setattr(checkpoint.os, "replace", second_dies)
        m.setattr(checkpoint, "recover", lambda target: None)
        go_on()
    assert calls and not (tmp_path / "last").exists()
    report = train(model(), ROWS, train=setting(tmp_path, steps=4, resume=True))
    assert report.steps == 4
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


# ---- bad numbers, frozen parts, precision ----------------------------------------------------------------


class Sick(Bigram):
    """NaN at given steps: in the gradient alone at the first, in the loss at the others."""

    def __init__(self, at) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.at, self.step = set(at), 0

    def loss(self, batch):
        out = super().loss(batch)
        self.step += 1
        if self.step in self.at:
            bad = torch.zeros((), requires_grad=True)
            out["loss"] = (
                out["loss"] + (self.head.bias[0] * 0).sqrt()
                if self.step == min(self.at)
                else out["loss"] * (bad / bad)
            )
        return out


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(tmp_path, capsys):
    optim = OptimSettings(lr=0.02, warmup=0, final=1.0)  # a flat rate, so that left-out steps can be left out
    sick, steps = Sick(at=[3, 4, 7]), []
    real = Bigram.collate
    sick.collate = lambda rows: steps.append(rows) or real(sick, rows)
    report = train(sick, ROWS, train=setting(tmp_path / "a", steps=8), optim=optim)
    assert report.skipped_steps == 3 and math.isfinite(report.loss)
    assert "3 steps were left out" in capsys.readouterr().out
    well = model()
    from worldtokens.training.optim import make_optimizer

    adam = make_optimizer(well, optim)
    for number, rows in enumerate(steps, 1):
        if number in (3, 4, 7):
            continue
        adam.zero_grad()
        well.loss(well.collate(rows))["loss"].backward()
        nn.utils.clip_grad_norm_(well.parameters(), optim.clip)
        adam.step()
    worst = max(
        float((p - q).detach().abs().max()) for p, q in zip(sick.parameters(), well.parameters(), strict=True)
    )
    assert worst < 1e-6


def test_lasting_nan_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match=r"in 5 steps in a row.*Lower optim.lr"):
        train(Sick(at=range(2, 99)), ROWS, train=setting(tmp_path, steps=50, log_every=1, patience=5))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_and_keeps_weights_in_fp32(tmp_path, precision):
    task = model(dim=32)
    optim = OptimSettings(lr=2e-2, warmup=0)
    before = wt_loss(task, ROWS)
    report = train(task, ROWS, ROWS, train=setting(tmp_path, epochs=3, precision=precision), optim=optim)
    assert report.figures["loss"] < before - 1.0
    assert all(p.dtype == torch.float32 for p in task.parameters())


def test_a_frozen_part_stays_and_the_rest_trains(tmp_path):
    task = model()
    task.tokenizers["text"].requires_grad_(False)
    kept, head = task.tokenizers["text"].embedding.weight.clone(), task.head.weight.clone()
    train(task, ROWS, train=setting(tmp_path, steps=4))
    assert torch.equal(task.tokenizers["text"].embedding.weight, kept)
    assert not torch.equal(task.head.weight, head)
    train(task, ROWS, train=setting(tmp_path, steps=6, resume=True))
    task.requires_grad_(False)
    with pytest.raises(InputError, match="every parameter is frozen"):
        train(task, ROWS, train=setting(tmp_path / "b", steps=4))


def test_averaged_weights_are_what_is_saved(tmp_path):
    """Two steps by hand: the average keeps (1 + step) / (10 + step) of itself while that is below the decay."""
    task = model()
    start = {n: p.detach().clone() for n, p in task.named_parameters()}
    optim = OptimSettings(lr=0.05, warmup=0, final=1.0, ema=0.5, weight_decay=0.0)
    plain = model()
    rows = ROWS[:8]
    train(
        plain,
        rows,
        train=setting(tmp_path / "a", steps=2),
        optim=OptimSettings(**{**vars(optim), "ema": None}),
    )
    train(task, rows, train=setting(tmp_path / "b", steps=2), optim=optim)
    one = model()
    train(
        one, rows, train=setting(tmp_path / "c", steps=1), optim=OptimSettings(**{**vars(optim), "ema": None})
    )
    for n, p in task.named_parameters():
        # keep 1/10, then 2/11
        after_one = start[n] * 0.1 + dict(one.named_parameters())[n] * 0.9
        want = after_one * (2 / 11) + dict(plain.named_parameters())[n] * (9 / 11)
        assert torch.allclose(p, want, atol=1e-6)
    assert same(task, checkpointed(tmp_path / "b" / "last", task))


# ---- what a person sees ----------------------------------------------------------------------------------


def test_plain_lines_and_curves(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    train(
        model(), ROWS, ROWS[:9], train=setting(tmp_path, steps=6, log_every=2, eval_every=3, tensorboard=True)
    )
    out = capsys.readouterr().out
    assert "step 6/6" in out and "samples/s" in out and "left" in out and "validation: loss" in out
    assert "\x1b" not in out and len(out.splitlines()) <= 5
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4, 6]
    assert [e.step for e in events.Scalars("validation/loss")] == [3, 6]
    optim = OptimSettings()
    assert events.Scalars("train/rate")[0].value == pytest.approx(rate(1, 6, optim))


def test_settings_that_cannot_be_met():
    for wrong, said in (
        ({}, "train.steps or train.epochs"),
        ({"steps": 1, "epochs": 1}, "found both"),
        ({"steps": 0}, "more than 0"),
        ({"steps": 1, "precision": "int8"}, "fp32, bf16 or fp16"),
    ):
        with pytest.raises(InputError, match=said):
            TrainSettings(**wrong)
    with pytest.raises(InputError, match=r"optim.lr is -1"):
        OptimSettings(lr=-1)
    with pytest.raises(InputError, match="fewer than one batch of 64"):
        train(model(), ROWS[:5], train=TrainSettings(steps=1, device="cpu"))


def test_a_task_whose_metric_is_missing_is_told(tmp_path):
    task = model()
    task.metric = ("accuracy", "max")
    with pytest.raises(InputError, match=r"'accuracy', but evaluate gave \['bytes', 'loss'\]"):
        train(task, ROWS, ROWS, train=setting(tmp_path, steps=1))
