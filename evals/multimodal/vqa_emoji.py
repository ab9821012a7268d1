"""Questions about images of held-out objects; baseline: the same model trained and evaluated without images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.training import parameter_count, percent, read_recipe, train_measured, train_recipe
from worldtokens.tasks.multimodal.interleave import reference_answer
from worldtokens.tasks.multimodal.model import MultimodalLM

ABOUT = "questions about held-out emoji images, compared with the same model trained without images"
SUBSETS = {
    "all": "all questions",
    "what": "name of the object",
    "group": "which of ten groups",
    "colour": "colour",
    "tone": "which of five skin tones",
    "which": "which of two images",
}


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """One training with and one without images."""
    recipe = read_recipe("vqa_emoji", out / "ours", scale)
    rows, _ = recipe.rows()
    test = samples.open("emoji_questions", split="test")
    model, report = train_recipe(recipe, rows)
    blind, augment = recipe.build(rows)
    blind_recipe = read_recipe("vqa_emoji", out / "blind", scale)
    train_measured(blind, without_images(rows), None, blind_recipe, augment)
    ours, baseline = by_kind(model, test), by_kind(blind, without_images(test))
    shuffled = by_kind(model, shuffle_images(test))["all"]
    facts = {
        "task": "MultimodalLM: questions about images",
        "data": f"emoji_questions, {len(rows):,} train / {len(test):,} test, split by depicted object",
        "size": f"language model of dim {model.language_model.trunk.dim}, depth {model.language_model.trunk.cfg.depth}; image encoder of "
        f"dim {model.encoders['image'].dim}, depth {model.encoders['image'].cfg.depth}; Projector",
        "parameters": parameter_count(model),
        "steps": report.steps,
        "minutes": round(report.seconds / 60, 1),
        "baseline": "the same model trained without images",
    }
    results = [
        Result(
            metric="loss, nats per answer token",
            subset=SUBSETS["all"],
            value=round(ours["all"]["loss"], 3),
            baseline_value=round(baseline["all"]["loss"], 3),
            better="lower",
            note=f"with shuffled images {shuffled['loss']:.3f}",
            **facts,
        )
    ]
    for kind, figures in ours.items():
        count = len(test) if kind == "all" else len(of_kind(test, kind))
        note = f"{count} questions; loss {figures['loss']:.3f}, baseline {baseline[kind]['loss']:.3f}"
        if kind == "all":
            note = f"{count} questions; with shuffled images {percent(shuffled['exact'])} %"
        results.append(
            Result(
                metric="exact match %",
                subset=SUBSETS[kind],
                value=percent(figures["exact"]),
                baseline_value=percent(baseline[kind]["exact"]),
                note=note,
                **facts,
            )
        )
    return results


def by_kind(model: MultimodalLM, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Metrics of `evaluate` for each kind of question, and for all questions."""
    kinds = {k: of_kind(rows, k) for k in dict.fromkeys(rows[i]["kind"] for i in range(len(rows)))}
    found = {kind: model.evaluate(subset) for kind, subset in kinds.items()}
    tokens = sum(f["tokens"] for f in found.values())
    whole = {
        "loss": sum(f["loss"] * f["tokens"] for f in found.values()) / tokens,
        "exact": sum(f["exact"] * len(kinds[k]) for k, f in found.items()) / len(rows),
    }
    return {"all": whole, **found}


def of_kind(rows: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """The questions of one kind."""
    return [row for row in (rows[i] for i in range(len(rows))) if row["kind"] == kind]


def without_images(rows: Sequence[Mapping[str, Any]]) -> list[dict]:
    """The same questions without their images."""
    return [_with(rows[i], []) for i in range(len(rows))]


def shuffle_images(rows: Sequence[Mapping[str, Any]]) -> list[dict]:
    """The same questions, each with the images of another one of its kind that has another answer, if there is one."""
    out = []
    for kind in dict.fromkeys(rows[i]["kind"] for i in range(len(rows))):
        same = of_kind(rows, kind)
        for i, row in enumerate(same):
            others = (same[(i + k + len(same) // 2) % len(same)] for k in range(len(same)))
            other = next((o for o in others if reference_answer(o) != reference_answer(row)), row)
            out.append(_with(row, _images(other)))
    return out


def _images(row: Mapping[str, Any]) -> list[Any]:
    return [part for m in row["messages"] for part in m["content"] if not isinstance(part, str)]


def _with(row: Mapping[str, Any], images: Sequence[Any]) -> dict:
    """A row with these images instead of its own, or without images."""
    left, messages = list(images), []
    for message in row["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = [
                p if isinstance(p, str) else left.pop(0) for p in content if isinstance(p, str) or left
            ]
        messages.append({**message, "content": content})
    return {**row, "messages": messages}
