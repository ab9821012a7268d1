"""`Result`: one figure of an evaluation next to its baseline, and the JSON files that store results.

An evaluation is a module `evals/<head>/<name>.py` with

    ABOUT = "handwritten digits: our ViT and a timm ViT of the same size"
    def evaluate(out: Path, scale: float = 1.0) -> list[Result]: ...

It trains on real data, trains or computes its baseline on the same rows, writes checkpoints and figures under `out`, and
returns its results. `scale` below 1 shortens the training for a trial; results of a trial are not stored.
`worldtokens results NAME` runs it, stores its results in `docs/results/<name>.json` and writes the tables.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from worldtokens.errors import InputError


@dataclasses.dataclass(frozen=True)
class Result:
    """One figure of one task.

    Args:
        task: the head and what it learns, e.g. ``"Classifier: handwritten digits"``. Results of one task, data and model
            share a table.
        data: the set and its split, with counts, e.g. ``"digits, 4,000 train / 1,000 test"``.
        size: the model in a few words, e.g. ``"dim 192, depth 6, patch 4"``.
        parameters: number of parameters of the model.
        steps: optimizer steps.
        minutes: processor time of training our model.
        metric: its name and unit, e.g. ``"top-1 %"``.
        value: our figure, on the test rows.
        baseline: what it is compared with, e.g. ``"timm ViT, same recipe"``.
        baseline_value: figure of the baseline.
        better: ``"higher"`` or ``"lower"``.
        chance: figure of a random guess, where that is defined.
        note: what a reader needs to interpret the figure.
        subset: the part of the test set that the figure is of, e.g. ``"questions of colour"``; empty: all of it.
    """

    task: str
    data: str
    size: str
    parameters: int
    steps: int
    minutes: float
    metric: str
    value: float
    baseline: str
    baseline_value: float
    better: str = "higher"
    chance: float | None = None
    note: str = ""
    subset: str = ""

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower"):
            raise ValueError(f"better={self.better!r}, expected 'higher' or 'lower'")

    @property
    def ahead(self) -> bool:
        """Whether our figure is better than the baseline's."""
        return self.value != self.baseline_value and (self.value > self.baseline_value) == (
            self.better == "higher"
        )

    @property
    def label(self) -> str:
        """The metric, with its subset."""
        return f"{self.metric}, {self.subset}" if self.subset else self.metric


def save(path: Path, results: Sequence[Result], **facts: str) -> None:
    """Store an evaluation's results as JSON, with facts about the run (date, machine, command)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "results": [dataclasses.asdict(r) for r in results]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[list[Result], dict[str, str]]:
    """Results and facts that `save` stored.

    Raises:
        InputError: the file was not written by `save`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [Result(**r) for r in content.pop("results")], content
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(
            f"{path} holds no results of an evaluation ({e}): delete it and run the evaluation again"
        ) from e
