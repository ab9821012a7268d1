"""Images, words and speech in one space, on stamps that training never saw, beside linear models of each pair."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from worldtokens.data import samples
from worldtokens.data.rows import Rows
from worldtokens.data.sets.stamps import SPOKEN
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.cca import linear_pairs, picture_features, sound_features, text_features
from worldtokens.evals.classification.base import percent, read_recipe, train_measured
from worldtokens.evals.contrastive.base import ReadOnce, pair_lines, size_of, speed_line
from worldtokens.tasks.metrics.probe import linear_probe
from worldtokens.tasks.metrics.retrieval import retrieval_table
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer

ABOUT = "images, captions in ten languages and speech in one space"
SAMPLE_RATE = 8000


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """Train on the spoken captions of the training stamps; find among the test stamps."""
    trial = () if scale == 1 else ("--train.batch_size", "16")  # which has few rows
    recipe = read_recipe("clip_stamps", out / "ours", scale, 0, *trial)
    rows, _ = recipe.rows()
    every = (
        1 if scale == 1 else max(1, round(0.5 / max(scale, 0.02)))
    )  # a trial does not read thousands of recordings
    rows = rows[::every]
    model, augment = recipe.build(rows)
    once = ReadOnce(model, ("image", "audio"))
    train = once(rows)
    held = {
        side: once([_top(r) for r in samples.open("stamps", split=side, languages=SPOKEN)[::every]])
        for side in ("validation", "test")
    }
    report = train_measured(model, train, held["validation"], recipe, augment)
    ours = model.evaluate(held["test"])
    linear = linear_pairs(
        _features(train), _features(held["validation"]), _features(held["test"]), mate=lambda i: i[0]
    )
    for title, figures in (("one space", ours), ("linear models, one a pair", linear)):
        with open(out / "tables.txt", "a", encoding="utf-8") as file:
            for console in (Console(), Console(file=file, width=100)):
                console.print(retrieval_table(figures, f"{len(held['test'])} test stamps: {title}"))
    data = f"stamps, {len({r['stamp'] for r in train})} train / {len(held['test'])} test"
    note = "ten languages; a test stamp is found by any of its captions or recordings"
    lines = pair_lines(model, report, ours, linear, "CLIP", data, note)
    pictures = once([_top(r) for r in samples.open("stamps", split="train", languages=[])[::every]])
    probes = [
        linear_probe(judged, "image", pictures, held["test"], "kind", held["validation"])
        for judged in (model, _Raw())
    ]
    lines.append(
        Result(
            task="CLIP: linear probe of images",
            data=f"stamps, {len(pictures)} train / {probes[0].samples[1]} test, {len(probes[0].classes)} folders",
            size=size_of(model),
            parameters=sum(p.numel() for p in model.parameters()),
            steps=report.steps,
            minutes=round(report.seconds / 60, 1),
            metric="top-1 %",
            value=percent(probes[0].top1),
            baseline="logistic regression on pooled raw features",
            baseline_value=percent(probes[1].top1),
            chance=percent(probes[0].majority),
            note="chance: the most frequent folder",
        )
    )
    return [*lines, speed_line(recipe, train, model, max(2, round(20 * scale)), "CLIP: stamps")]


def _top(row: dict[str, Any]) -> dict[str, Any]:
    """With the folder's first name as its kind: "animals", "symbols" ..."""
    return {**row, "stamp": row["id"], "kind": row["class"].partition("/")[0]}


class _Raw:
    """Pooled pixels in place of a model."""

    def embed(self, column: str, sources: Sequence[Tensor], batch_size: int = 64) -> Tensor:
        return torch.stack([picture_features(s) for s in sources])


def _features(rows: Rows) -> dict[str, tuple[Tensor, list[Hashable]]]:
    """What the linear models read, each thing with (stamp, language): words are matched with their own recording."""
    ear = AudioTokenizer(16, sample_rate=SAMPLE_RATE, n_mels=40, stem="frames", seconds=3.0, positions="none")
    memory: dict[int, Tensor] = {}

    def sound(value: tuple[Tensor, int]) -> Tensor:
        spectrum, counts = ear.features(ear.collate([value[0]]))
        return sound_features(spectrum[0, : counts[0]])

    made = {"image": picture_features, "text": text_features, "audio": sound}
    things: dict[str, tuple[list[Tensor], list[Hashable]]] = {c: ([], []) for c in made}
    for n, row in enumerate(rows):
        owner = (row["stamp"], row.get("language", n))
        for column, make in made.items():
            values = row.get(column, [])
            for value in values if isinstance(values, list) else [values]:
                known = memory.get(id(value)) if column == "image" else None
                feature = make(value) if known is None else known
                if column == "image":
                    memory[id(value)] = feature
                things[column][0].append(feature)
                things[column][1].append(owner)
    return {c: (torch.stack(x), owners) for c, (x, owners) in things.items()}
