"""What the checks of contrastive models share: things read once, the lines of results, and what leaving tokens out saves."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from worldtokens.data.rows import Rows
from worldtokens.evals.base import Result
from worldtokens.evals.classification.base import percent
from worldtokens.tasks.contrastive.model import CLIP
from worldtokens.tokenizers.reduce.tokenizer import TokenReducer
from worldtokens.training.data import Batches, Plan
from worldtokens.training.recipe import Recipe
from worldtokens.training.settings import TrainReport, autocast_type


class ReadOnce:
    """Rows whose files are read once, each, into raw tensors; `audio` into (waveform, sample_rate).

    Args:
        model: whose front-ends read.
        columns: of files.
    """

    def __init__(self, model: CLIP, columns: Sequence[str]) -> None:
        self.fronts = {c: model.tokenizers[c] for c in columns}
        self.known: dict[tuple[str, str], Any] = {}

    def __call__(self, rows: Iterable[Mapping[str, Any]]) -> Rows:
        return Rows([{k: self._value(k, v) for k, v in row.items()} for row in rows])

    def _value(self, column: str, value: Any) -> Any:
        if column not in self.fronts:
            return value
        if isinstance(value, list):
            return [self._value(column, v) for v in value]
        if (column, value) not in self.known:
            front = self.fronts[column]
            raw = front.read(value)
            front = getattr(front, "tokenizer", front)
            self.known[column, value] = (raw, front.sample_rate) if front.modality == "audio" else raw
        return self.known[column, value]


def size_of(model: CLIP) -> str:
    """The model in a few words."""
    trunks = list(model.trunk.values()) if isinstance(model.trunk, torch.nn.ModuleDict) else [model.trunk]
    cfg = trunks[0].cfg
    how = "one trunk" if len(trunks) == 1 else f"{len(trunks)} trunks"
    return f"{how}, {cfg.dim} wide, {cfg.depth} deep, for {' + '.join(model.columns)}"


def pair_lines(
    model: CLIP,
    report: TrainReport,
    ours: Mapping[str, float],
    linear: Mapping[str, float],
    task: str,
    data: str,
    note: str = "",
) -> list[Result]:
    """A line for each pair of columns: R@10, the mean of both ways."""
    lines = []
    for a, b in itertools.combinations(model.columns, 2):
        ways = (f"{a}_to_{b}", f"{b}_to_{a}")
        value, chance = (statistics.mean(ours[f"{w}/{k}@10"] for w in ways) for k in ("R", "chance"))
        lines.append(
            Result(
                task=f"{task}: {a} and {b}",
                data=data,
                size=size_of(model),
                parameters=sum(p.numel() for p in model.parameters()),
                steps=report.steps,
                minutes=round(report.seconds / 60, 1),
                metric="R@10 %, mean of both ways",
                value=percent(value),
                baseline="regularised CCA of pooled raw features, this pair alone",
                baseline_value=percent(statistics.mean(linear[f"{w}/R@10"] for w in ways)),
                chance=percent(chance),
                note=note,
            )
        )
    return lines


def speed_line(recipe: Recipe, rows: Rows, model: CLIP, steps: int, task: str) -> Result:
    """Training samples/s with tokens left out as the recipe says, beside a twin that reads them all.

    Both take the same batches in turns, so that noise of the machine falls on both alike; seconds are processor time.
    """
    models = {}
    for kind in ("some", "all"):
        task_model, augment = recipe.build(rows)
        for front in task_model.tokenizers.values():
            if kind == "all" and isinstance(front, TokenReducer):
                front.keep = 1.0
        models[kind] = task_model.train()
    optimizers = {k: torch.optim.AdamW(m.parameters(), 1e-4) for k, m in models.items()}
    plan = Plan(len(rows), recipe.train.batch_size, seed=recipe.train.seed)
    batches = iter(Batches(models["some"], rows, plan, augment))
    half = autocast_type(recipe.train.precision, torch.device("cpu"))
    seconds: dict[str, list[float]] = {k: [] for k in models}
    for step in range(steps + 1):  # the first one is left out: new shapes
        batch = next(batches)[0]
        for kind in sorted(models, reverse=step % 2 == 0):
            began = time.process_time()
            with torch.autocast("cpu", half) if half else contextlib.nullcontext():
                loss = models[kind].loss(batch)["loss"]
            loss.backward()
            optimizers[kind].step()
            optimizers[kind].zero_grad()
            seconds[kind].append(time.process_time() - began)
    rate = {k: round(recipe.train.batch_size / statistics.median(v[1:])) for k, v in seconds.items()}
    shares = ", ".join(f"{n} {t.keep:g}" for n, t in model.tokenizers.items() if isinstance(t, TokenReducer))
    return Result(
        task=f"{task}: tokens left out in training (FLIP)",
        data=f"{steps} batches of {recipe.train.batch_size}",
        size=size_of(model),
        parameters=sum(p.numel() for p in model.parameters()),
        steps=steps,
        minutes=round(sum(map(sum, seconds.values())) / 60, 1),
        metric="training samples/s of one core",
        value=rate["some"],
        baseline="all tokens read",
        baseline_value=rate["all"],
        note=f"share kept: {shares}",
    )
