"""What evaluations of language models share: baselines are a Kneser-Ney 5-gram on the same tokens and an LSTM of equal size."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from worldtokens.evals.base import Result
from worldtokens.evals.baselines.kneser_ney import KneserNey
from worldtokens.evals.training import parameter_count, read_recipe, trained
from worldtokens.tasks.language.model import LanguageModel
from worldtokens.training.recipe import Recipe
from worldtokens.training.settings import autocast_type


def compare(name: str, title: str, out: Path, scale: float) -> list[Result]:
    """Our model, an LSTM on the same batches, and a 5-gram on the whole training text; stopped trainings are resumed.

    Args:
        name: the data set; the recipe is `lm_<name>`.
        title: the data set in a few words.
        out: folder of the checkpoints.
        scale: fraction of the training steps.
    """
    recipe = read_recipe(f"lm_{name}", out / name, scale)
    rows = recipe.rows()[0]
    test = open_split(recipe, "test")
    ours, minutes = trained(recipe)
    scores = evaluated(ours, test, recipe)
    count = parameter_count(ours)
    five_gram = five_gram_bits(ours, rows, test)
    lstm_recipe = read_recipe(
        f"lm_{name}", out / f"{name}_lstm", scale, 0, *lstm_overrides(ours.front.vocab_size, count)
    )
    peer, _ = trained(lstm_recipe)
    peer_scores = evaluated(peer, test, lstm_recipe)
    tokens = recipe.train.steps * recipe.train.batch_size * sum(map(len, ids_of(ours, rows))) // len(rows)
    facts = {
        "task": f"LanguageModel: {title}",
        "data": f"{name}, {len(rows):,} train / {len(test)} test documents, {scores['bytes']:,.0f} test bytes",
        "size": f"Transformer of dim {ours.trunk.dim}, depth {ours.trunk.cfg.depth}; vocabulary of {ours.front.vocab_size:,}",
        "parameters": count,
        "steps": recipe.train.steps,
        "minutes": round(minutes, 1),
        "metric": "bits per byte",
        "value": round(scores["bits_per_byte"], 4),
        "better": "lower",
    }
    note = (
        f"perplexity per token {scores['perplexity']:.1f}; about {tokens / 1e6:.1f} million training tokens"
    )
    return [
        Result(
            baseline="interpolated Kneser-Ney 5-gram, all of the training text",
            baseline_value=round(five_gram, 4),
            note=note,
            **facts,
        ),
        Result(
            baseline=f"LSTM of dim {peer.trunk.dim}, depth {peer.trunk.rnn.num_layers}, same batches",
            baseline_value=round(peer_scores["bits_per_byte"], 4),
            note=f"the LSTM has {parameter_count(peer):,} parameters and a perplexity per token of {peer_scores['perplexity']:.1f}",
            **facts,
        ),
    ]


def lstm_overrides(vocabulary: int, parameters: int, depth: int = 1) -> list[str]:
    """Overrides of a recipe that replace its trunk by an LSTM, of the dim that comes closest to `parameters` in all."""
    width = max(
        range(8, 4096, 8), key=lambda d: -abs(d * vocabulary + depth * (8 * d * d + 8 * d) - parameters)
    )
    trunk = f"{{class: worldtokens.Recurrent, args: {{kind: lstm, dim: {width}, depth: {depth}}}}}"
    overrides = ["--model.trunk", trunk, "--model.tokenizer.dim", str(width)]
    return [*overrides, "--model.tokenizer.positions", "none"]


def open_split(recipe: Recipe, split: str):
    """Another split of a recipe's data set."""
    from worldtokens.data.manifests import open_rows

    return open_rows(**{**recipe.values["data"]["train"], "split": split})


def ids_of(model: LanguageModel, rows) -> list[list[int]]:
    """Token ids of every row, with start and end token."""
    return [model.read(rows[i])[model.column].tolist() for i in range(len(rows))]


def evaluated(model: LanguageModel, rows, recipe: Recipe) -> dict[str, float]:
    """Metrics in the precision that the model was trained in."""
    dtype = autocast_type(recipe.train.precision, model.device)
    with torch.autocast(model.device.type, dtype, enabled=dtype is not None):
        return model.evaluate(rows, recipe.train.eval_batch_size)


def five_gram_bits(model: LanguageModel, rows, test) -> float:
    """Bits per byte of a Kneser-Ney 5-gram on the same tokens."""
    grams = KneserNey(ids_of(model, rows), model.front.vocab_size, 5)
    nats = -grams.log_probabilities(ids_of(model, test)).sum()
    size = sum(len(model.front.decode(ids).encode()) for ids in ids_of(model, test))
    return float(nats) / math.log(2) / size
