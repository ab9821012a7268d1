"""Checkpoints: stopping, resuming, overwriting, interrupted saves."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from worldtokens.errors import InputError
from worldtokens.training import checkpoint
from worldtokens.training.loop import train
from worldtokens.training.optim import OptimSettings


def noisy(raw):
    """An augmentation that draws from all three global generators."""
    keep = 2 + int(torch.randint(len(raw) - 1, ()) + np.random.randint(2) + random.randrange(2)) // 2
    return raw[:keep]


FULL = {"steps": 30, "gradient_accumulation_steps": 2, "eval_every": 12, "batch_size": 16}


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("stop", ["interrupt", "crash"])
def test_resumed_run_equals_the_uninterrupted_run_bit_for_bit(tmp_path, stop, ema, capsys, toy):
    """Dropout, drawn captions, augmentation, moments and EMA continue where they stopped, in mid-epoch."""
    rows = [{"text": [r["text"], r["text"][::-1]]} for r in toy.ROWS]
    optim = OptimSettings(lr=0.02, ema=ema)
    run = {"optim": optim, "augment": {"text": noisy}}
    whole = toy.model(dropout=0.2)
    first = train(whole, rows, toy.ROWS[:20], train=toy.settings(tmp_path / "a", **FULL), **run)
    out, how = tmp_path / "b", {"interrupt": signal.SIGINT, "crash": None}[stop]
    broken = toy.Stopping(at=17, how=how, dropout=0.2, parts=2)
    with pytest.raises(KeyboardInterrupt if stop == "interrupt" else RuntimeError):
        train(broken, rows, toy.ROWS[:20], train=toy.settings(out, **FULL), **run)
    state = json.loads((out / "last" / "state.json").read_text())
    assert state["step"] == (17 if stop == "interrupt" else 12)
    assert stop == "crash" or "--resume" in capsys.readouterr().out
    torch.manual_seed(99)  # a new process has another random state
    again = toy.Bigram(dropout=0.2)
    second = train(again, rows, toy.ROWS[:20], train=toy.settings(out, resume=True, **FULL), **run)
    assert toy.same(whole, again) and first.best == second.best and first.best_step == second.best_step
    for name in ("last", "best"):
        a, b = (tmp_path / x / name / "model.safetensors" for x in "ab")
        assert toy.same(toy.checkpointed(a.parent, whole), toy.checkpointed(b.parent, whole))


def test_sigterm_saves_and_exits_with_its_status(tmp_path, toy):
    with pytest.raises(SystemExit) as e:
        train(toy.Stopping(at=3, how=signal.SIGTERM), toy.ROWS, train=toy.settings(tmp_path, steps=9))
    assert e.value.code == 143
    assert json.loads((tmp_path / "last" / "state.json").read_text())["step"] == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_is_overwritten_only_with_overwrite(tmp_path, toy):
    train(toy.model(), toy.ROWS, train=toy.settings(tmp_path, steps=2))
    with pytest.raises(InputError, match=r"already holds a run.*--resume"):
        train(toy.model(), toy.ROWS, train=toy.settings(tmp_path, steps=2))
    train(toy.model(), toy.ROWS, train=toy.settings(tmp_path, steps=3, overwrite=True))
    assert json.loads((tmp_path / "last" / "state.json").read_text())["step"] == 3
    with pytest.raises(InputError, match="batch_size = 8, now it is 4"):
        train(toy.model(), toy.ROWS, train=toy.settings(tmp_path, steps=5, batch_size=4, resume=True))
    with pytest.raises(InputError, match="nothing to resume"):
        train(toy.model(), toy.ROWS, train=toy.settings(tmp_path / "none", steps=5, resume=True))
    with pytest.raises(InputError, match=r"optim\.ema"):
        train(
            toy.model(),
            toy.ROWS,
            train=toy.settings(tmp_path, steps=5, resume=True),
            optim=OptimSettings(ema=0.9),
        )


def test_an_interrupted_save_keeps_the_previous_checkpoint(tmp_path, monkeypatch, toy):
    task = toy.model()
    train(task, toy.ROWS, train=toy.settings(tmp_path, steps=2))

    def files():
        return {p.name: p.read_bytes() for p in (tmp_path / "last").iterdir()}

    previous = files()

    def die(*a, **k):
        raise KeyboardInterrupt

    def resume():
        with pytest.raises(KeyboardInterrupt):
            train(toy.model(), toy.ROWS, train=toy.settings(tmp_path, steps=4, resume=True))

    with monkeypatch.context() as m:  # killed while writing: the model is written, the state is not
        m.setattr("safetensors.torch.save_file", die)
        resume()
    assert files() == previous
    real, calls = os.replace, []

    def second_dies(a, b):
        # the two renames: old folder away, new folder in; killed between them, without clean-up
        if Path(b).name == "last" and Path(a).name == ".last.part":
            calls.append(a)
            raise KeyboardInterrupt
        return real(a, b)

    with monkeypatch.context() as m:
        m.setattr(checkpoint.os, "replace", second_dies)
        m.setattr(checkpoint, "recover", lambda target: None)
        resume()
    assert calls and not (tmp_path / "last").exists()
    report = train(toy.model(), toy.ROWS, train=toy.settings(tmp_path, steps=4, resume=True))
    assert report.steps == 4
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
