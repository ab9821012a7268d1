"""Speech recognition: held-out sentences and voices, and recorded captions of stamps in two languages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import pooled_mel
from worldtokens.evals.seq2seq.caption import loss_on, shuffle_column, size, test_rows
from worldtokens.evals.training import parameter_count, percent, read_recipe, train_recipe
from worldtokens.tasks.metrics.text import text_scores

ABOUT = "speech recognition: espeak-ng sentences and spoken captions, compared with the nearest training recording's text"
CANDIDATES = 1500  # training recordings that the nearest-neighbour baseline searches
STAMPS = {"fr": "French", "es": "Spanish"}


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """One training on the sentences, one on the stamps' French and Spanish recordings together."""
    recipe = read_recipe("transcribe_sentences", out / "sentences", scale)
    rows, validation = recipe.rows()
    test = test_rows("spoken_sentences")
    results = _measure(
        recipe, rows, validation, {"sentences and voices unseen in training": test}, "spoken_sentences"
    )
    both = {
        side: [row for lang in STAMPS for row in _recordings(side, lang)] for side in ("train", "validation")
    }
    tests = {f"captions of stamps in {name}": _recordings("test", lang) for lang, name in STAMPS.items()}
    recipe = read_recipe(
        "transcribe_sentences", out / "stamps", 0.35 * scale, 0, "--model.tokenizers.text.context", "48"
    )
    return results + _measure(recipe, both["train"], both["validation"], tests, "stamps, spoken captions")


def _recordings(side: str, language: str) -> list[dict]:
    rows = samples.open("stamps", split=side, languages=(language,), audio=language, drawings=True)
    rows = [rows[i] for i in range(len(rows))]
    return [{k: row[k] for k in ("audio", "text")} for row in rows if row.get("text")]


class _Texts(list):
    """List of rows with `texts`, from which a text front-end can train its vocabulary."""

    def texts(self, column: str = "text") -> list[str]:
        found = [row[column] for row in self if row.get(column)]
        return [t for text in found for t in (text if isinstance(text, list) else [text])]


def _measure(
    recipe: Any, rows: Any, validation: Any, tests: Mapping[str, Sequence[Mapping]], data: str
) -> list[Result]:
    rows = _Texts(rows) if isinstance(rows, list) else rows
    model, report = train_recipe(recipe, rows, validation)
    results = []
    for name, test in tests.items():
        figures = model.evaluate(test)
        references = [model.references(row) for row in test]
        nearest = text_scores(_nearest(rows, test), references)
        shuffled = loss_on(model, shuffle_column(test, "audio"))
        facts = {
            "task": f"Captioner, speech to text: {name}",
            "data": f"{data}, {len(rows):,} train / {len(test)} test",
            "size": size(model),
            "parameters": parameter_count(model),
            "steps": report.steps,
            "minutes": round(report.seconds / 60, 1),
            "better": "lower",
        }
        results += [
            Result(
                metric="word error rate %",
                value=percent(figures["wer"]),
                baseline="text of the nearest training recording by mean log-mel",
                baseline_value=percent(nearest["wer"]),
                note=f"exact match {percent(figures['exact'])} %",
                **facts,
            ),
            Result(
                metric="loss, nats per token",
                value=round(figures["loss"], 3),
                baseline="the same model with shuffled recordings",
                baseline_value=round(shuffled, 3),
                **facts,
            ),
        ]
    return results


def _nearest(train: Sequence[Mapping], test: Sequence[Mapping]) -> list[str]:
    """For each test recording the text of the training recording with the nearest mean log-mel of thirds."""
    known = [train[i] for i in range(min(CANDIDATES, len(train)))]
    a, b = (pooled_mel([row["audio"] for row in rows], 11025, 40, 6.0) for rows in (known, test))
    mean, std = a.mean(0), a.std(0).clamp(min=1e-6)
    found = torch.cdist((b - mean) / std, (a - mean) / std).argmin(1).tolist()
    texts = [known[i]["text"] for i in found]
    return [t[0] if isinstance(t, list) else t for t in texts]
