"""What a quality check says: one line of the table of results, measured beside a baseline in the same run.

A check is a module of this room, `evals/<task>/<name>.py`, with

    ABOUT = "handwritten digits: ours beside a timm ViT of the same size"
    def check(out: Path, scale: float = 1.0) -> list[Result]: ...

It trains on real data, trains its baseline on the same rows, writes what it makes (checkpoints, images) under `out`,
and gives its results. `scale` below 1 shortens the training for a trial; such results are not kept.
`worldtokens results NAME` runs it, keeps its results in `docs/results/<name>.json` and writes the table.
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
        task: what was learned, in a few words, e.g. ``"Classifier: handwritten digits"``.
        data: the set and its split, with counts, e.g. ``"digits, 4,000 train / 1,000 test"``.
        size: the model in a few words, e.g. ``"192 wide, 6 deep, patch 4"``.
        parameters: how many the model has.
        steps: optimizer steps.
        minutes: of training ours.
        metric: its name and unit, e.g. ``"top-1 %"``.
        value: ours, on the test rows.
        baseline: what stands beside it, e.g. ``"timm ViT, same recipe"``.
        baseline_value: its figure.
        better: ``"higher"`` or ``"lower"``.
        chance: what guessing gives, where that has a meaning.
        note: what a reader must know to take the figure rightly.
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

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower"):
            raise ValueError(f"better={self.better!r}, expected 'higher' or 'lower'")

    @property
    def ahead(self) -> bool:
        """Is ours better than the baseline?"""
        return (self.value > self.baseline_value) == (self.better == "higher")


def save(path: Path, results: Sequence[Result], **facts: str) -> None:
    """Keep a check's results as JSON, with facts about the run (date, machine, command)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "results": [dataclasses.asdict(r) for r in results]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def load(path: Path) -> tuple[list[Result], dict[str, str]]:
    """What `save` kept: the results, and the facts.

    Raises:
        InputError: the file is not one of `save`'s.
    """
    try:
        content = json.loads(path.read_text())
        return [Result(**r) for r in content.pop("results")], content
    except (ValueError, KeyError, TypeError) as e:
        raise InputError(
            f"{path} holds no results of a check ({e}): delete it and run the check again"
        ) from e
