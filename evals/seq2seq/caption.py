"""Captions of images of held-out objects; baselines: the nearest image's caption, and the same model without images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.training import parameter_count, percent, read_recipe, train_measured, train_recipe
from worldtokens.figures.attention import attention_figure
from worldtokens.tasks.metrics.text import text_scores
from worldtokens.tasks.seq2seq.model import EncoderDecoder

ABOUT = "captions of held-out emoji and stamps, compared with the nearest image's caption and a model without images"


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """One training with and one without images on emoji, one on stamps; draws an attention figure into `out`."""
    results = []
    for source, title in (("emoji", "emoji"), ("stamps", "stamps (photos and drawings)")):
        overrides = ["--data.train.source", source, "--data.validation.source", source]
        recipe = read_recipe(
            "caption_emoji", out / source, scale * (1.0 if source == "emoji" else 0.4), 0, *overrides
        )
        rows, validation = recipe.rows()
        test = test_rows(source)
        model, report = train_recipe(recipe, rows, validation)
        figures = model.evaluate(test)
        shuffled = loss_on(model, shuffle_column(test, "image"))
        nearest = text_scores(nearest_captions(rows, test), [model.references(r) for r in test])
        facts = {
            "task": f"Captioner: {title}",
            "data": f"{source}, {len(rows):,} train / {len(test)} test, split by depicted object",
            "size": size(model),
            "parameters": parameter_count(model),
            "steps": report.steps,
            "minutes": round(report.seconds / 60, 1),
        }
        results += [
            Result(
                metric="BLEU",
                value=round(figures["bleu"], 1),
                baseline="caption of the nearest training image by pixels",
                baseline_value=round(nearest["bleu"], 1),
                note=f"chrF {figures['chrf']:.1f}, baseline {nearest['chrf']:.1f}; exact match {percent(figures['exact'])} %, "
                f"baseline {percent(nearest['exact'])} %: test objects do not occur in training",
                **facts,
            ),
        ]
        baseline, baseline_value = "the same model with shuffled images", shuffled
        if source == "emoji":
            bare, augment = recipe.build(rows)
            blind = read_recipe("caption_emoji", out / "blind", scale, 0, *overrides)
            train_measured(bare, drop_column(rows, "image"), None, blind, augment)
            baseline = "the same model trained without images"
            baseline_value = loss_on(bare, drop_column(test, "image"))
            attention_figure(
                model, [r["image"] for r in test[:: max(1, len(test) // 8)][:8]], out / "attention.png"
            )
        results.append(
            Result(
                metric="loss, nats per token",
                value=round(figures["loss"], 3),
                baseline=baseline,
                baseline_value=round(baseline_value, 3),
                better="lower",
                note=f"with shuffled images {shuffled:.3f}" if source == "emoji" else "",
                **facts,
            )
        )
    return results


def test_rows(source: str, **options: Any) -> list[dict]:
    """Test rows of a data set that have a text."""
    rows = samples.open(source, split="test", **options)
    return [row for row in (rows[i] for i in range(len(rows))) if row.get("text")]


def size(model: EncoderDecoder) -> str:
    """Size of an encoder-decoder in a few words."""
    parts = []
    for name in ("encoder", "decoder"):
        part = getattr(model, name)
        depth = f", depth {part.cfg.depth}" if hasattr(part, "cfg") else ""
        parts.append(f"{name} {type(part).__name__} of dim {part.dim}{depth}")
    return "; ".join(parts)


def drop_column(rows: Sequence[Mapping], column: str) -> list[dict]:
    """The rows without a column."""
    return [{k: v for k, v in rows[i].items() if k != column} for i in range(len(rows))]


def shuffle_column(rows: Sequence[Mapping], column: str) -> list[dict]:
    """The rows, with a column taken from another row."""
    shift = len(rows) // 2
    return [{**row, column: rows[(i + shift) % len(rows)][column]} for i, row in enumerate(rows)]


def loss_on(model: EncoderDecoder, rows: Sequence[Mapping]) -> float:
    """Nats per token on these rows, without decoding."""
    score, model.score = model.score, "loss"
    try:
        return model.evaluate(rows)["loss"]
    finally:
        model.score = score


def nearest_captions(train: Sequence[Mapping], test: Sequence[Mapping]) -> list[str]:
    """For each test image the first caption of the training image with the nearest pixels, at 16 x 16."""
    from worldtokens.tokenizers.image.tokenizer import ImageTokenizer

    front = ImageTokenizer(dim=8, patch=16, size=64, preprocess={"draft": False})
    known = [row for row in (train[i] for i in range(len(train))) if row.get("text")]
    a, b = (_pixels(front, rows) for rows in (known, test))
    texts = [known[i]["text"] for i in torch.cdist(b, a).argmin(1).tolist()]
    return [t[0] if isinstance(t, list) else t for t in texts]


def _pixels(front: Any, rows: Sequence[Mapping]) -> Tensor:
    """(n, 768): images of 16 x 16 pixels, flattened."""
    small = []
    for row in rows:
        raw = front.read(row["image"])[None].float() / 255
        small.append(torch.nn.functional.interpolate(raw, (16, 16), mode="area").flatten())
    return torch.stack(small)
