"""Figure of a confusion matrix."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from worldtokens.errors import InputError


def confusion_figure(
    matrix: Tensor, names: Sequence[str | int] | None, out: str | os.PathLike, title: str = ""
) -> Path:
    """Draw a confusion matrix as PNG: counts in the cells, shaded by their share of the true class.

    Args:
        matrix: (C, C) counts, true classes down, predicted classes across, as `Classifier.confusion` returns.
        names: names of the C classes; None: their indices.
        out: path of the PNG; its folder is created.
        title: title of the figure; the accuracy is appended.

    Returns:
        The path.

    Raises:
        InputError: the matrix is not square, or the number of names differs from C.
    """
    counts = torch.as_tensor(matrix).cpu()
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or not len(counts):
        raise InputError(f"the confusion matrix is {tuple(counts.shape)}, expected (classes, classes)")
    n = len(counts)
    labels = [str(name) for name in (range(n) if names is None else names)]
    if len(labels) != n:
        raise InputError(f"found {len(labels)} names for a confusion matrix of {n} classes")
    # without pyplot, which would select a GUI backend
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    totals = counts.sum(1, keepdim=True)
    share = counts / totals.clamp(min=1)
    side = min(24.0, 3.2 + 0.45 * n)  # inches
    figure = Figure(figsize=(side + 0.8, side), layout="constrained", dpi=110)
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    shade = axes.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(n), labels, rotation=90 if max(map(len, labels)) > 2 else 0)
    axes.set_yticks(range(n), [f"{name}  ({int(t)})" for name, t in zip(labels, totals, strict=True)])
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class (count)")
    if n <= 40:  # cells of larger matrices are too small for a number
        size = 9 if n <= 20 else 6
        for i in range(n):
            for j in range(n):
                if counts[i, j]:
                    ink = "white" if share[i, j] > 0.55 else "black"
                    axes.text(
                        j, i, str(int(counts[i, j])), ha="center", va="center", color=ink, fontsize=size
                    )
    correct, total = int(counts.diagonal().sum()), int(counts.sum())
    accuracy = f"accuracy {correct / max(1, total):.1%} ({correct} of {total})"
    axes.set_title(f"{title}: {accuracy}" if title else accuracy, fontsize=11)
    figure.colorbar(shade, ax=axes, label="share of the true class", fraction=0.046)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(out)
    return out
