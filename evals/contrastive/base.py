"""What evaluations of contrastive models share: cached reading, results per pair of modalities, speed with token dropout."""

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
from worldtokens.evals.training import parameter_count, percent
from worldtokens.tasks.contrastive.model import CLIP
from worldtokens.tokenizers.reduce.tokenizer import TokenReducer
from worldtokens.training.data import Batches, BatchPlan
from worldtokens.training.recipe import Recipe
from worldtokens.training.settings import TrainReport, autocast_type


class CachedReader:
    """Reads each file of some rows once, into raw tensors; `audio` into (waveform, sample_rate).

    Args:
        model: its front-ends read the files.
        columns: columns that hold files.
    """

    def __init__(self, model: CLIP, columns: Sequence[str]) -> None:
        self.fronts = {c: model.tokenizers[c] for c in columns}
        self.cache: dict[tuple[str, str], Any] = {}

    def __call__(self, rows: Iterable[Mapping[str, Any]]) -> Rows:
        return Rows([{k: self._value(k, v) for k, v in row.items()} for row in rows])

    def _value(self, column: str, value: Any) -> Any:
        if column not in self.fronts:
            return value
        if isinstance(value, list):
            return [self._value(column, v) for v in value]
        if (column, value) not in self.cache:
            front = self.fronts[column]
            raw = front.read(value)
            front = getattr(front, "tokenizer", front)
            self.cache[column, value] = (raw, front.sample_rate) if front.modality == "audio" else raw
        return self.cache[column, value]


def size_of(model: CLIP) -> str:
    """The model's size in a few words."""
    trunks = list(model.trunk.values()) if isinstance(model.trunk, torch.nn.ModuleDict) else [model.trunk]
    cfg = trunks[0].cfg
    count = "one Transformer" if len(trunks) == 1 else f"{len(trunks)} Transformers"
    return f"{count} of dim {cfg.dim}, depth {cfg.depth} for {', '.join(model.columns)}"


def pair_results(
    model: CLIP,
    report: TrainReport,
    ours: Mapping[str, float],
    linear: Mapping[str, float],
    task: str,
    data: str,
    note: str = "",
) -> list[Result]:
    """A result for each pair of columns: R@10, the mean of both directions."""
    results = []
    for a, b in itertools.combinations(model.columns, 2):
        directions = (f"{a}_to_{b}", f"{b}_to_{a}")
        value, chance = (statistics.mean(ours[f"{d}/{k}@10"] for d in directions) for k in ("R", "chance"))
        results.append(
            Result(
                task=task,
                data=data,
                size=size_of(model),
                parameters=parameter_count(model),
                steps=report.steps,
                minutes=round(report.seconds / 60, 1),
                metric=f"R@10 %, mean of {a}-to-{b} and {b}-to-{a}",
                value=percent(value),
                baseline="regularised CCA of pooled raw features, one model per pair",
                baseline_value=percent(statistics.mean(linear[f"{d}/R@10"] for d in directions)),
                chance=percent(chance),
                note=note,
            )
        )
    return results


def speed_result(recipe: Recipe, rows: Rows, model: CLIP, steps: int, task: str) -> Result:
    """Training samples/s with the recipe's token dropout, and of the same model with all tokens kept.

    Both train on the same batches, interleaved, so that load of the machine affects both alike; seconds are processor time.
    """
    models = {}
    for kind in ("reduced", "all"):
        twin, augment = recipe.build(rows)
        for front in twin.tokenizers.values():
            if kind == "all" and isinstance(front, TokenReducer):
                front.keep = 1.0
        models[kind] = twin.train()
    optimizers = {k: torch.optim.AdamW(m.parameters(), 1e-4) for k, m in models.items()}
    plan = BatchPlan(len(rows), recipe.train.batch_size, seed=recipe.train.seed)
    batches = iter(Batches(models["reduced"], rows, plan, augment))
    half = autocast_type(recipe.train.precision, torch.device("cpu"))
    seconds: dict[str, list[float]] = {k: [] for k in models}
    for step in range(steps + 1):  # the first one is not counted: it allocates
        batch = next(batches)[0]
        for kind in sorted(models, reverse=step % 2 == 0):
            start = time.process_time()
            with torch.autocast("cpu", half) if half else contextlib.nullcontext():
                loss = models[kind].loss(batch)["loss"]
            loss.backward()
            optimizers[kind].step()
            optimizers[kind].zero_grad()
            seconds[kind].append(time.process_time() - start)
    rates = {k: round(recipe.train.batch_size / statistics.median(v[1:])) for k, v in seconds.items()}
    shares = ", ".join(f"{n} {t.keep:g}" for n, t in model.tokenizers.items() if isinstance(t, TokenReducer))
    return Result(
        task=f"{task}, speed with token dropout (FLIP)",
        data=f"{steps} batches of {recipe.train.batch_size}",
        size=size_of(model),
        parameters=parameter_count(model),
        steps=steps,
        minutes=round(sum(map(sum, seconds.values())) / 60, 1),
        metric="training samples/s, one core",
        value=rates["reduced"],
        baseline="all tokens kept",
        baseline_value=rates["all"],
        note=f"share of tokens kept: {shares}",
    )
