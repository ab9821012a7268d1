"""Captions of images unlike any in training, beside the nearest image's caption and a model that sees none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.classification.base import percent, read_recipe, train_measured, train_recipe
from worldtokens.figures.attention import attention_figure
from worldtokens.tasks.metrics.text import text_scores
from worldtokens.tasks.seq2seq.model import EncoderDecoder

ABOUT = "captions: names of held-out emoji and stamps, beside the nearest image's and a model without images"


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """One training with and one without images on emoji, one on stamps; a figure of where words look in `out`."""
    results = []
    for source, title in (("emoji", "emoji"), ("stamps", "stamps (photos and drawings)")):
        words = ["--data.train.source", source, "--data.validation.source", source]
        recipe = read_recipe(
            "caption_emoji", out / source, scale * (1.0 if source == "emoji" else 0.4), 0, *words
        )
        rows, held = recipe.rows()
        test = held_rows(source)
        model, report = train_recipe(recipe, rows, held)
        figures = model.evaluate(test)
        exchanged = loss_with(model, exchange(test, "image"))
        nearest = text_scores(nearest_captions(rows, test), [model.references(r) for r in test])
        facts = {
            "data": f"{title}, {len(rows):,} train / {len(test)} test, split by what is shown",
            "size": size(model),
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": report.steps,
            "minutes": round(report.seconds / 60, 1),
        }
        beside = "caption of the nearest training image, by pixels"
        results += [
            Result(
                task=f"Captioner: {title}",
                metric="BLEU",
                value=round(figures["bleu"], 1),
                baseline=beside,
                baseline_value=round(nearest["bleu"], 1),
                note=f"chrF {figures['chrf']:.1f} against {nearest['chrf']:.1f}; right word for word {percent(figures['exact'])} % "
                f"against {percent(nearest['exact'])} %: what the test shows is not in training",
                **facts,
            ),
        ]
        baseline, beside = exchanged, "the same model, images exchanged between rows"
        if source == "emoji":
            bare, augment = recipe.build(rows)
            blind = read_recipe("caption_emoji", out / "blind", scale, 0, *words)
            train_measured(bare, without(rows, "image"), None, blind, augment)
            baseline, beside = (
                loss_with(bare, without(test, "image")),
                "the same model trained without images",
            )
            attention_figure(
                model, [r["image"] for r in test[:: max(1, len(test) // 8)][:8]], out / "attention.png"
            )
        results.append(
            Result(
                task=f"Captioner: {title}",
                metric="loss, nats per token",
                value=round(figures["loss"], 3),
                baseline=beside,
                baseline_value=round(baseline, 3),
                better="lower",
                note=f"with images exchanged between rows {exchanged:.3f}",
                **facts,
            )
        )
    return results


def held_rows(source: str, **options: Any) -> list[dict]:
    """The test rows of a set that have a text, read."""
    rows = samples.open(source, split="test", **options)
    return [row for row in (rows[i] for i in range(len(rows))) if row.get("text")]


def size(model: EncoderDecoder) -> str:
    """An encoder-decoder in a few words."""
    parts = []
    for name in ("encoder", "decoder"):
        part = getattr(model, name)
        deep = f", {part.cfg.depth} deep" if hasattr(part, "cfg") else ""
        kind = type(part).__name__
        parts.append(f"{name} {kind} {part.dim} wide{deep}")
    return "; ".join(parts)


def without(rows: Sequence[Mapping], column: str) -> list[dict]:
    """Rows that lack a column."""
    return [{k: v for k, v in rows[i].items() if k != column} for i in range(len(rows))]


def exchange(rows: Sequence[Mapping], column: str) -> list[dict]:
    """Rows in which a column is another row's."""
    shift = len(rows) // 2
    return [{**row, column: rows[(i + shift) % len(rows)][column]} for i, row in enumerate(rows)]


def loss_with(model: EncoderDecoder, rows: Sequence[Mapping]) -> float:
    """Nats an id on these rows, no answers written."""
    kept, model.score = model.score, "loss"
    try:
        return model.evaluate(rows)["loss"]
    finally:
        model.score = kept


def nearest_captions(train: Sequence[Mapping], test: Sequence[Mapping]) -> list[str]:
    """For each test image the first caption of the training image that is nearest in colour, 16 x 16 places."""
    from worldtokens.tokenizers.image.tokenizer import ImageTokenizer

    front = ImageTokenizer(dim=8, patch=16, size=64, draft=False)
    known = [row for row in (train[i] for i in range(len(train))) if row.get("text")]
    a, b = (_pixels(front, rows) for rows in (known, test))
    texts = [known[i]["text"] for i in torch.cdist(b, a).argmin(1).tolist()]
    return [t[0] if isinstance(t, list) else t for t in texts]


def _pixels(front: Any, rows: Sequence[Mapping]) -> Tensor:
    """(n, 768): small images, flat."""
    small = []
    for row in rows:
        raw = front.read(row["image"])[None].float() / 255
        small.append(torch.nn.functional.interpolate(raw, (16, 16), mode="area").flatten())
    return torch.stack(small)
