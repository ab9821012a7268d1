"""English to Spanish on whole books unseen: a Transformer, additive attention and a fixed vector, beside a dictionary."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from worldtokens.evals.base import Result
from worldtokens.evals.classification.base import read_recipe, trained
from worldtokens.evals.seq2seq.caption import exchange, held_rows, loss_with, size
from worldtokens.figures.attention import alignment_figure
from worldtokens.tasks.metrics.text import text_scores

ABOUT = "translation: three kinds of trunks on Bible verses, beside a learned dictionary; BLEU by length"
KINDS = {
    "translate_verses": "Transformer",
    "translate_verses_bahdanau": "GRU with additive attention",
    "translate_verses_seq2seq": "GRU through a fixed vector",
}
BINS = (0, 10, 15, 20, 25, 30, 40, 80)  # words of the source


def check(out: Path, scale: float = 1.0) -> list[Result]:
    """Three trainings on the same rows, each gone on with where it was stopped; figures of BLEU by length and of alignments in `out`."""
    test = held_rows("verse_books")
    sources, right = [r["text"] for r in test], [[r["target"]] for r in test]
    answers, lines, results = {}, {}, []
    for name, kind in KINDS.items():
        recipe = read_recipe(name, out / name, scale)
        rows = recipe.rows()[0]
        model, minutes = trained(recipe)
        answers[kind] = model.translate(sources)
        lines[kind] = {
            "data": f"verses, {len(rows):,} train / {len(test)} test, seven books held out whole",
            "size": size(model),
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": recipe.train.steps,
            "minutes": round(minutes, 1),
            "loss": loss_with(model, test),
            "exchanged": loss_with(model, exchange(test, "text")),
        }
        if kind != KINDS["translate_verses_seq2seq"]:
            short = sorted(sources, key=lambda t: abs(len(t.split()) - 11))[:2]
            alignment_figure(model, short, out / f"alignment_{name}.png")
    dictionary = Dictionary([(rows[i]["text"], rows[i]["target"]) for i in range(len(rows))])
    by_word = "word by word, IBM model 1"
    answers[by_word] = [dictionary.translate(t) for t in sources]
    answers["the source, copied"] = sources
    scores = {kind: text_scores(said, right) for kind, said in answers.items()}
    curves = {kind: by_length(sources, said, right) for kind, said in answers.items() if kind in lines}
    length_figure(curves, out / "bleu_by_length.png")
    pairs = [
        ("Transformer", by_word),
        ("Transformer", "GRU through a fixed vector"),
        ("GRU with additive attention", "GRU through a fixed vector"),
        ("GRU through a fixed vector", by_word),
    ]
    copied = scores["the source, copied"]
    for ours, other in pairs:
        facts = dict(lines[ours])
        loss, exchanged = facts.pop("loss"), facts.pop("exchanged")
        for metric in ("bleu", "chrf"):
            lengths = ", ".join(f"{k} {v:.1f}" for k, v in curves[ours].items())
            note = f"the source copied: {copied[metric]:.1f}; loss {loss:.3f}, with sources exchanged {exchanged:.3f}"
            results.append(
                Result(
                    task=f"Translator, {ours}: English to Spanish",
                    metric={"bleu": "BLEU", "chrf": "chrF"}[metric],
                    value=round(scores[ours][metric], 1),
                    baseline=other,
                    baseline_value=round(scores[other][metric], 1),
                    note=note + (f"; BLEU by words of the source: {lengths}" if metric == "bleu" else ""),
                    **facts,
                )
            )
    return results


def by_length(
    sources: Sequence[str], said: Sequence[str], right: Sequence[Sequence[str]]
) -> dict[str, float]:
    """BLEU of the rows in each bin of source lengths: "10-15" -> figure."""
    curve = {}
    for low, high in itertools.pairwise(BINS):
        at = [i for i, t in enumerate(sources) if low <= len(t.split()) < high]
        if len(at) >= 10:
            curve[f"{low}-{high - 1}"] = text_scores([said[i] for i in at], [right[i] for i in at])["bleu"]
    return curve


def length_figure(curves: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    """BLEU against the source's length, a line for each kind of trunk."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6))
    panel = figure.subplots()
    for kind, curve in curves.items():
        panel.plot(list(curve), list(curve.values()), marker="o", label=kind)
    panel.set_xlabel("words of the source")
    panel.set_ylabel("BLEU")
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    panel.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
    return path


class Dictionary:
    """The likeliest translation of every word, learned by IBM model 1 (Brown et al. 1993), word order kept.

    Args:
        pairs: (source, target) sentences.
        rounds: of expectation-maximisation.
        most: pairs used, spread evenly over all.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], rounds: int = 6, most: int = 12000) -> None:
        pairs = pairs[:: max(1, len(pairs) // most)]
        words: tuple[dict, dict] = (
            {"": 0},
            {},
        )  # the empty word of the source explains what has no counterpart
        source, target, slot = [], [], []
        slots = 0
        for pair in pairs:
            a, b = (
                [words[k].setdefault(w, len(words[k])) for w in _words(text)] for k, text in enumerate(pair)
            )
            a = [0, *a]
            source.append(np.tile(np.array(a, np.int64), len(b)))
            target.append(np.repeat(np.array(b, np.int64), len(a)))
            slot.append(np.repeat(np.arange(slots, slots + len(b)), len(a)))
            slots += len(b)
        source, target, slot = (np.concatenate(x) for x in (source, target, slot))
        kinds = len(words[1])
        key, place = np.unique(source * kinds + target, return_inverse=True)
        chance = np.ones(len(key))
        for _ in range(rounds):
            share = chance[place]
            share /= np.bincount(slot, share, slots)[slot]
            count = np.bincount(place, share, len(key))
            chance = count / np.bincount(key // kinds, count, len(words[0]))[key // kinds]
        names = list(words[1])
        order = np.lexsort((chance, key // kinds))
        last = dict(zip((key // kinds)[order].tolist(), (key % kinds)[order].tolist(), strict=True))
        self.best = {word: names[last[i]] for word, i in words[0].items() if i in last and word}

    def translate(self, text: str) -> str:
        """Each word by itself, unknown ones and marks as they are, the first letter's case kept."""
        out = []
        for part in re.findall(r"\w+|[^\w\s]|\s+", text):
            found = self.best.get(part.casefold(), part)
            out.append(found[:1].upper() + found[1:] if part[:1].isupper() else found)
        return "".join(out)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
