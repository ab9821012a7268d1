"""Speech written down: unseen sentences by unheard voices, and recorded captions of stamps in two languages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import pooled_mel
from worldtokens.evals.classification.base import percent, read_recipe, train_recipe
from worldtokens.evals.seq2seq.caption import exchange, held_rows, loss_with, size
from worldtokens.tasks.metrics.text import text_scores

ABOUT = "speech to text: espeak-ng sentences and spoken captions, beside the nearest training sound's text"
MOST = 1500  # training sounds among which the nearest is sought
STAMPS = {"fr": "French", "es": "Spanish"}


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """One training on the sentences, one on the stamps' French and Spanish recordings together."""
    recipe = read_recipe("transcribe_sentences", out / "sentences", scale)
    rows, held = recipe.rows()
    test = held_rows("spoken_sentences")
    results = _measure(recipe, rows, held, {"sentences, unseen, by unheard voices": test}, "spoken_sentences")
    both = {
        side: [row for lang in STAMPS for row in _recordings(side, lang)] for side in ("train", "validation")
    }
    tests = {f"stamps' captions in {name}": _recordings("test", lang) for lang, name in STAMPS.items()}
    recipe = read_recipe(
        "transcribe_sentences", out / "stamps", 0.35 * scale, 0, "--model.tokenizers.text.context", "48"
    )
    return results + _measure(recipe, both["train"], both["validation"], tests, "stamps, spoken captions")


def _recordings(side: str, language: str) -> list[dict]:
    rows = samples.open("stamps", split=side, languages=(language,), audio=language, drawings=True)
    rows = [rows[i] for i in range(len(rows))]
    return [{k: row[k] for k in ("audio", "text")} for row in rows if row.get("text")]


class _Texts(list):
    """Rows in a list that a text front-end can learn its vocabulary from."""

    def texts(self, column: str = "text") -> list[str]:
        found = [row[column] for row in self if row.get(column)]
        return [t for text in found for t in (text if isinstance(text, list) else [text])]


def _measure(
    recipe: Any, rows: Any, held: Any, tests: Mapping[str, Sequence[Mapping]], data: str
) -> list[Result]:
    rows = _Texts(rows) if isinstance(rows, list) else rows
    model, report = train_recipe(recipe, rows, held)
    results = []
    for name, test in tests.items():
        figures = model.evaluate(test)
        references = [model.references(row) for row in test]
        near = text_scores(_nearest(rows, test), references)
        exchanged = loss_with(model, exchange(test, "audio"))
        facts = {
            "task": f"Captioner, speech to text: {name}",
            "data": f"{data}, {len(rows):,} train / {len(test)} test",
            "size": size(model),
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": report.steps,
            "minutes": round(report.seconds / 60, 1),
            "better": "lower",
        }
        results += [
            Result(
                metric="word error rate, %",
                value=percent(figures["wer"]),
                baseline="text of the nearest training sound, by mean mel in thirds",
                baseline_value=percent(near["wer"]),
                note=f"{percent(figures['exact'])} % of the texts right word for word",
                **facts,
            ),
            Result(
                metric="loss, nats per token",
                value=round(figures["loss"], 3),
                baseline="the same model, sounds exchanged between rows",
                baseline_value=round(exchanged, 3),
                **facts,
            ),
        ]
    return results


def _nearest(train: Sequence[Mapping], test: Sequence[Mapping]) -> list[str]:
    """For each test sound the text of the training sound with the nearest mean mel spectrum."""
    known = [train[i] for i in range(min(MOST, len(train)))]
    a, b = (pooled_mel([row["audio"] for row in rows], 11025, 40, 6.0) for rows in (known, test))
    mean, spread = a.mean(0), a.std(0).clamp(min=1e-6)
    found = torch.cdist((b - mean) / spread, (a - mean) / spread).argmin(1).tolist()
    texts = [known[i]["text"] for i in found]
    return [t[0] if isinstance(t, list) else t for t in texts]
