"""Training of a discrete image autoencoder (VQ-VAE, van den Oord et al. 2017).

The first stage of image generation by a language model: an `Autoencoder` is trained, and `from_autoencoder` returns its
frozen tokenizer for an `ImageLM` or a `Diffusion`.

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
from worldtokens.tasks.base import Task, evaluating, zero_loss
from worldtokens.tokenizers.base import Batch
from worldtokens.tokenizers.discrete.quantize import codebook_use
from worldtokens.tokenizers.discrete.tokenizer import DiscreteTokenizer


class Autoencoder(Task):
    """Trains a `DiscreteTokenizer` to reconstruct images.

    Args:
        tokenizer: the tokenizer to train; its column is ``"image"``, or give ``{"photo": ...}``. If frozen, it is
            unfrozen.

    Raises:
        ValueError: more than one column.
    """

    metric = ("mse", "min")

    def __init__(self, tokenizer: DiscreteTokenizer | dict[str, DiscreteTokenizer]) -> None:
        super().__init__()
        tokenizers = tokenizer if isinstance(tokenizer, Mapping) else {"image": tokenizer}
        if len(tokenizers) != 1:
            raise ValueError(f"Autoencoder takes one column, got {sorted(tokenizers)}")
        ((self.column, front),) = tokenizers.items()
        front.freeze(False)
        self.tokenizers = nn.ModuleDict(tokenizers)

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        return super().config_args(folder) | {"tokenizer": dict(self.tokenizers)}

    @property
    def front(self) -> DiscreteTokenizer:
        return self.tokenizers[self.column]

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Collates rows from `read` into one batch; its weight is the number of rows with an image."""
        batch = super().collate(rows)
        batch["weight"] = sum(self.column in row for row in rows)
        return batch

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """As `DiscreteTokenizer.loss`; a zero with a graph if no row has an image."""
        if self.column not in batch:
            return {"loss": zero_loss(self.front.codec)}
        return self.front.loss(batch[self.column])

    def forward(self, batch: Mapping[str, Batch | Tensor]) -> Tensor:
        """Reconstructs ``{"image": ...}`` from its token ids: (B, 3, H, W) float32 in [0, 1]."""
        return self.front.decode(self.front.encode(batch[self.column]))

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Mapping[str, Any]], batch_size: int = 64) -> dict[str, float]:
        """Reconstruction metrics on held-out images.

        Args:
            rows: those without an image are skipped.
            batch_size: images per forward pass.

        Returns:
            ``mse``, the mean squared error of 8-bit reconstructions with values in [0, 1], and ``psnr`` in dB;
            ``mse_colour``, the baseline of one mean colour per patch, not rounded; ``used`` (share) and ``perplexity`` of
            the codebook; ``bits`` per image for a uniform distribution of codes.

        Raises:
            InputError: no row has an image.
        """
        held_out = [r for r in (rows[i] for i in range(len(rows))) if r.get(self.column) is not None]
        if not held_out:
            raise InputError(f"no row to evaluate has the column {self.column!r}")
        front, ids = self.front, []
        error = colour = 0.0
        with evaluating(self):
            for i in range(0, len(held_out), batch_size):
                batch = self.collate([self.read(r) for r in held_out[i : i + batch_size]]).to(self.device)
                pixels = batch[self.column]["pixels"].float() / 255
                ids.append(front.encode(batch[self.column]))
                rebuilt = front.decode(ids[-1], torch.uint8).float() / 255
                flat = F.interpolate(F.avg_pool2d(pixels, front.factor), scale_factor=front.factor)
                error += float((rebuilt - pixels).square().mean((1, 2, 3)).sum())
                colour += float((flat - pixels).square().mean((1, 2, 3)).sum())
        use = codebook_use(torch.cat(ids), front.codebook_size)
        mse = error / len(held_out)
        return {
            "mse": mse,
            "psnr": -10 * math.log10(max(mse, 1e-10)),
            "mse_colour": colour / len(held_out),
            **{k: float(v) for k, v in use.items()},
            "bits": front.count * math.log2(front.codebook_size),
        }


def from_autoencoder(folder: str, dim: int | None = None) -> DiscreteTokenizer:
    """Loads the frozen tokenizer of a saved `Autoencoder`, for use in another model; recipes may name it as a class.

    Args:
        folder: a folder written by `Autoencoder.save`, such as ``runs/autoencoder_emoji/last``.
        dim: width of its tokens. None: the saved width; another width initialises new embeddings, codes stay the same.

    Raises:
        InputError: the folder is not a saved `Autoencoder` or `DiscreteTokenizer`.
    """
    model = load(folder)
    front = model.front if isinstance(model, Autoencoder) else model
    if not isinstance(front, DiscreteTokenizer):
        raise InputError(f"{folder} holds a {type(model).__name__}, expected an Autoencoder")
    if dim is not None and dim != front.dim:
        resized = DiscreteTokenizer(**(front.config_args() | {"dim": dim}))
        load_strictly(resized.codec, front.codec.state_dict(), folder)
        front = resized
    return front.freeze()
