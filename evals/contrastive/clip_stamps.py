"""Images, captions and speech of held-out stamps in one embedding space; baseline: CCA per pair of modalities."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from worldtokens.data import samples
from worldtokens.data.rows import Rows
from worldtokens.data.sets.stamps import SPOKEN_LANGUAGES
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.cca import audio_features, image_features, linear_pairs, text_features
from worldtokens.evals.contrastive.base import CachedReader, pair_results, size_of, speed_result
from worldtokens.evals.training import parameter_count, percent, read_recipe, train_measured
from worldtokens.tasks.metrics.probe import linear_probe
from worldtokens.tasks.metrics.retrieval import retrieval_table
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer

ABOUT = "images, captions in ten languages and speech in one embedding space"
SAMPLE_RATE = 8000


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Train on the spoken captions of the training stamps; retrieve among the test stamps."""
    trial = () if scale == 1 else ("--train.batch_size", "16")  # a trial has few rows
    recipe = read_recipe("clip_stamps", out / "ours", scale, 0, *trial)
    rows, _ = recipe.rows()
    every = 1 if scale == 1 else max(1, round(0.5 / max(scale, 0.02)))  # a trial reads few recordings
    rows = rows[::every]
    model, augment = recipe.build(rows)
    read = CachedReader(model, ("image", "audio"))
    train = read(rows)
    held_out = {
        side: read(
            [_with_class(r) for r in samples.open("stamps", split=side, languages=SPOKEN_LANGUAGES)[::every]]
        )
        for side in ("validation", "test")
    }
    report = train_measured(model, train, held_out["validation"], recipe, augment)
    ours = model.evaluate(held_out["test"])
    linear = linear_pairs(
        _features(train), _features(held_out["validation"]), _features(held_out["test"]), match=lambda i: i[0]
    )
    for title, figures in (("one embedding space", ours), ("linear models, one per pair", linear)):
        with open(out / "tables.txt", "a", encoding="utf-8") as file:
            for console in (Console(), Console(file=file, width=100)):
                console.print(retrieval_table(figures, f"{len(held_out['test'])} test stamps: {title}"))
    data = f"stamps, {len({r['stamp'] for r in train})} train / {len(held_out['test'])} test"
    note = "ten languages; any caption or recording of a test stamp counts as its match"
    results = pair_results(model, report, ours, linear, "CLIP: stamps, retrieval", data, note)
    images = read([_with_class(r) for r in samples.open("stamps", split="train", languages=[])[::every]])
    probes = [
        linear_probe(source, "image", images, held_out["test"], "kind", held_out["validation"])
        for source in (model, _RawFeatures())
    ]
    results.append(
        Result(
            task="CLIP: stamps, linear probe of images",
            data=f"stamps, {len(images)} train / {probes[0].samples[1]} test, {len(probes[0].classes)} folders as classes",
            size=size_of(model),
            parameters=parameter_count(model),
            steps=report.steps,
            minutes=round(report.seconds / 60, 1),
            metric="top-1 %",
            value=percent(probes[0].top1),
            baseline="logistic regression on pooled raw features",
            baseline_value=percent(probes[1].top1),
            chance=percent(probes[0].majority),
            note="chance is the most frequent folder",
        )
    )
    return [*results, speed_result(recipe, train, model, max(2, round(20 * scale)), "CLIP: stamps")]


def _with_class(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its stamp, and the top-level folder as its kind: "animals", "symbols" ..."""
    return {**row, "stamp": row["id"], "kind": row["class"].partition("/")[0]}


class _RawFeatures:
    """Pooled pixels instead of a model's embeddings."""

    def embed(self, column: str, sources: Sequence[Tensor], batch_size: int = 64) -> Tensor:
        return torch.stack([image_features(s) for s in sources])


def _features(rows: Rows) -> dict[str, tuple[Tensor, list[Hashable]]]:
    """Input of the linear models; ids are (stamp, language), so that a caption is paired with its own recording."""
    mel = AudioTokenizer(16, sample_rate=SAMPLE_RATE, n_mels=40, stem="frames", seconds=3.0, positions="none")
    cache: dict[int, Tensor] = {}

    def from_audio(value: tuple[Tensor, int]) -> Tensor:
        spectrogram, counts = mel.features(mel.collate([value[0]]))
        return audio_features(spectrogram[0, : counts[0]])

    extractors = {"image": image_features, "text": text_features, "audio": from_audio}
    found: dict[str, tuple[list[Tensor], list[Hashable]]] = {c: ([], []) for c in extractors}
    for n, row in enumerate(rows):
        owner = (row["stamp"], row.get("language", n))
        for column, extract in extractors.items():
            values = row.get(column, [])
            for value in values if isinstance(values, list) else [values]:
                known = cache.get(id(value)) if column == "image" else None
                feature = extract(value) if known is None else known
                if column == "image":
                    cache[id(value)] = feature
                found[column][0].append(feature)
                found[column][1].append(owner)
    return {c: (torch.stack(x), owners) for c, (x, owners) in found.items()}
