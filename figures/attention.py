"""Where a model looked, as an image: words over an image or a sound, a sentence over its translation."""

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
    """A row of panels for each source: what was read, and for each word of the caption where it was looked.

    An image is darkened where nothing is looked at; a sound is drawn as its wave with the weights over time behind it.

    Args:
        model: reads one column, `image` or `audio` by its front-end.
        sources: what the front-end reads, one or more.
        path: of the PNG.
        layer: of the decoder; None: the mean of all.

    Raises:
        InputError: the model reads something else.
    """
    if len(model.sources) != 1 or model.tokenizers[model.sources[0]].modality not in ("image", "audio"):
        raise InputError(f"the figure shows one image or sound a row, this model reads {model.sources}")
    (column,) = model.sources
    front = model.tokenizers[column]
    rows = []
    for source in sources:
        source = source[column] if isinstance(source, Mapping) else source
        seen = model.cross_attention(source)
        weights = torch.stack(seen.weights).mean(0) if layer is None else seen.weights[layer]
        each = [(word, weights[places].mean(0)) for word, places in group_words(model.front, seen.ids)]
        rows.append((front.read(source), seen, each))
    columns = 1 + max(len(each) for *_, each in rows)
    figure, axes = _panels(len(rows), columns)
    for (raw, seen, each), panels in zip(rows, axes, strict=True):
        for panel in panels:
            panel.axis("off")
        draw = _picture if front.modality == "image" else _sound
        draw(panels[0], front, raw, seen, None)
        panels[0].set_title(" ", fontsize=8)
        for panel, (word, weight) in zip(panels[1:], each, strict=False):
            draw(panel, front, raw, seen, weight)
            panel.set_title(word, fontsize=8)
    return _write(figure, path)


def alignment_figure(
    model: Translator, texts: Sequence[str], path: str | os.PathLike, layer: int = -1, beams: int = 1
) -> Path:
    """A heat map for each sentence: the translation from top to bottom, the pieces of the source from left to right.

    Args:
        texts: one or more sources.
        path: of the PNG.
        layer: of the decoder.
        beams: of the search for the translations.
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


def _own(seen: CrossAttention, front) -> Tensor:
    """Places of the context that the source's own tokens have, class tokens and registers left out."""
    mine = (seen.context.modality[0] == modality_id(front.modality)) & seen.context.valid[0]
    places = mine.nonzero()[:, 0]
    extra = getattr(front, "prefix", 0)
    if front.modality == "audio" and front.class_embed is not None:
        extra = front.class_embed.shape[1]
    return places[extra:]


def _picture(panel, front, raw: Tensor, seen: CrossAttention, weight: Tensor | None) -> None:
    image = _as_seen(front, raw)
    if weight is not None:
        places = _own(seen, front)
        at = seen.context.pos[0, places, 1:]
        at = (at - at.amin(0)).round().long()
        high, wide = (int(n) + 1 for n in at.amax(0))
        grid = torch.zeros(high, wide)
        grid[at[:, 0], at[:, 1]] = weight[places] / weight[places].max().clamp(min=1e-9)
        light = torch.nn.functional.interpolate(grid[None, None], image.shape[:2], mode="bilinear")[0, 0]
        image = image * (0.15 + 0.85 * light[..., None])
    panel.imshow(image.numpy())


def _as_seen(front, raw: Tensor) -> Tensor:
    """(H, W, 3) in [0, 1]: the image resized and cut as the front-end does it."""
    high, wide = front.resized_size(*raw.shape[1:])
    image = torch.nn.functional.interpolate(
        raw[None].float() / 255, (high, wide), mode="bilinear", antialias=True
    )[0]
    if front.size is not None and front.preprocess.resize != "pad":
        top, left = ((n - s) // 2 for n, s in zip((high, wide), front.size, strict=True))
        image = image[:, top : top + front.size[0], left : left + front.size[1]]
    return image.permute(1, 2, 0).clamp(0, 1)


def _sound(panel, front, raw: Tensor, seen: CrossAttention, weight: Tensor | None) -> None:
    seconds = len(raw) / front.sample_rate
    step = max(1, math.ceil(len(raw) / 400))
    panel.plot(
        torch.arange(len(raw[::step])) * step / front.sample_rate, raw[::step], linewidth=0.4, color="black"
    )
    if weight is not None:
        places = _own(seen, front)
        begin = seen.context.pos[0, places, 0] * front.token_seconds
        height = raw.abs().max().clamp(min=1e-3)
        share = weight[places] / weight[places].max().clamp(min=1e-9)
        panel.bar(
            begin, 2 * height * share, front.token_seconds, -height, align="edge", color="orange", alpha=0.7
        )
    panel.set_xlim(0, seconds)
