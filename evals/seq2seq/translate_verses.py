"""English to Spanish on held-out books: Transformer, GRU with additive attention, GRU without; baseline: IBM model 1."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from worldtokens.evals.base import Result
from worldtokens.evals.seq2seq.caption import loss_on, shuffle_column, size, test_rows
from worldtokens.evals.training import parameter_count, read_recipe, trained
from worldtokens.figures.attention import alignment_figure
from worldtokens.tasks.metrics.text import text_scores

ABOUT = "translation of Bible verses by three trunks, compared with a word-by-word dictionary; BLEU by source length"
KINDS = {
    "translate_verses": "Transformer",
    "translate_verses_bahdanau": "GRU with additive attention",
    "translate_verses_seq2seq": "GRU with a fixed-length vector",
}
BINS = (0, 10, 15, 20, 25, 30, 40, 80)  # source length in words


def evaluate(out: Path, scale: float = 1.0) -> list[Result]:
    """Three trainings on the same rows, resumed if stopped; draws BLEU by source length and alignments into `out`."""
    test = test_rows("verse_books")
    sources, references = [r["text"] for r in test], [[r["target"]] for r in test]
    outputs, models, results = {}, {}, []
    for name, kind in KINDS.items():
        recipe = read_recipe(name, out / name, scale)
        rows = recipe.rows()[0]
        model, minutes = trained(recipe)
        outputs[kind] = model.translate(sources)
        models[kind] = {
            "data": f"verses, {len(rows):,} train / {len(test)} test, seven whole books held out",
            "size": size(model),
            "parameters": parameter_count(model),
            "steps": recipe.train.steps,
            "minutes": round(minutes, 1),
            "loss": loss_on(model, test),
            "shuffled": loss_on(model, shuffle_column(test, "text")),
        }
        if kind != KINDS["translate_verses_seq2seq"]:
            short = sorted(sources, key=lambda t: abs(len(t.split()) - 11))[:2]
            alignment_figure(model, short, out / f"alignment_{name}.png")
    dictionary = Dictionary([(rows[i]["text"], rows[i]["target"]) for i in range(len(rows))])
    word_by_word = "word by word, IBM model 1"
    outputs[word_by_word] = [dictionary.translate(t) for t in sources]
    outputs["copied source"] = sources
    scores = {kind: text_scores(texts, references) for kind, texts in outputs.items()}
    curves = {
        kind: by_length(sources, texts, references) for kind, texts in outputs.items() if kind in models
    }
    length_figure(curves, out / "bleu_by_length.png")
    pairs = [
        ("Transformer", word_by_word),
        ("Transformer", "GRU with a fixed-length vector"),
        ("GRU with additive attention", "GRU with a fixed-length vector"),
        ("GRU with a fixed-length vector", word_by_word),
    ]
    copied = scores["copied source"]
    for ours, other in pairs:
        facts = dict(models[ours])
        loss, shuffled = facts.pop("loss"), facts.pop("shuffled")
        for metric in ("bleu", "chrf"):
            lengths = ", ".join(f"{k} {v:.1f}" for k, v in curves[ours].items())
            note = f"copied source {copied[metric]:.1f}"
            if metric == "bleu":
                note += f"; loss {loss:.3f} nats per token, with shuffled sources {shuffled:.3f}; BLEU by source length in words: {lengths}"
            results.append(
                Result(
                    task=f"Translator, {ours}: English to Spanish",
                    metric={"bleu": "BLEU", "chrf": "chrF"}[metric],
                    value=round(scores[ours][metric], 1),
                    baseline=other,
                    baseline_value=round(scores[other][metric], 1),
                    note=note,
                    **facts,
                )
            )
    return results


def by_length(
    sources: Sequence[str], outputs: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """BLEU of the rows in each bin of source lengths, e.g. "10-14" -> BLEU."""
    curve = {}
    for low, high in itertools.pairwise(BINS):
        at = [i for i, t in enumerate(sources) if low <= len(t.split()) < high]
        if len(at) >= 10:
            curve[f"{low}-{high - 1}"] = text_scores([outputs[i] for i in at], [references[i] for i in at])[
                "bleu"
            ]
    return curve


def length_figure(curves: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    """Plot BLEU against the source length, a line per trunk."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6))
    panel = figure.subplots()
    for kind, curve in curves.items():
        panel.plot(list(curve), list(curve.values()), marker="o", label=kind)
    panel.set_xlabel("source length in words")
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
    """Most likely translation of every word by IBM model 1 (Brown et al. 1993), in source order.

    Args:
        pairs: (source, target) sentences.
        rounds: rounds of expectation-maximisation.
        most: number of pairs used, evenly spaced.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], rounds: int = 6, most: int = 12000) -> None:
        pairs = pairs[:: max(1, len(pairs) // most)]
        # the empty source word (NULL) explains target words without a counterpart
        words: tuple[dict, dict] = ({"": 0}, {})
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
        targets = len(words[1])
        key, index = np.unique(source * targets + target, return_inverse=True)
        probability = np.ones(len(key))
        for _ in range(rounds):
            share = probability[index]
            share /= np.bincount(slot, share, slots)[slot]
            count = np.bincount(index, share, len(key))
            probability = count / np.bincount(key // targets, count, len(words[0]))[key // targets]
        names = list(words[1])
        order = np.lexsort((probability, key // targets))
        last = dict(zip((key // targets)[order].tolist(), (key % targets)[order].tolist(), strict=True))
        self.best = {word: names[last[i]] for word, i in words[0].items() if i in last and word}

    def translate(self, text: str) -> str:
        """Translate word by word; unknown words and punctuation are copied, the case of the first letter is kept."""
        out = []
        for part in re.findall(r"\w+|[^\w\s]|\s+", text):
            found = self.best.get(part.casefold(), part)
            out.append(found[:1].upper() + found[1:] if part[:1].isupper() else found)
        return "".join(out)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
