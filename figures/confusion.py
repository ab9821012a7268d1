"""An image of which classes are taken for which."""

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
    """Write a confusion matrix as PNG: counts in the fields, shades by the share of each true class.

    Args:
        matrix: (C, C) counts, the truth down, the answer across, as `Classifier.confusion` gives.
        names: of the C classes; None: their numbers.
        out: the file; its folder is made.
        title: above the image; the share of right answers is added.

    Returns:
        The path written.

    Raises:
        InputError: the matrix is not square, or the names are of another number.
    """
    counts = torch.as_tensor(matrix).cpu()
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or not len(counts):
        raise InputError(f"the confusion matrix is {tuple(counts.shape)}, expected (classes, classes)")
    n = len(counts)
    names = [str(name) for name in (range(n) if names is None else names)]
    if len(names) != n:
        raise InputError(f"found {len(names)} names for a confusion matrix of {n} classes")
    # drawn without pyplot, which would pick a window system
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    totals = counts.sum(1, keepdim=True)
    share = counts / totals.clamp(min=1)
    side = min(24.0, 3.2 + 0.45 * n)  # inches
    figure = Figure(figsize=(side + 0.8, side), layout="constrained", dpi=110)
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    shade = axes.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(n), names, rotation=90 if max(map(len, names)) > 2 else 0)
    axes.set_yticks(range(n), [f"{name}  ({int(t)})" for name, t in zip(names, totals, strict=True)])
    axes.set_xlabel("answer")
    axes.set_ylabel("truth (rows)")
    if n <= 40:  # more fields than that are too small to hold a number
        size = 9 if n <= 20 else 6
        for i in range(n):
            for j in range(n):
                if counts[i, j]:
                    ink = "white" if share[i, j] > 0.55 else "black"
                    axes.text(j, i, int(counts[i, j]), ha="center", va="center", color=ink, fontsize=size)
    right = int(counts.diagonal().sum())
    told = f"{right} of {int(counts.sum())} right ({right / max(1, int(counts.sum())):.1%})"
    axes.set_title(f"{title}: {told}" if title else told, fontsize=11)
    figure.colorbar(shade, ax=axes, label="share of the true class", fraction=0.046)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(out)
    return out
