"""A frozen published language model with a trained image encoder: questions about held-out images, and text-only questions."""

from __future__ import annotations

from pathlib import Path

import torch

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.multimodal.vqa_emoji import shuffle_images, without_images
from worldtokens.evals.training import parameter_count, percent, read_recipe, train_recipe
from worldtokens.pretrained.published import language_model

ABOUT = "frozen SmolLM2-135M answers questions about held-out emoji images; text-only answers are unchanged"
TEXT_ONLY = (
    "What is the capital of France?",
    "Name a fruit that is yellow.",
    "How many legs has a spider?",
    "Write one line about the sea.",
)


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """One training of the encoder and the projector; text-only answers are compared with the published model's."""
    recipe = read_recipe("vlm_smollm2", out / "ours", scale)
    rows, _ = recipe.rows()
    model, report = train_recipe(recipe, rows)
    published = language_model("smollm2")
    unchanged = [published.chat(q, 16) == model.chat(q, 16) for q in TEXT_ONLY]
    ids = published.front.collate([published.front.read(q) for q in TEXT_ONLY])
    with torch.no_grad():
        difference = (published({"text": ids}) - model.language_model({"text": ids})).abs().max()
    # every 8th test question, for the sake of minutes
    test = samples.open("emoji_questions", split="test")
    test = [test[i] for i in range(0, len(test), 8 if scale == 1 else 120)]
    with torch.autocast("cpu", torch.bfloat16):
        ours, shuffled = (model.evaluate(rows, 16, max_new_tokens=8) for rows in (test, shuffle_images(test)))
        blind = model.evaluate(without_images(test), 16, max_new_tokens=0)
    facts = {
        "task": "MultimodalLM: frozen SmolLM2-135M, questions about images",
        "data": f"emoji_questions, {report.steps * recipe.train.batch_size:,} of {len(rows):,} train / {len(test)} test",
        "size": "SmolLM2-135M as published; image encoder of dim 160, depth 3; Resampler, 4 latents per image",
        "parameters": parameter_count(model),
        "steps": report.steps,
        "minutes": round(report.seconds / 60, 1),
        "baseline": "the same model with images shuffled within each kind of question",
    }
    text_only = (
        f"{sum(unchanged)} of {len(unchanged)} text-only answers equal the published model's, logits differ by at most "
        f"{float(difference):.1g}"
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [
        Result(
            metric="loss, nats per answer token",
            value=round(ours["loss"], 3),
            baseline_value=round(shuffled["loss"], 3),
            better="lower",
            note=f"without images {blind['loss']:.3f}; {trained:,} parameters are trained; {text_only}",
            **facts,
        ),
        Result(
            metric="exact match %",
            value=percent(ours["exact"]),
            baseline_value=percent(shuffled["exact"]),
            **facts,
        ),
    ]
