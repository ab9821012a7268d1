"""Spoken digits: learned from synthetic voices, asked of voices that were not heard and of a recorded human."""

from __future__ import annotations

from pathlib import Path

from worldtokens.data import samples
from worldtokens.data.sets.spoken_digits import WORDS
from worldtokens.evals.base import Result
from worldtokens.evals.baselines.logistic_regression import classes_of, figures, fit_best, pooled_mel
from worldtokens.evals.classification.base import line, picture, read_recipe, train_recipe

ABOUT = "spoken digits by many synthetic voices: unheard voices, and a recorded human"


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """Train on 80 voices; ask the test rows' voices, and the ten recorded prompts."""
    task, report = train_recipe(read_recipe("classify_spoken_digits", out / "ours", scale))
    sides = {side: samples.open("spoken_digits", split=side) for side in ("train", "validation", "test")}
    voice = samples.open("voice").where(lambda r: r["class"] == "digits" and r["text"] in WORDS)
    human = [{"audio": row["audio"], "class": str(WORDS.index(row["text"]))} for row in voice]
    asked = {"test": sides["test"], "human": human}
    mels = {
        name: (pooled_mel([row["audio"] for row in rows], 8000, 40, 1.2), classes_of(rows, task.names))
        for name, rows in {**sides, "human": human}.items()
    }
    linear = fit_best(*mels["train"], *mels["validation"], len(task.names))
    picture(task, sides["test"], out / "confusion.png", "spoken digits, unheard voices")
    picture(task, human, out / "confusion_human.png", "spoken digits, a recorded human")
    heard, unheard = (len(set(sides[side].column("voice"))) for side in ("train", "test"))
    told = {
        "test": ("unheard synthetic voices", f"spoken_digits, {len(sides['train']):,} train ({heard} voices) / {len(sides['test'])} test "
                 f"({unheard} others)", ""),
        "human": ("a recorded human", f"spoken_digits, {len(sides['train']):,} train / voice, {len(human)} recorded prompts",
                  f"trained on synthetic voices alone; one prompt is {100 / len(human):.0f} %"),
    }  # fmt: skip
    return [
        line(
            task, report, task=f"Classifier: spoken digits, {told[name][0]}", data=told[name][1], metric="top-1 %",
            value=task.evaluate(rows)["top1"], baseline="logistic regression on the mean log-mel of each third",
            baseline_value=figures(linear(mels[name][0]), mels[name][1])["top1"], chance=0.1, note=told[name][2],
        )
        for name, rows in asked.items()
    ]  # fmt: skip
