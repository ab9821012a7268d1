"""Questions about images unlike any in training, beside the same model trained and asked without the images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.classification.base import percent, read_recipe, train_measured, train_recipe
from worldtokens.tasks.multimodal.interleave import reference_answer
from worldtokens.tasks.multimodal.model import MultimodalLM

ABOUT = "questions about held-out emoji images, beside the same model trained without the images"
TITLES = {
    "what": "what it is, word for word",
    "group": "which of ten groups",
    "colour": "what colour",
    "tone": "which of five skin tones",
    "which": "which of two images",
}


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """One training with and one without images."""
    recipe = read_recipe("vqa_emoji", out / "seeing", scale)
    rows, _ = recipe.rows()
    test = samples.open("emoji_questions", split="test")
    model, report = train_recipe(recipe, rows)
    blind, augment = recipe.build(rows)
    without = read_recipe("vqa_emoji", out / "blind", scale)
    train_measured(blind, unshown(rows), None, without, augment)
    seen, unseen = by_kind(model, test), by_kind(blind, unshown(test))
    moved = by_kind(model, exchanged(test))["all"]
    facts = {
        "data": f"emoji_questions, {len(rows):,} train / {len(test):,} test, split by what is shown",
        "size": f"language model {model.language_model.trunk.dim} wide, {model.language_model.trunk.cfg.depth} deep; images' encoder "
        f"{model.encoders['image'].dim} wide, {model.encoders['image'].cfg.depth} deep; Projector",
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": report.steps,
        "minutes": round(report.seconds / 60, 1),
        "baseline": "the same model trained without images",
    }
    results = [
        Result(
            task="MultimodalLM: questions about images",
            metric="loss, nats a token of the answer",
            value=round(seen["all"]["loss"], 3),
            baseline_value=round(unseen["all"]["loss"], 3),
            better="lower",
            note=f"with images exchanged between rows {moved['loss']:.3f}",
            **facts,
        )
    ]
    for kind, figures in seen.items():
        asked = len(test) if kind == "all" else len(of_kind(test, kind))
        title = "questions about images" if kind == "all" else TITLES[kind]
        note = f"{asked} questions; loss {figures['loss']:.3f} against {unseen[kind]['loss']:.3f}"
        if kind == "all":
            note += f"; with images exchanged between rows {percent(moved['exact'])} % right"
        results.append(
            Result(
                task=f"MultimodalLM: {title}",
                metric="answers right word for word, %",
                value=percent(figures["exact"]),
                baseline_value=percent(unseen[kind]["exact"]),
                note=note,
                **facts,
            )
        )
    return results


def by_kind(model: MultimodalLM, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """`evaluate`'s figures for each kind of question, and for all of them together."""
    kinds = {k: of_kind(rows, k) for k in dict.fromkeys(rows[i]["kind"] for i in range(len(rows)))}
    found = {kind: model.evaluate(some) for kind, some in kinds.items()}
    tokens = sum(f["tokens"] for f in found.values())
    whole = {
        "loss": sum(f["loss"] * f["tokens"] for f in found.values()) / tokens,
        "exact": sum(f["exact"] * len(kinds[k]) for k, f in found.items()) / len(rows),
    }
    return {"all": whole, **found}


def of_kind(rows: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """The questions of one kind."""
    return [row for row in (rows[i] for i in range(len(rows))) if row["kind"] == kind]


def unshown(rows: Sequence[Mapping[str, Any]]) -> list[dict]:
    """The same questions with their images taken out."""
    return [_with(rows[i], []) for i in range(len(rows))]


def exchanged(rows: Sequence[Mapping[str, Any]]) -> list[dict]:
    """The same questions, each with the images of another one of its kind that has another answer, where there is one."""
    out = []
    for kind in dict.fromkeys(rows[i]["kind"] for i in range(len(rows))):
        some = of_kind(rows, kind)
        for i, row in enumerate(some):
            others = (some[(i + k + len(some) // 2) % len(some)] for k in range(len(some)))
            other = next((o for o in others if reference_answer(o) != reference_answer(row)), row)
            out.append(_with(row, _pictures(other)))
    return out


def _pictures(row: Mapping[str, Any]) -> list[Any]:
    return [part for m in row["messages"] for part in m["content"] if not isinstance(part, str)]


def _with(row: Mapping[str, Any], pictures: Sequence[Any]) -> dict:
    """A row with these images in the places of its own, or without any."""
    left, messages = list(pictures), []
    for message in row["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = [
                p if isinstance(p, str) else left.pop(0) for p in content if isinstance(p, str) or left
            ]
        messages.append({**message, "content": content})
    return {**row, "messages": messages}
