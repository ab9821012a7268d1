"""Images drawn from words, judged by a CLIP that was trained apart, on captions whose images training never saw."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.classification.base import percent, read_recipe, trained
from worldtokens.figures.sheet import Cell, Row, draw_sheet
from worldtokens.training.recipe import Recipe
from worldtokens.training.settings import autocast_type

ABOUT = "images drawn from words, judged by a CLIP trained apart"
STEPS, GUIDANCE = 12, 3.0  # of Heun's method
FAMILIAR = ["green heart", "blue heart", "broken heart", "yellow square", "red circle", "three o’clock"]
FAMILIAR += [
    "grinning face",
    "thinking face",
    "smiling face with heart-eyes",
    "rainbow flag",
    "flag: Austria",
]
FAMILIAR += ["flag: France", "waving hand", "cat face", "soccer ball", "tangerine"]
HELD_OUT = ["red heart", "black heart", "red square", "orange square", "purple circle", "black circle"]
HELD_OUT += [
    "eight o’clock",
    "kissing face",
    "grinning face with sweat",
    "white flag",
    "flag: Italy",
    "red apple",
]
HELD_OUT += ["thumbs down", "monkey face", "red triangle pointed up", "crescent moon"]


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """Train the painter and the judge on the same training images; draw for the test captions.

    Both trainings go on where an earlier start was stopped. Writes the sheet, `sheet.png`, and all figures,
    `figures.json`, into `out`.
    """
    recipe = read_recipe("diffusion_emoji", out / "painter", scale)
    rows = {s: samples.open("emoji_plain", split=s) for s in ("train", "validation", "test")}
    model, minutes = trained(recipe)
    side = model.front.size[0]
    judge, _ = trained(judging(out / "judge", side, scale))
    if scale < 1:
        rows = {k: v[:: max(1, round(1 / max(scale, 0.05)))] for k, v in rows.items()}
    test = rows["test"]
    asked = [caption(r) for r in test]
    losses = half(model.evaluate)(test)
    figures = {"losses": losses, "judge": judge.evaluate(test), "minutes": minutes}
    figures["real images"] = agreement(judge, [r["image"] for r in test], asked)
    known = [caption(r) for r in rows["train"][:: len(rows["train"]) // len(test)][: len(test)]]
    for name, words, guidance in (
        ("guidance 0", asked, 0.0),
        ("guidance 1", asked, 1.0),
        (best := f"guidance {GUIDANCE:g}", asked, GUIDANCE),
        ("training captions", known, GUIDANCE),
    ):
        pictures = half(model.sample)(words * 2, steps=STEPS, guidance=guidance)  # two of each
        figures[name] = agreement(judge, pictures, words * 2)
        if name == best:
            figures["captions exchanged"] = agreement(judge, pictures, (words[1:] + words[:1]) * 2)
    paint = functools.partial(half(model.sample), steps=25, guidance=GUIDANCE)
    draw(paint, judge, [r for part in rows.values() for r in part], out / "sheet.png")
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    cfg = model.trunk.cfg
    facts = {
        "data": f"emoji without skin tones, at {side} x {side}, {len(rows['train']):,} train / {len(test)} test, split by what is shown",
        "size": f"{cfg.dim} wide, {cfg.depth} deep, patch {model.front.patch[0]}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": recipe.train.steps,
        "minutes": round(minutes, 1),
    }
    found = {k: percent(v["R@10"]) for k, v in figures.items() if isinstance(v, dict) and "R@10" in v}
    chance = percent(10 / len(test))
    judged = f"right caption among the judge's first 10 of {len(test)}, %"
    return [
        Result(
            task="Diffusion: emoji from words",
            metric="velocity loss",
            value=round(losses["loss"], 4),
            baseline="the same model without the words",
            baseline_value=round(losses["loss_null"], 4),
            better="lower",
            note=f"with the next row's words {losses['loss_shuffled']:.4f}",
            **facts,
        ),
        Result(
            task="Diffusion: drawn for captions of unseen images",
            metric=judged,
            value=found[best],
            baseline="drawn without the words, same noise",
            baseline_value=found["guidance 0"],
            chance=chance,
            note=f"the judge, a CLIP of its own training, finds {found['real images']} % for the real images and "
            f"{found['captions exchanged']} % where captions are exchanged between the drawn",
            **facts,
        ),
        Result(
            task="Diffusion: guidance",
            metric=judged,
            value=found[best],
            baseline="guidance 1",
            baseline_value=found["guidance 1"],
            chance=chance,
            note=f"guidance {GUIDANCE:g}; mean cosine {figures[best]['cosine']:.3f} against {figures['guidance 1']['cosine']:.3f}",
            **facts,
        ),
        Result(
            task="Diffusion: drawn for captions of training",
            metric=judged,
            value=found["training captions"],
            baseline="captions of unseen images",
            baseline_value=found[best],
            chance=chance,
            **facts,
        ),
    ]


def judging(out: Path, side: int, scale: float = 1.0) -> Recipe:
    """How the judge is trained: the shipped CLIP at the painter's size, with the plain loss that figures so far were judged by."""
    words = {"model.tokenizers.image.size": side, "model.tokenizers.image.patch": side // 4}
    words |= {"model.standardize": "false", "model.label_smoothing": 0, "data.augment.image.0.size": side}
    given = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return read_recipe("clip_emoji", out, 0.6 * scale, 0, *given)


def caption(row: dict[str, Any]) -> str:
    """The caption that says most: the label with its keywords."""
    return row["text"][min(1, len(row["text"]) - 1)]


@torch.no_grad()
def agreement(judge: Any, pictures: Sequence[Any], asked: Sequence[str]) -> dict[str, float]:
    """How a judge places each image's own caption among all of them."""
    names = list(dict.fromkeys(asked))
    scores = judge.embed("image", list(pictures)).float() @ judge.embed("text", names).float().T
    own = scores.gather(1, torch.tensor([[names.index(a)] for a in asked])).squeeze(1)
    place = (scores > own[:, None]).sum(1)
    return {
        "R@1": float((place < 1).float().mean()),
        "R@10": float((place < 10).float().mean()),
        "median_rank": float(place.median()) + 1,
        "cosine": float(own.mean()),
    }


def draw(paint: Callable, judge: Any, rows: Sequence[dict[str, Any]], out: Path) -> None:
    """A sheet of things asked for, each by its plain name, with the judge's cosine; a tick where it is among its first 10."""
    folder = out.parent / "drawn"
    folder.mkdir(parents=True, exist_ok=True)
    labels = sorted({r["text"][0] for r in rows} | {*FAMILIAR, *HELD_OUT})
    words, lines = judge.embed("text", labels).float(), []
    for title, asked in (
        ("names of training images", FAMILIAR),
        ("names whose images were held out", HELD_OUT),
    ):
        pictures = paint(asked)
        scores = judge.embed("image", pictures).float() @ words.T
        cells = []
        for i, (name, picture) in enumerate(zip(asked, pictures, strict=True)):
            path = folder / f"{title.split()[-1]}_{i:02d}.png"
            picture.save(path)
            own = scores[i, labels.index(name)]
            first = int((scores[i] > own).sum()) < 10
            cells.append(Cell(str(path), float(own), name, first))
        lines.append(Row(title, cells))
    note = f"under each its cosine to the name, by a CLIP trained apart; a tick where the name is among its first 10 of {len(labels):,}"
    sheet = draw_sheet(lines, "Drawn from a name", note)
    sheet.quantize(128).save(out, optimize=True)


def half(call: Callable) -> Callable:
    """The same call in the precision that training has by ``auto``; the judge stays in float32."""
    dtype = autocast_type("auto", torch.device("cpu"))

    def called(*args: Any, **options: Any) -> Any:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return call(*args, **options)

    return called
