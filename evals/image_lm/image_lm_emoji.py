"""Emoji drawn code by code from a caption, judged by a CLIP that was trained apart, on captions that training never saw."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.classification.base import percent, read_recipe, trained
from worldtokens.evals.diffusion.diffusion_emoji import agreement, caption, draw, half, judging

ABOUT = "images drawn code by code by a language model, judged by a CLIP trained apart"
GUIDANCE = 3.0


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """Train the codes, the model that draws by them and the judge on the same training images; draw for the test captions.

    Each training goes on where an earlier start was stopped. Writes the sheet, `sheet.png`, and all figures,
    `figures.json`, into `out`.
    """
    codes, recipe = recipes(out, scale)
    rows = {s: samples.open("emoji_plain", split=s) for s in ("train", "validation", "test")}
    autoencoder, codes_minutes = trained(codes)
    model, minutes = trained(recipe)
    side = model.image.size[0]
    # the very judge of the check of diffusion: whichever comes first trains it
    judge, _ = trained(judging(out.parent / "diffusion" / "judge", side, scale))
    train_rows, test = rows["train"], [dict(r) | {"text": caption(r)} for r in rows["test"]]
    if scale < 1:
        test = test[:: max(1, round(1 / max(scale, 0.05)))]
    asked, real = [r["text"] for r in test], [r["image"] for r in test]
    kept, bits = autoencoder.evaluate(test), half(model.evaluate)(test)
    figures = {"codes": kept, "bits": bits, "minutes": {"codes": codes_minutes, "model": minutes}}
    figures["real images"] = agreement(judge, real, asked)
    batch = model.image.collate([model.image.read(p) for p in real])
    figures["real images through codes"] = agreement(
        judge, shown(model.image.decode(model.image.encode(batch), dtype=batch["pixels"].dtype)), asked
    )
    known = [caption(r) for r in train_rows[:: len(train_rows) // len(test)][: len(test)]]
    for name, words, guidance in (
        ("guidance 0", asked, 0.0),
        ("guidance 1", asked, 1.0),
        (best := f"guidance {GUIDANCE:g}", asked, GUIDANCE),
        ("training captions", known, GUIDANCE),
    ):
        pictures = shown(half(model.sample)(words * 2, guidance=guidance))  # two of each
        figures[name] = agreement(judge, pictures, words * 2)
        if name == best:
            figures["captions exchanged"] = agreement(judge, pictures, (words[1:] + words[:1]) * 2)
    paint = half(model.sample)
    labelled = [r for part in rows.values() for r in part]
    draw(lambda names: shown(paint(names, guidance=GUIDANCE)), judge, labelled, out / "sheet.png")
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    return results(figures, autoencoder, model, len(train_rows), len(test), best, (codes, recipe))


def recipes(out: Path, scale: float = 1.0) -> tuple[Any, Any]:
    """Of the codes, and of the model that draws by them."""
    folder = "--model.image.folder", str(out / "codes" / "last")
    return (
        read_recipe("autoencoder_emoji", out / "codes", scale),
        read_recipe("image_lm_emoji", out / "painter", scale, 0, *folder),
    )


def shown(pictures: Any) -> list[Image.Image]:
    """(B, 3, H, W) uint8 -> images."""
    return [Image.fromarray(p) for p in pictures.permute(0, 2, 3, 1).numpy()]


def results(
    figures: dict[str, Any],
    autoencoder: Any,
    model: Any,
    train: int,
    test: int,
    best: str,
    used: Sequence[Any],
) -> list[Result]:
    """The lines of the table."""
    front, cfg = model.image, model.trunk.cfg
    side, kept, bits = front.size[0], figures["codes"], figures["bits"]
    found = {k: percent(v["R@10"]) for k, v in figures.items() if isinstance(v, dict) and "R@10" in v}
    pair = {
        "data": f"emoji without skin tones, at {side} x {side}, {train:,} train / {test} test, split by what is shown",
        "size": f"{cfg.dim} wide, {cfg.depth} deep, {front.count} codes of {front.codebook_size}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": used[1].train.steps,
        "minutes": round(figures["minutes"]["model"], 1),
    }
    judged = {
        "metric": f"right caption among the judge's first 10 of {test}, %",
        "chance": percent(10 / test),
        **pair,
    }
    return [
        Result(
            task="Autoencoder: emoji as codes",
            metric="squared error x 1000",
            value=round(1000 * kept["mse"], 2),
            baseline="the mean colour of each patch, unrounded",
            baseline_value=round(1000 * kept["mse_colour"], 2),
            better="lower",
            data=f"emoji at {side} x {side}, {len(used[0].rows()[0]):,} train / {test} test without skin tones",
            size=f"{front.count} codes of {front.codebook_size}, an image in {kept['bits'] / 8:.0f} bytes",
            parameters=sum(p.numel() for p in autoencoder.front.codec.parameters()),
            steps=used[0].train.steps,
            minutes=round(figures["minutes"]["codes"], 1),
            note=f"values in [0, 1]; {percent(kept['used'])} % of the codes in use, {kept['psnr']:.1f} dB",
        ),
        Result(
            task="ImageLM: codes of unseen images from their captions",
            metric="bits per code",
            value=round(bits["bits_per_code"], 3),
            baseline="the same model with the next row's caption",
            baseline_value=round(bits["bits_shuffled"], 3),
            better="lower",
            note=f"without a caption {bits['bits_null']:.3f}",
            **pair,
        ),
        Result(
            task="ImageLM: drawn for captions of unseen images",
            value=found[best],
            baseline="drawn without the words, same seeds",
            baseline_value=found["guidance 0"],
            note=f"the judge, a CLIP of its own training, finds {found['real images']} % for the real images, "
            f"{found['real images through codes']} % for these rebuilt from their codes, and {found['captions exchanged']} % "
            "where captions are exchanged between the drawn",
            **judged,
        ),
        Result(
            task="ImageLM: guidance",
            value=found[best],
            baseline="guidance 1",
            baseline_value=found["guidance 1"],
            note=f"{best}; mean cosine {figures[best]['cosine']:.3f} against {figures['guidance 1']['cosine']:.3f}",
            **judged,
        ),
        Result(
            task="ImageLM: drawn for captions of training",
            value=found["training captions"],
            baseline="captions of unseen images",
            baseline_value=found[best],
            **judged,
        ),
    ]
