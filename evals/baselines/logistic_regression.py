"""The least that a classifier has to beat: multinomial logistic regression on features that nobody learned."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer

DECAYS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


class Linear:
    """A fitted model: features are standardised as the training rows were, then one linear map."""

    def __init__(self, mean: Tensor, std: Tensor, weight: Tensor, bias: Tensor, decay: float) -> None:
        self.mean, self.std, self.weight, self.bias, self.decay = mean, std, weight, bias, decay

    def __call__(self, x: Tensor) -> Tensor:
        """(n, F) -> logits (n, C), float64."""
        return ((x.double() - self.mean) / self.std) @ self.weight + self.bias


def fit(x: Tensor, y: Tensor, classes: int, decay: float) -> Linear:
    """Logistic regression by L-BFGS to convergence.

    Args:
        x: (n, F) features.
        y: (n,) classes.
        classes: how many.
        decay: weight of the squared weights' sum, relative to the mean loss.
    """
    x = x.double()
    mean, std = x.mean(0), x.std(0).clamp(min=1e-6)
    x = (x - mean) / std
    weight = torch.zeros(x.shape[1], classes, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optim = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optim.zero_grad()
        value = F.cross_entropy(x @ weight + bias, y) + 0.5 * decay * weight.square().sum()
        value.backward()
        return value

    optim.step(loss)
    return Linear(mean, std, weight.detach(), bias.detach(), decay)


def fit_best(x: Tensor, y: Tensor, x_val: Tensor, y_val: Tensor, classes: int) -> Linear:
    """The decay of `DECAYS` that gives the lowest loss on the validation rows."""
    fitted = [fit(x, y, classes, decay) for decay in DECAYS]
    return min(fitted, key=lambda m: float(F.cross_entropy(m(x_val), y_val)))


def figures(logits: Tensor, y: Tensor) -> dict[str, float]:
    """`top1`, and `macro`: the mean over the classes present of each one's share of right answers."""
    right = logits.argmax(-1) == y
    return {
        "top1": float(right.double().mean()),
        "macro": sum(float(right[y == c].double().mean()) for c in y.unique()) / len(y.unique()),
    }


def pooled_mel(
    sounds: Sequence[Any], sample_rate: int, n_mels: int, seconds: float, parts: int = 3
) -> Tensor:
    """Mean log-mel of each third of each sound.

    Args:
        sounds: as `AudioTokenizer.read` takes them.
        sample_rate, n_mels, seconds: of the front-end that computes the spectra.
        parts: how many parts, if not thirds.

    Returns:
        (n, parts x n_mels).
    """
    front, made = (
        AudioTokenizer(8, sample_rate=sample_rate, n_mels=n_mels, seconds=seconds, positions="none"),
        [],
    )
    for sound in sounds:
        spectrum = front.features(front.collate([front.read(sound)]))[0][0]
        edges = torch.linspace(0, len(spectrum), parts + 1).round().long().tolist()
        # a sound of one or two frames has parts without any: they take the frame nearest
        spans = [(min(a, len(spectrum) - 1), b) for a, b in itertools.pairwise(edges)]
        made.append(torch.cat([spectrum[a : max(b, a + 1)].mean(0) for a, b in spans]))
    return torch.stack(made)


def classes_of(rows: Sequence[Mapping], names: Sequence[str], label: str = "class") -> Tensor:
    """(n,) numbers of the rows' classes."""
    place = {name: i for i, name in enumerate(names)}
    return torch.tensor([place[row[label]] for row in rows])
