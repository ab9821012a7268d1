"""Spoken digits: trained on synthetic voices, tested on unseen synthetic voices and on a recorded human."""

from __future__ import annotations

from pathlib import Path

from worldtokens.data import samples
from worldtokens.data.sets.spoken_digits import WORDS
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import accuracies, classes_of, fit_best, pooled_mel
from worldtokens.evals.classification.base import classifier_result, save_confusion
from worldtokens.evals.training import read_recipe, train_recipe

ABOUT = "spoken digits, trained on synthetic voices: unseen synthetic voices, and a recorded human"


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Train on 81 voices; evaluate on the voices of the test rows and on ten recorded prompts."""
    task, report = train_recipe(read_recipe("classify_spoken_digits", out / "ours", scale))
    sides = {side: samples.open("spoken_digits", split=side) for side in ("train", "validation", "test")}
    voice = samples.open("voice").filter(lambda r: r["class"] == "digits" and r["text"] in WORDS)
    human = [{"audio": row["audio"], "class": str(WORDS.index(row["text"]))} for row in voice]
    tests = {"test": sides["test"], "human": human}
    mels = {
        name: (pooled_mel([row["audio"] for row in rows], 8000, 40, 1.2), classes_of(rows, task.names))
        for name, rows in {**sides, "human": human}.items()
    }
    linear = fit_best(*mels["train"], *mels["validation"], len(task.names))
    save_confusion(task, sides["test"], out / "confusion.png", "spoken digits, unseen voices")
    save_confusion(task, human, out / "confusion_human.png", "spoken digits, a recorded human")
    seen, unseen = (len(set(sides[side].column("voice"))) for side in ("train", "test"))
    facts = {
        "test": ("unseen synthetic voices", f"spoken_digits, {len(sides['train']):,} train ({seen} voices) / {len(sides['test'])} test "
                 f"({unseen} other voices)", ""),
        "human": ("a recorded human", f"spoken_digits, {len(sides['train']):,} train / voice, {len(human)} recorded prompts",
                  f"trained on synthetic voices only; one prompt is {100 / len(human):.0f} %"),
    }  # fmt: skip
    return [
        classifier_result(
            task, report, task=f"Classifier: spoken digits, {facts[name][0]}", data=facts[name][1], metric="top-1 %",
            value=task.evaluate(rows)["top1"], baseline="logistic regression on the mean log-mel of each third",
            baseline_value=accuracies(linear(mels[name][0]), mels[name][1])["top1"], chance=0.1, note=facts[name][2],
        )
        for name, rows in tests.items()
    ]  # fmt: skip
