"""Figures of cross-attention: attention maps of caption words over an image or audio, alignments of translations."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.layout import modality_id
from worldtokens.tasks.seq2seq.alignment import CrossAttention, group_words
from worldtokens.tasks.seq2seq.captioner import Captioner
from worldtokens.tasks.seq2seq.translator import Translator


def attention_figure(
    model: Captioner, sources: Sequence[Any], path: str | os.PathLike, layer: int | None = None
) -> Path:
    """Draw a row of panels for each source: the input, and the attention map of each word of its caption.

    Images are darkened where attention is low; audio is drawn as a waveform with the attention over time behind it.

    Args:
        model: has one source column, of modality `image` or `audio`.
        sources: one or more sources that the front-end reads.
        path: path of the PNG.
        layer: decoder layer; None: mean over all layers.

    Returns:
        The path.

    Raises:
        InputError: the model has other source columns.
    """
    if len(model.sources) != 1 or model.tokenizers[model.sources[0]].modality not in ("image", "audio"):
        raise InputError(f"expected a model with one image or audio column, this model has {model.sources}")
    (column,) = model.sources
    front = model.tokenizers[column]
    rows = []
    for source in sources:
        source = source[column] if isinstance(source, Mapping) else source
        found = model.cross_attention(source)
        weights = torch.stack(found.weights).mean(0) if layer is None else found.weights[layer]
        words = [(word, weights[at].mean(0)) for word, at in group_words(model.front, found.ids)]
        rows.append((front.read(source), found, words))
    columns = 1 + max(len(words) for *_, words in rows)
    figure, axes = _panels(len(rows), columns)
    for (raw, found, words), panels in zip(rows, axes, strict=True):
        for panel in panels:
            panel.axis("off")
        draw = _draw_image if front.modality == "image" else _draw_audio
        draw(panels[0], front, raw, found, None)
        panels[0].set_title(" ", fontsize=8)
        for panel, (word, weight) in zip(panels[1:], words, strict=False):
            draw(panel, front, raw, found, weight)
            panel.set_title(word, fontsize=8)
    return _write(figure, path)


def alignment_figure(
    model: Translator, texts: Sequence[str], path: str | os.PathLike, layer: int = -1, beams: int = 1
) -> Path:
    """Draw a heat map of attention for each sentence: tokens of the translation down, tokens of the source across.

    Args:
        texts: one or more source sentences.
        path: path of the PNG.
        layer: decoder layer.
        beams: beam size of the decoding.

    Returns:
        The path.
    """
    from matplotlib.figure import Figure

    found = [model.align(text, layer=layer, beams=beams) for text in texts]
    figure = Figure(
        figsize=(sum(2 + 0.22 * len(f.source) for f in found), 1 + 0.22 * max(len(f.target) for f in found))
    )
    widths = [2 + 0.22 * len(f.source) for f in found]
    axes = figure.subplots(1, len(found), squeeze=False, width_ratios=widths)[0]
    for panel, f in zip(axes, found, strict=True):
        panel.imshow(f.weights.numpy(), cmap="Greys", vmin=0, vmax=1, aspect="equal")
        panel.set_xticks(range(len(f.source)), [p.strip() for p in f.source], rotation=90, fontsize=7)
        panel.set_yticks(range(len(f.target)), [p.strip() for p in f.target], fontsize=7)
        panel.xaxis.tick_top()
        panel.xaxis.set_label_position("top")
        panel.set_xlabel("source", fontsize=8)
        panel.set_ylabel("translation", fontsize=8)
    figure.tight_layout()
    return _write(figure, path)


def _panels(rows: int, columns: int):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.25 * columns, 1.45 * rows))
    axes = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        left=0.01, right=0.99, bottom=0.01, top=1 - 0.25 / (1.45 * rows), wspace=0.05, hspace=0.3
    )
    return figure, axes


def _write(figure, path: str | os.PathLike) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
    return path


def _context_indices(found: CrossAttention, front) -> Tensor:
    """Indices of the source's tokens in the context, without class tokens and registers."""
    own = (found.context.modality[0] == modality_id(front.modality)) & found.context.valid[0]
    indices = own.nonzero()[:, 0]
    extra = getattr(front, "prefix", 0)
    if front.modality == "audio" and front.class_embed is not None:
        extra = front.class_embed.shape[1]
    return indices[extra:]


def _draw_image(panel, front, raw: Tensor, found: CrossAttention, weight: Tensor | None) -> None:
    image = _preprocessed(front, raw)
    if weight is not None:
        indices = _context_indices(found, front)
        cell = found.context.pos[0, indices, 1:]
        cell = (cell - cell.amin(0)).round().long()
        height, width = (int(n) + 1 for n in cell.amax(0))
        grid = torch.zeros(height, width)
        grid[cell[:, 0], cell[:, 1]] = weight[indices] / weight[indices].max().clamp(min=1e-9)
        brightness = torch.nn.functional.interpolate(grid[None, None], image.shape[:2], mode="bilinear")[0, 0]
        image = image * (0.15 + 0.85 * brightness[..., None])
    panel.imshow(image.numpy())


def _preprocessed(front, raw: Tensor) -> Tensor:
    """(H, W, 3) in [0, 1]: the image resized and cropped like the front-end's input, not normalised."""
    height, width = front.resized_size(*raw.shape[1:])
    image = torch.nn.functional.interpolate(
        raw[None].float() / 255, (height, width), mode="bilinear", antialias=True
    )[0]
    if front.size is not None and front.preprocess.resize != "pad":
        top, left = ((n - s) // 2 for n, s in zip((height, width), front.size, strict=True))
        image = image[:, top : top + front.size[0], left : left + front.size[1]]
    return image.permute(1, 2, 0).clamp(0, 1)


def _draw_audio(panel, front, raw: Tensor, found: CrossAttention, weight: Tensor | None) -> None:
    seconds = len(raw) / front.sample_rate
    step = max(1, math.ceil(len(raw) / 400))
    panel.plot(
        torch.arange(len(raw[::step])) * step / front.sample_rate, raw[::step], linewidth=0.4, color="black"
    )
    if weight is not None:
        indices = _context_indices(found, front)
        start = found.context.pos[0, indices, 0] * front.token_seconds
        height = raw.abs().max().clamp(min=1e-3)
        share = weight[indices] / weight[indices].max().clamp(min=1e-9)
        panel.bar(
            start, 2 * height * share, front.token_seconds, -height, align="edge", color="orange", alpha=0.7
        )
    panel.set_xlim(0, seconds)
