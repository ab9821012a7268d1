"""Emoji generated as discrete codes from captions of held-out images, scored by a CLIP trained separately (the judge)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.diffusion.diffusion_emoji import (
    caption,
    caption_ranks,
    draw_samples,
    in_training_precision,
    judge_recipe,
)
from worldtokens.evals.training import parameter_count, percent, read_recipe, trained

ABOUT = "images generated as discrete codes by a language model, scored by a judge model (a CLIP trained separately)"
GUIDANCE = 3.0


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Train the autoencoder, the generator and the judge on the same training images; generate for the test captions.

    Stopped trainings are resumed. Writes a sheet of samples, `sheet.png`, and all figures, `figures.json`, into `out`.
    """
    codes, recipe = recipes(out, scale)
    rows = {s: samples.open("emoji_plain", split=s) for s in ("train", "validation", "test")}
    autoencoder, codes_minutes = trained(codes)
    model, minutes = trained(recipe)
    side = model.image.size[0]
    # the judge is shared with the evaluation of diffusion: whichever runs first trains it
    judge, _ = trained(judge_recipe(out.parent / "diffusion_emoji" / "judge", side, scale))
    train_rows, test = rows["train"], [dict(r) | {"text": caption(r)} for r in rows["test"]]
    if scale < 1:
        test = test[:: max(1, round(1 / max(scale, 0.05)))]
    captions, real = [r["text"] for r in test], [r["image"] for r in test]
    codec, bits = autoencoder.evaluate(test), in_training_precision(model.evaluate)(test)
    figures = {"codes": codec, "bits": bits, "minutes": {"codes": codes_minutes, "model": minutes}}
    figures["real images"] = caption_ranks(judge, real, captions)
    batch = model.image.collate([model.image.read(p) for p in real])
    figures["real images through codes"] = caption_ranks(
        judge,
        to_images(model.image.decode(model.image.encode(batch), dtype=batch["pixels"].dtype)),
        captions,
    )
    training = [caption(r) for r in train_rows[:: len(train_rows) // len(test)][: len(test)]]
    sample = in_training_precision(model.sample)
    for name, prompts, guidance in (
        ("guidance 0", captions, 0.0),
        ("guidance 1", captions, 1.0),
        (best := f"guidance {GUIDANCE:g}", captions, GUIDANCE),
        ("training captions", training, GUIDANCE),
    ):
        images = to_images(sample(prompts * 2, guidance=guidance))  # two of each
        figures[name] = caption_ranks(judge, images, prompts * 2)
        if name == best:
            figures["shuffled captions"] = caption_ranks(judge, images, (prompts[1:] + prompts[:1]) * 2)
    labelled = [r for part in rows.values() for r in part]
    draw_samples(
        lambda names: to_images(sample(names, guidance=GUIDANCE)), judge, labelled, out / "sheet.png"
    )
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    return results(figures, autoencoder, model, len(train_rows), len(test), best, (codes, recipe))


def recipes(out: Path, scale: float = 1.0) -> tuple[Any, Any]:
    """Recipes of the autoencoder, and of the model that generates its codes."""
    folder = "--model.image.folder", str(out / "codes" / "last")
    return (
        read_recipe("autoencoder_emoji", out / "codes", scale),
        read_recipe("image_lm_emoji", out / "generator", scale, 0, *folder),
    )


def to_images(pixels: Any) -> list[Image.Image]:
    """(B, 3, H, W) uint8 -> images."""
    return [Image.fromarray(p) for p in pixels.permute(0, 2, 3, 1).numpy()]


def results(
    figures: dict[str, Any],
    autoencoder: Any,
    model: Any,
    train: int,
    test: int,
    best: str,
    recipes: Sequence[Any],
) -> list[Result]:
    """Results from the figures; `recipes` are those of the autoencoder and of the generator."""
    front, cfg = model.image, model.trunk.cfg
    side, codec, bits = front.size[0], figures["codes"], figures["bits"]
    own = bits["bits_per_code"]
    recall = {k: percent(v["R@10"]) for k, v in figures.items() if isinstance(v, dict) and "R@10" in v}
    pair = {
        "data": f"emoji without skin tones, {side} x {side}, {train:,} train / {test} test, split by depicted object",
        "task": "ImageLM: emoji from captions",
        "size": f"Transformer of dim {cfg.dim}, depth {cfg.depth}; {front.count} codes, codebook of {front.codebook_size}",
        "parameters": parameter_count(model),
        "steps": recipes[1].train.steps,
        "minutes": round(figures["minutes"]["model"], 1),
    }
    judged = {
        "metric": "judge R@10 %",
        "chance": percent(10 / test),
        **pair,
    }
    return [
        Result(
            task="Autoencoder: emoji as discrete codes",
            metric="mean squared error x 1000",
            value=round(1000 * codec["mse"], 2),
            baseline="mean colour of each patch, not quantised",
            baseline_value=round(1000 * codec["mse_colour"], 2),
            better="lower",
            data=f"emoji, {side} x {side}, {len(recipes[0].rows()[0]):,} train / {test} test without skin tones",
            size=f"{front.count} codes, codebook of {front.codebook_size}, {codec['bits'] / 8:.0f} bytes per image",
            parameters=parameter_count(autoencoder.front.codec),
            steps=recipes[0].train.steps,
            minutes=round(figures["minutes"]["codes"], 1),
            note=f"pixel values in [0, 1]; PSNR {codec['psnr']:.1f} dB; {percent(codec['used'])} % of the codebook in use",
        ),
        Result(
            metric="bits per code",
            subset="held-out images",
            value=round(own, 3),
            baseline="shuffled captions",
            baseline_value=round(bits["bits_shuffled"], 3),
            better="lower",
            note=f"null condition {bits['bits_null']:.3f}"
            + (", lower than with captions" if bits["bits_null"] < own else ""),
            **pair,
        ),
        Result(
            subset="captions of held-out images",
            value=recall[best],
            baseline="null condition, same seeds",
            baseline_value=recall["guidance 0"],
            note=f"R@10 of the own caption among {test}, by a CLIP trained separately; {recall['real images']} % for the real images, "
            f"{recall['real images through codes']} % for their reconstructions from codes, {recall['shuffled captions']} % for samples "
            "with shuffled captions",
            **judged,
        ),
        Result(
            subset=best,
            value=recall[best],
            baseline="guidance 1",
            baseline_value=recall["guidance 1"],
            note=f"mean cosine to the caption {figures[best]['cosine']:.3f}, with guidance 1 {figures['guidance 1']['cosine']:.3f}",
            **judged,
        ),
        Result(
            subset="training captions",
            value=recall["training captions"],
            baseline="captions of held-out images",
            baseline_value=recall[best],
            **judged,
        ),
    ]
