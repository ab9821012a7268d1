"""Linear baseline of classifiers: multinomial logistic regression on fixed features."""

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
    """Fitted model: features are standardised with the training rows' statistics, then mapped linearly."""

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
        classes: number of classes.
        decay: L2 penalty on the weights, relative to the mean loss.
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
    """The model with the decay of `DECAYS` that has the lowest loss on the validation rows."""
    fitted = [fit(x, y, classes, decay) for decay in DECAYS]
    return min(fitted, key=lambda m: float(F.cross_entropy(m(x_val), y_val)))


def accuracies(logits: Tensor, y: Tensor) -> dict[str, float]:
    """`top1`: accuracy; `macro`: mean of the accuracies of the classes present."""
    correct = logits.argmax(-1) == y
    return {
        "top1": float(correct.double().mean()),
        "macro": sum(float(correct[y == c].double().mean()) for c in y.unique()) / len(y.unique()),
    }


def pooled_mel(
    recordings: Sequence[Any], sample_rate: int, n_mels: int, seconds: float, parts: int = 3
) -> Tensor:
    """Mean log-mel of equal time spans (thirds by default) of each recording.

    Args:
        recordings: sources that `AudioTokenizer.read` accepts.
        sample_rate, n_mels, seconds: of the front-end that computes the spectrograms.
        parts: number of equal time spans.

    Returns:
        (n, parts x n_mels).
    """
    front = AudioTokenizer(8, sample_rate=sample_rate, n_mels=n_mels, seconds=seconds, positions="none")
    pooled = []
    for recording in recordings:
        spectrogram = front.features(front.collate([front.read(recording)]))[0][0]
        edges = torch.linspace(0, len(spectrogram), parts + 1).round().long().tolist()
        # a recording of one or two frames has empty spans: they take the nearest frame
        spans = [(min(a, len(spectrogram) - 1), b) for a, b in itertools.pairwise(edges)]
        pooled.append(torch.cat([spectrogram[a : max(b, a + 1)].mean(0) for a, b in spans]))
    return torch.stack(pooled)


def classes_of(rows: Sequence[Mapping], names: Sequence[str], label: str = "class") -> Tensor:
    """(n,) class indices of the rows."""
    index = {name: i for i, name in enumerate(names)}
    return torch.tensor([index[row[label]] for row in rows])
