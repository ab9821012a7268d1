"""Writes docs/results.md: a section per head, a paragraph of facts and narrow tables per evaluation."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

from worldtokens.evals.base import Result, load

WIDTH = 118  # characters of a line of text
# heading -> first words of the evaluations' names
HEADINGS = {
    "Classification": ("classify",),
    "Contrastive": ("clip",),
    "Language modelling": ("lm",),
    "Captioning and speech recognition": ("caption", "transcribe"),
    "Translation": ("translate",),
    "Multimodal LM": ("vqa", "vlm"),
    "Image generation": ("diffusion", "image"),
}
# evaluation -> figures of it in `docs`, each with its caption
FIGURES = {
    "diffusion_emoji": {"diffusion.png": "Samples for captions of held-out images, each above its caption."},
    "image_lm_emoji": {"image_lm.png": "Samples for captions of held-out images, each above its caption."},
    "translate_verses": {
        "translation.png": "Cross-attention of two held-out verses: source tokens across, target tokens down.",
        "translation_by_length.png": "BLEU by length of the source.",
    },
}
# heading -> figures that belong to no single evaluation
HEADING_FIGURES = {
    "Contrastive": {
        "demo.png": "Search in held-out images by the model of `worldtokens demo`; green: the correct image."
    }
}
_INTRODUCTION = (
    "Every evaluation trains a model on real data and compares it with a baseline that is trained or computed in the same "
    "run; all figures are of held-out rows. `worldtokens results` writes this page from `docs/results/*.json`; the command "
    "of an evaluation measures its figures again.",
    "Bold: better than the baseline. Minutes of training are processor time. Chance: the figure of a random guess, where it "
    "is defined. The overview of a section has the first figure of each task, and the number of its figures that are ahead "
    "of their baseline.",
)


def stored(docs: Path) -> dict[str, tuple[list[Result], dict[str, str]]]:
    """Evaluation -> (results, facts of the run), from the JSON files in `docs/results`."""
    return {p.stem: load(p) for p in sorted((docs / "results").glob("*.json"))}


def write_tables(docs: Path) -> Path:
    """Write `results.md` from the stored results; returns its path."""
    runs = stored(docs)
    sections = {heading: [n for n in runs if n.split("_")[0] in words] for heading, words in HEADINGS.items()}
    placed = set(itertools.chain(*sections.values()))
    sections["Other"] = [n for n in runs if n not in placed]
    lines = ["# Results", ""]
    for text in _INTRODUCTION:
        lines += [*_wrapped(text), ""]
    for heading, names in sections.items():
        lines += [f"## {heading}", "", *_overview({n: runs[n][0] for n in names})] if names else []
        lines += _figures(docs, HEADING_FIGURES.get(heading, {}) if names else {})
        for name in names:
            lines += [*_evaluation(name, *runs[name]), *_figures(docs, FIGURES.get(name, {}))]
    docs.mkdir(parents=True, exist_ok=True)
    path = docs / "results.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _figures(docs: Path, figures: dict[str, str]) -> list[str]:
    found = {file: caption for file, caption in figures.items() if (docs / file).is_file()}
    return [line for file, caption in found.items() for line in (f"![]({file})", "", f"*{caption}*", "")]


def _overview(runs: dict[str, list[Result]]) -> list[str]:
    """One line per task of each evaluation: its first figure, and how many of its figures are better than the baseline."""
    lines = ["| task | metric | ours | baseline | ahead |", "|---|---|---:|---:|---:|"]
    for name, results in runs.items():
        for _, group in itertools.groupby(results, lambda r: (r.task, r.data)):
            rows = list(group)
            r = rows[0]
            head, _, task = r.task.rpartition(": ")
            variant = head.partition(", ")[2]  # "Translator, Transformer: English to Spanish"
            label = f"{task}, {variant}" if variant else task
            ours = f"**{number(r.value)}**" if r.ahead else number(r.value)
            ahead = f"{sum(row.ahead for row in rows)} of {len(rows)}"
            lines.append(
                f"| [{label}](#{name}) | {r.metric} | {ours} | {number(r.baseline_value)} | {ahead} |"
            )
    return [*lines, ""]


def _evaluation(name: str, results: Sequence[Result], facts: dict[str, str]) -> list[str]:
    """The lines of one evaluation: what it is, how it was run, and a table for each model and data set."""
    about = facts.get("about", name)
    run = f"`{facts['command']}` on {facts['date']}: {facts['minutes']} min on {facts['machine']}"
    if float(facts["minutes"]) < max((r.minutes for r in results), default=0):
        run += ", with models trained in an earlier run"
    lines = [f"### {name}", "", *_wrapped(f"{about[:1].upper()}{about[1:]}."), "", *_wrapped(f"{run}."), ""]
    before = None
    for _, group in itertools.groupby(results, lambda r: (r.task, r.data, _model(r))):
        rows = list(group)
        lines += _table(rows, same_model=_model(rows[0]) == before)
        before = _model(rows[0])
    return lines


def _model(r: Result) -> str:
    return f"{r.size}; {r.parameters / 1e6:.2f} M parameters; {r.steps:,} steps, {r.minutes:.1f} min"


def _table(group: Sequence[Result], same_model: bool) -> list[str]:
    """Facts of one model on one data set, its figures, and their notes."""
    first = group[0]
    baselines = list(dict.fromkeys(r.baseline for r in group))
    text = f"**{first.task}.** Data: {first.data}. "
    text += "Same model." if same_model else f"Model: {_model(first)}."
    if len(baselines) == 1:
        text += f" Baseline: {first.baseline}."
    lines = [*_wrapped(text), "", "| metric | ours | baseline | chance |", "|---|---:|---|---:|"]
    for r in group:
        sense = "" if r.better == "higher" else " (lower is better)"
        ours = f"**{number(r.value)}**" if r.ahead else number(r.value)
        baseline = number(r.baseline_value) + ("" if len(baselines) == 1 else f", {r.baseline}")
        chance = "" if r.chance is None else number(r.chance)
        lines.append(f"| {r.label}{sense} | {ours} | {baseline} | {chance} |")
    return [*lines, "", *_notes(group)]


def _notes(group: Sequence[Result]) -> list[str]:
    """Notes of the figures, and the figures that are not better than their baseline."""
    notes: dict[str, list[Result]] = {}
    for r in group:
        if r.note:
            notes.setdefault(r.note, []).append(r)
    several = len({r.label for r in group}) > 1
    texts = []
    for note, rows in notes.items():
        labels = " and ".join(dict.fromkeys(r.label for r in rows))
        texts.append(f"{labels}: {note}" if several and len(rows) < len(group) else note)
    for verdict, tied in (("Worse than the baseline", False), ("Equal to the baseline", True)):
        found = [r for r in group if not r.ahead and (r.value == r.baseline_value) == tied]
        if found:
            figures = "; ".join(
                f"{r.label}, {number(r.value)} against {number(r.baseline_value)}" for r in found
            )
            texts.append(f"**{verdict}**: {figures}")
    lines = [line for text in texts for line in _wrapped(f"- {text}", indent="  ")]
    return [*lines, ""] if lines else []


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def number(value: float) -> str:
    """Three to four digits, and no more decimals than the figure has: 98.4, 0.123, 1.87, 3.4."""
    if isinstance(value, int):
        return str(value)
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
    return min(text, repr(value), key=len)
