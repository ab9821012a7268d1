"""What the checks of language models share: a Kneser-Ney 5-gram on the same pieces and an LSTM of as many parameters."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from worldtokens.evals.base import Result
from worldtokens.evals.baselines.kneser_ney import KneserNey
from worldtokens.evals.classification.base import read_recipe, trained
from worldtokens.tasks.language.model import LanguageModel
from worldtokens.training.recipe import Recipe
from worldtokens.training.settings import autocast_type


def beside(name: str, what: str, out: Path, scale: float) -> list[Result]:
    """Ours, the LSTM on the same batches, and the 5-gram on the whole training text; either training goes on where it was stopped.

    Args:
        name: of the recipe, `lm_<name>`, and of its set.
        what: the set in a few words.
    """
    recipe = read_recipe(f"lm_{name}", out / name, scale)
    rows = recipe.rows()[0]
    test = rows_of(recipe, "test")
    ours, minutes = trained(recipe)
    figures = evaluated(ours, test, recipe)
    count = sum(p.numel() for p in ours.parameters())
    grams = five_gram(ours, rows, test)
    lstm_recipe = read_recipe(
        f"lm_{name}", out / f"{name}_lstm", scale, 0, *lstm(ours.front.vocab_size, count)
    )
    peer, _ = trained(lstm_recipe)
    peer_figures = evaluated(peer, test, lstm_recipe)
    tokens = recipe.train.steps * recipe.train.batch_size * sum(map(len, ids_of(ours, rows))) // len(rows)
    facts = {
        "task": f"LanguageModel: {what}",
        "data": f"{name}, {len(rows):,} train / {len(test)} test, {figures['bytes']:,.0f} bytes to tell",
        "size": f"{ours.trunk.dim} wide, {ours.trunk.cfg.depth} deep, {ours.front.vocab_size:,} pieces",
        "parameters": count,
        "steps": recipe.train.steps,
        "minutes": round(minutes, 1),
        "metric": "bits per byte",
        "value": round(figures["bits_per_byte"], 4),
        "better": "lower",
    }
    seen = f"perplexity of a piece {figures['perplexity']:.1f}; about {tokens / 1e6:.1f} million pieces read"
    parts = sum(p.numel() for p in peer.parameters())
    return [
        Result(
            baseline="interpolated Kneser-Ney 5-gram, all of the training text",
            baseline_value=round(grams, 4),
            note=seen,
            **facts,
        ),
        Result(
            baseline=f"LSTM, {peer.trunk.dim} wide, {peer.trunk.rnn.num_layers} deep, {parts:,} parameters, same batches",
            baseline_value=round(peer_figures["bits_per_byte"], 4),
            note=f"the LSTM's perplexity of a piece {peer_figures['perplexity']:.1f}",
            **facts,
        ),
    ]


def lstm(vocabulary: int, parameters: int, depth: int = 1) -> list[str]:
    """Changes of a recipe that put an LSTM in the trunk's place, as wide as `parameters` in all allow."""
    width = max(
        range(8, 4096, 8), key=lambda d: -abs(d * vocabulary + depth * (8 * d * d + 8 * d) - parameters)
    )
    trunk = f"{{class: worldtokens.Recurrent, args: {{kind: lstm, dim: {width}, depth: {depth}}}}}"
    words = ["--model.trunk", trunk, "--model.tokenizer.dim", str(width)]
    return [*words, "--model.tokenizer.positions", "none"]


def rows_of(recipe: Recipe, split: str):
    """Another side of a recipe's set."""
    from worldtokens.data.manifests import open_rows

    return open_rows(**{**recipe.values["data"]["train"], "split": split})


def ids_of(model: LanguageModel, rows) -> list[list[int]]:
    """Every row's ids, start and end token with them."""
    return [model.read(rows[i])[model.column].tolist() for i in range(len(rows))]


def evaluated(model: LanguageModel, rows, recipe: Recipe) -> dict[str, float]:
    """Figures in the precision that the model was trained in."""
    dtype = autocast_type(recipe.train.precision, model.device)
    with torch.autocast(model.device.type, dtype, enabled=dtype is not None):
        return model.evaluate(rows, recipe.train.eval_batch_size)


def five_gram(model: LanguageModel, rows, test) -> float:
    """Bits per byte of a Kneser-Ney 5-gram on the same pieces."""
    grams = KneserNey(ids_of(model, rows), model.front.vocab_size, 5)
    nats = -grams.log_probabilities(ids_of(model, test)).sum()
    size = sum(len(model.front.decode(ids).encode()) for ids in ids_of(model, test))
    return float(nats) / math.log(2) / size
