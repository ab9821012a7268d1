"""An image's codes, learned: images go through whole numbers and come back, and the way is trained to lose little.

The first half of drawing by a language model (van den Oord et al. 2017): an `Autoencoder` is trained, and
`from_autoencoder` hands its tokenizer, frozen, to a `ImageLM` or a `Diffusion`.

Shapes: B images of H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import load, load_strictly
from worldtokens.tasks.base import Task, evaluating
from worldtokens.tokenizers.base import Batch
from worldtokens.tokenizers.discrete.quantize import codebook_use
from worldtokens.tokenizers.discrete.tokenizer import DiscreteTokenizer


class Autoencoder(Task):
    """Trains a `DiscreteTokenizer` to give back the images that it reads.

    Args:
        tokenizer: what is trained; its column is ``"image"``, or give ``{"photo": ...}``. A frozen one is thawed.

    Raises:
        ValueError: more than one column.
    """

    metric = ("mse", "min")

    def __init__(self, tokenizer: DiscreteTokenizer | dict[str, DiscreteTokenizer]) -> None:
        super().__init__()
        given = tokenizer if isinstance(tokenizer, Mapping) else {"image": tokenizer}
        if len(given) != 1:
            raise ValueError(f"Autoencoder reads one column, got {sorted(given)}")
        ((self.column, front),) = given.items()
        front.freeze(False)
        self.tokenizers = nn.ModuleDict(given)

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        return super().config_args(folder) | {"tokenizer": dict(self.tokenizers)}

    @property
    def front(self) -> DiscreteTokenizer:
        return self.tokenizers[self.column]

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows from `read` -> one batch, which counts for as many rows as have an image."""
        batch = super().collate(rows)
        batch["weight"] = sum(self.column in row for row in rows)
        return batch

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """As `DiscreteTokenizer.loss`; without an image a zero that has a graph."""
        if self.column not in batch:
            return {"loss": sum(p.sum() for p in self.front.codec.parameters()) * 0.0}
        return self.front.loss(batch[self.column])

    def forward(self, batch: Mapping[str, Batch | Tensor]) -> Tensor:
        """``{"image": ...}`` -> what its ids give back, (B, 3, H, W) float32 in [0, 1]."""
        return self.front.decode(self.front.encode(batch[self.column]))

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> dict[str, float]:
        """How near held-out images come back.

        Args:
            rows: those without an image are left out.
            batch_size: images worked on at a time.

        Returns:
            ``mse``, the squared error of values in [0, 1] of the rounded images, and ``psnr``, the same in decibels;
            ``mse_colour``, that of one mean colour for each patch, unrounded; ``used`` (share) and ``perplexity`` of the
            codebook; ``bits``, what one image's ids cost if all were equally likely.

        Raises:
            InputError: no row has an image.
        """
        held = [r for r in (rows[i] for i in range(len(rows))) if r.get(self.column) is not None]
        if not held:
            raise InputError(f"no row to evaluate has the column {self.column!r}")
        front, ids = self.front, []
        error = colour = 0.0
        with evaluating(self):
            for i in range(0, len(held), batch_size):
                batch = self.collate([self.read(r) for r in held[i : i + batch_size]]).to(self.device)
                pixels = batch[self.column]["pixels"].float() / 255
                ids.append(front.encode(batch[self.column]))
                rebuilt = front.decode(ids[-1], torch.uint8).float() / 255
                flat = F.interpolate(F.avg_pool2d(pixels, front.factor), scale_factor=front.factor)
                error += float((rebuilt - pixels).square().mean((1, 2, 3)).sum())
                colour += float((flat - pixels).square().mean((1, 2, 3)).sum())
        use = codebook_use(torch.cat(ids), front.codebook_size)
        mse = error / len(held)
        return {
            "mse": mse,
            "psnr": -10 * math.log10(max(mse, 1e-10)),
            "mse_colour": colour / len(held),
            **{k: float(v) for k, v in use.items()},
            "bits": front.count * math.log2(front.codebook_size),
        }


def from_autoencoder(folder: str, dim: int | None = None) -> DiscreteTokenizer:
    """The frozen tokenizer of a saved `Autoencoder`, for another model to read or draw with; recipes may name it.

    Args:
        folder: what `Autoencoder.save` wrote, such as ``runs/autoencoder_emoji/last``.
        dim: width of its tokens. None: that of the saved one; else embeddings are made anew, and the codes stay the same.

    Raises:
        InputError: the folder is not a saved model, or not one of an `Autoencoder` or `DiscreteTokenizer`.
    """
    model = load(folder)
    front = model.front if isinstance(model, Autoencoder) else model
    if not isinstance(front, DiscreteTokenizer):
        raise InputError(f"{folder} holds a {type(model).__name__}, expected an Autoencoder")
    if dim is not None and dim != front.dim:
        other = DiscreteTokenizer(**(front.config_args() | {"dim": dim}))
        load_strictly(other.codec, front.codec.state_dict(), folder)
        front = other
    return front.freeze()
