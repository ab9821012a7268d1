"""Images generated from captions of held-out images, scored by a CLIP that was trained separately (the judge model)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.training import parameter_count, percent, read_recipe, trained
from worldtokens.figures.sheet import Cell, Row, draw_sheet
from worldtokens.training.recipe import Recipe
from worldtokens.training.settings import autocast_type

ABOUT = "images generated from captions, scored by a judge model (a CLIP trained separately)"
STEPS, GUIDANCE = 12, 3.0  # steps of Heun's method
TRAINING_NAMES = ["green heart", "blue heart", "broken heart", "yellow square", "red circle", "three o’clock"]
TRAINING_NAMES += [
    "grinning face",
    "thinking face",
    "smiling face with heart-eyes",
    "rainbow flag",
    "flag: Austria",
]
TRAINING_NAMES += ["flag: France", "waving hand", "cat face", "soccer ball", "tangerine"]
HELD_OUT_NAMES = ["red heart", "black heart", "red square", "orange square", "purple circle", "black circle"]
HELD_OUT_NAMES += [
    "eight o’clock",
    "kissing face",
    "grinning face with sweat",
    "white flag",
    "flag: Italy",
    "red apple",
]
HELD_OUT_NAMES += ["thumbs down", "monkey face", "red triangle pointed up", "crescent moon"]


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Train the generator and the judge on the same training images; generate for the test captions.

    Stopped trainings are resumed. Writes a sheet of samples, `sheet.png`, and all figures, `figures.json`, into `out`.
    """
    recipe = read_recipe("diffusion_emoji", out / "generator", scale)
    rows = {s: samples.open("emoji_plain", split=s) for s in ("train", "validation", "test")}
    model, minutes = trained(recipe)
    side = model.front.size[0]
    judge, _ = trained(judge_recipe(out / "judge", side, scale))
    if scale < 1:
        rows = {k: v[:: max(1, round(1 / max(scale, 0.05)))] for k, v in rows.items()}
    test = rows["test"]
    captions = [caption(r) for r in test]
    losses = in_training_precision(model.evaluate)(test)
    figures = {"losses": losses, "judge": judge.evaluate(test), "minutes": minutes}
    figures["real images"] = caption_ranks(judge, [r["image"] for r in test], captions)
    training = [caption(r) for r in rows["train"][:: len(rows["train"]) // len(test)][: len(test)]]
    for name, prompts, guidance in (
        ("guidance 0", captions, 0.0),
        ("guidance 1", captions, 1.0),
        (best := f"guidance {GUIDANCE:g}", captions, GUIDANCE),
        ("training captions", training, GUIDANCE),
    ):
        images = in_training_precision(model.sample)(
            prompts * 2, steps=STEPS, guidance=guidance
        )  # two of each
        figures[name] = caption_ranks(judge, images, prompts * 2)
        if name == best:
            figures["shuffled captions"] = caption_ranks(judge, images, (prompts[1:] + prompts[:1]) * 2)
    sample = functools.partial(in_training_precision(model.sample), steps=25, guidance=GUIDANCE)
    draw_samples(sample, judge, [r for part in rows.values() for r in part], out / "sheet.png")
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    cfg = model.trunk.cfg
    facts = {
        "data": f"emoji without skin tones, {side} x {side}, {len(rows['train']):,} train / {len(test)} test, split by depicted object",
        "task": "Diffusion: emoji from captions",
        "size": f"Transformer of dim {cfg.dim}, depth {cfg.depth}, patch {model.front.patch[0]}",
        "parameters": parameter_count(model),
        "steps": recipe.train.steps,
        "minutes": round(minutes, 1),
    }
    recall = {k: percent(v["R@10"]) for k, v in figures.items() if isinstance(v, dict) and "R@10" in v}
    chance = percent(10 / len(test))
    metric = "judge R@10 %"
    return [
        Result(
            metric="velocity loss",
            value=round(losses["loss"], 4),
            baseline="null condition",
            baseline_value=round(losses["loss_null"], 4),
            better="lower",
            note=f"with shuffled captions {losses['loss_shuffled']:.4f}",
            **facts,
        ),
        Result(
            metric=metric,
            subset="captions of held-out images",
            value=recall[best],
            baseline="null condition, same noise",
            baseline_value=recall["guidance 0"],
            chance=chance,
            note=f"R@10 of the own caption among {len(test)}, by a CLIP trained separately; {recall['real images']} % for the real "
            f"images, {recall['shuffled captions']} % for samples with shuffled captions",
            **facts,
        ),
        Result(
            metric=metric,
            subset=f"guidance {GUIDANCE:g}",
            value=recall[best],
            baseline="guidance 1",
            baseline_value=recall["guidance 1"],
            chance=chance,
            note=f"mean cosine to the caption {figures[best]['cosine']:.3f}, with guidance 1 {figures['guidance 1']['cosine']:.3f}",
            **facts,
        ),
        Result(
            metric=metric,
            subset="training captions",
            value=recall["training captions"],
            baseline="captions of held-out images",
            baseline_value=recall[best],
            chance=chance,
            **facts,
        ),
    ]


def judge_recipe(out: Path, side: int, scale: float = 1.0) -> Recipe:
    """Recipe of the judge: the shipped CLIP at the generator's image size, without standardisation and label smoothing."""
    options = {"model.tokenizers.image.size": side, "model.tokenizers.image.patch": side // 4}
    options |= {"model.standardize": "false", "model.label_smoothing": 0, "data.augment.image.0.size": side}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return read_recipe("clip_emoji", out, 0.6 * scale, 0, *arguments)


def caption(row: dict[str, Any]) -> str:
    """The most detailed caption of a row: the label with its keywords."""
    return row["text"][min(1, len(row["text"]) - 1)]


@torch.no_grad()
def caption_ranks(judge: Any, images: Sequence[Any], captions: Sequence[str]) -> dict[str, float]:
    """Rank of each image's own caption among all captions, by the judge's cosines: R@1, R@10, median rank, mean cosine."""
    names = list(dict.fromkeys(captions))
    scores = judge.embed("image", list(images)).float() @ judge.embed("text", names).float().T
    own = scores.gather(1, torch.tensor([[names.index(c)] for c in captions])).squeeze(1)
    rank = (scores > own[:, None]).sum(1)
    return {
        "R@1": float((rank < 1).float().mean()),
        "R@10": float((rank < 10).float().mean()),
        "median_rank": float(rank.median()) + 1,
        "cosine": float(own.mean()),
    }


def draw_samples(sample: Callable, judge: Any, rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw a sheet of samples, one per name, with the judge's cosine; a tick where the name is in the judge's top 10."""
    folder = out.parent / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    labels = sorted({r["text"][0] for r in rows} | {*TRAINING_NAMES, *HELD_OUT_NAMES})
    texts, lines = judge.embed("text", labels).float(), []
    for title, names in (
        ("names of training images", TRAINING_NAMES),
        ("names of held-out images", HELD_OUT_NAMES),
    ):
        images = sample(names)
        scores = judge.embed("image", images).float() @ texts.T
        cells = []
        for i, (name, image) in enumerate(zip(names, images, strict=True)):
            path = folder / f"{title.split()[2]}_{i:02d}.png"
            image.save(path)
            own = scores[i, labels.index(name)]
            in_top_10 = int((scores[i] > own).sum()) < 10
            cells.append(Cell(str(path), float(own), name, in_top_10))
        lines.append(Row(title, cells))
    note = f"cosine of image and name by the judge model; tick: the name is in its top 10 of {len(labels):,} names"
    sheet = draw_sheet(lines, "Samples for a name", note)
    sheet.quantize(128).save(out, optimize=True)


def in_training_precision(call: Callable) -> Callable:
    """The same call under autocast with training's ``auto`` precision; the judge stays in float32."""
    dtype = autocast_type("auto", torch.device("cpu"))

    def called(*args: Any, **options: Any) -> Any:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return call(*args, **options)

    return called
