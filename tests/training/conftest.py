"""A byte bigram model on real text, small enough to check by hand, for the tests of the training loop."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import worldtokens as wt
from worldtokens.errors import InputError
from worldtokens.tasks.base import Task
from worldtokens.tokenizers.base import Batch, Tokenizer
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
    """Predicts the next byte from the current one; the loss is the mean over all predicted bytes."""

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


class Stopping(Bigram):
    """Sends itself a signal, or raises, in the loss of step `at`."""

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


class NonFinite(Bigram):
    """NaN at given steps: only in the gradient at the first of them, in the loss at the others."""

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


def model(dropout=0.0, dim=8):
    torch.manual_seed(0)
    return Bigram(dim, dropout)


def settings(out, **changes):
    """TrainSettings for a short run on the CPU."""
    return TrainSettings(
        **{"out": str(out), "device": "cpu", "tensorboard": False, "batch_size": 8, **changes}
    )


def same(a, b):
    """Whether two models have identical state dicts."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def checkpointed(folder, like):
    """The saved weights in a copy of `like`; `wt.load` cannot import a class of a test file."""
    from safetensors.torch import load_file

    twin = copy.deepcopy(like)
    twin.load_state_dict(load_file(folder / "model.safetensors"))
    return twin


@pytest.fixture
def toy():
    """The model classes, the rows and helper functions above."""
    return SimpleNamespace(
        TEXT=TEXT,
        ROWS=ROWS,
        Bigram=Bigram,
        Stopping=Stopping,
        NonFinite=NonFinite,
        model=model,
        settings=settings,
        same=same,
        checkpointed=checkpointed,
    )
