"""A published language model that learns to see with its weights as they are: held-out images, and plain questions as before."""

from __future__ import annotations

from pathlib import Path

import torch

from worldtokens.data import samples
from worldtokens.evals.base import Result
from worldtokens.evals.classification.base import percent, read_recipe, train_recipe
from worldtokens.evals.multimodal.vqa_emoji import exchanged, unshown
from worldtokens.pretrained.published import language_model

ABOUT = "SmolLM2-135M, frozen, answers questions about held-out emoji images; plain questions as before"
PLAIN = (
    "What is the capital of France?",
    "Name a fruit that is yellow.",
    "How many legs has a spider?",
    "Write one line about the sea.",
)


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """One training of encoder and bridge; the language model beside itself from before."""
    recipe = read_recipe("vlm_smollm2", out / "seeing", scale)
    rows, _ = recipe.rows()
    model, report = train_recipe(recipe, rows)
    before = language_model("smollm2")
    alike = [before.chat(q, 16) == model.chat(q, 16) for q in PLAIN]
    ids = before.front.collate([before.front.read(q) for q in PLAIN])
    with torch.no_grad():
        moved = (before({"text": ids}) - model.language_model({"text": ids})).abs().max()
    # as many of the test's questions as minutes allow, spread over all of it
    test = samples.open("emoji_questions", split="test")
    test = [test[i] for i in range(0, len(test), 8 if scale == 1 else 120)]
    with torch.autocast("cpu", torch.bfloat16):
        seen, other = (model.evaluate(some, 16, max_new_tokens=8) for some in (test, exchanged(test)))
        absent = model.evaluate(unshown(test), 16, max_new_tokens=0)
    facts = {
        "task": "MultimodalLM: SmolLM2-135M frozen, questions about images",
        "data": f"emoji_questions, {report.steps * recipe.train.batch_size:,} of {len(rows):,} train / {len(test)} test",
        "size": "SmolLM2-135M as published; encoder 160 wide, 3 deep; Resampler, 4 latents an image",
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": report.steps,
        "minutes": round(report.seconds / 60, 1),
        "baseline": "the same model, images exchanged between questions of a kind",
    }
    plain = f"plain questions answered as before: {sum(alike)} of {len(alike)}, logits differ by {float(moved):.1g} at most"
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [
        Result(
            metric="loss, nats a token of the answer",
            value=round(seen["loss"], 3),
            baseline_value=round(other["loss"], 3),
            better="lower",
            note=f"without images {absent['loss']:.3f}; {learned:,} of the parameters are trained; {plain}",
            **facts,
        ),
        Result(
            metric="answers right word for word, %",
            value=percent(seen["exact"]),
            baseline_value=percent(other["exact"]),
            **facts,
        ),
    ]
