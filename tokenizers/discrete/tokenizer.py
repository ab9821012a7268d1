"""Images -> ids of a codebook -> images, so that a language model can read and generate them.

    tok = wt.DiscreteTokenizer(dim=256)          # 64 x 64 pixels -> 8 x 8 ids out of 1,000
    tok.loss(tok.collate([tok.read("a.png")]))   # train it as an autoencoder first
    ids = tok.encode(images)                     # (B, 8, 8)
    tok.decode(ids, torch.uint8)                 # (B, 3, 64, 64)
    tok.freeze()                                 # then use it as a front-end: Tokens with ids

Notable:

- the autoencoder keeps float32 weights whatever the model around runs in: rounded weights would change ids;
- encoding has no gradient, so the loss of a language model trains the embedding only.

Shapes: B images, H x W pixels, h x w ids, N = h * w, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.discrete.codec import Codec
from worldtokens.tokenizers.discrete.quantize import FSQ, Quantizer, codebook_use
from worldtokens.tokenizers.image.preprocess import check_rgb
from worldtokens.tokenizers.image.read import read_image
from worldtokens.tokenizers.patches import grid_coords, sides
from worldtokens.tokens import Tokens


class DiscreteTokenizer(Tokenizer):
    """Images -> a grid of ids of a codebook, row by row, each embed_ids with its position.

    An image is scaled to cover `size` and centre-cropped. Attention is bidirectional, or with `causal` from left to
    right behind a start token, as in a language model; `vocab_size` counts the start token, whose id is the last.

    A token's `pos` is (0, y, x) in the grid, and with `causal` (index in the sequence, y, x).

    Args:
        dim: width D of the tokens.
        size: side in pixels, or (height, width); a multiple of `factor`.
        factor: side in pixels of the patch of one id.
        width: channels of the autoencoder.
        depth: residual blocks in the encoder and in the decoder.
        quantizer: `FSQ` or `VectorQuantizer`, or another `Quantizer`. None: ``FSQ((8, 5, 5, 5))``, 1,000 codes.
        causal: put a start token first and attend from left to right.
        background: RGB, 0 to 255, under transparency.
        frozen: do not train the autoencoder, see `freeze`.

    Raises:
        InputError: a setting is out of its range.
    """

    modality = "discrete"
    end_id = None  # an image ends after N ids

    def __init__(
        self,
        dim: int,
        size: int | tuple[int, int] = 64,
        factor: int = 8,
        width: int = 128,
        depth: int = 2,
        quantizer: Quantizer | None = None,
        causal: bool = True,
        background: tuple[int, int, int] = (255, 255, 255),
        frozen: bool = False,
    ) -> None:
        super().__init__()
        (self.dim,), (self.factor,) = sides(dim, 1, "dim"), sides(factor, 1, "factor")
        (width,), (depth,) = sides(width, 1, "width"), sides(depth, 1, "depth")
        self.size = sides(size, 2, "size")
        if any(s % factor for s in self.size):
            raise InputError(
                f"size {self.size} is not a multiple of factor={factor}: some pixels would have no id"
            )
        self.grid = (self.size[0] // factor, self.size[1] // factor)
        self.background, self.causal = check_rgb(background), causal
        quantizer = FSQ() if quantizer is None else quantizer
        if not isinstance(quantizer, Quantizer):
            raise InputError(
                f"quantizer is a {type(quantizer).__name__}, expected FSQ, VectorQuantizer or another"
            )
        self.codec = Codec(factor, width, depth, quantizer)
        self.codebook_size = quantizer.size
        self.start_id = quantizer.size if causal else None
        self.vocab_size = quantizer.size + causal
        self.count = self.grid[0] * self.grid[1]  # ids of an image
        self.embedding = nn.Embedding(self.vocab_size, dim)
        self.pos_embed = nn.Parameter(torch.empty(self.count + causal, dim))
        # of the same scale, or ids would dominate positions
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.02)
        self.frozen = False
        self.freeze(frozen)

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        args = super().config_args(folder)
        # current values: the quantizer is in the codec, and may be the default
        return args | {"frozen": self.frozen, "quantizer": self.codec.quantizer}

    def freeze(self, frozen: bool = True) -> DiscreteTokenizer:
        """Stop (or resume) training of the autoencoder, so that ids do not change."""
        self.frozen = frozen
        self.codec.requires_grad_(not frozen)
        return self.train(self.training)

    def train(self, mode: bool = True) -> DiscreteTokenizer:
        super().train(mode)
        self.codec.train(mode and not self.frozen)
        return self

    # ---- raw images ----------------------------------------------------------------------------------------

    def read(self, source: Any) -> Tensor:
        """One image -> RGB uint8 (3, H, W), upright, of any size; see `read_image` for the sources accepted.

        Raises:
            InputError: it cannot be read; names the file.
        """
        return read_image(source, background=self.background)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw images -> `pixels` (B, 3, H, W) uint8 of the fixed size.

        Raises:
            InputError: a raw image is not uint8 (3, H, W), or the list is empty.
        """
        if not len(raws):
            raise InputError("no image to collate: expected at least one")
        h, w = self.size
        pixels = np.empty((len(raws), h, w, 3), np.uint8)
        for i, (out, raw) in enumerate(zip(pixels, raws, strict=True)):
            is_bytes = isinstance(raw, Tensor) and raw.dtype == torch.uint8
            if not is_bytes or raw.ndim != 3 or raw.shape[0] != 3 or not raw.numel():
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(
                    f"image {i} of the batch is {found}, expected uint8 (3, H, W) as read() returns"
                )
            a = np.ascontiguousarray(raw.permute(1, 2, 0).numpy())
            if a.shape[:2] != (h, w):
                a = np.asarray(ImageOps.fit(Image.fromarray(a), (w, h), Image.Resampling.BICUBIC))
            out[:] = a
        return Batch(pixels=torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous())

    # ---- the autoencoder -------------------------------------------------------------------------------------

    def loss(self, batch: Batch | Tensor) -> dict[str, Tensor]:
        """Reconstruction loss for training the autoencoder.

        Args:
            batch: from `collate`, or images (B, 3, H, W): uint8, or floats in [0, 1].

        Returns:
            `loss`, to be minimised; `mse`, the squared error of values in [0, 1]; `used` and `perplexity` of the
            codebook within this batch.
        """
        pixels = self._pixels(batch)
        rebuilt, ids, extra = self.codec(pixels)
        error = F.mse_loss(rebuilt.float(), pixels)
        use = codebook_use(ids, self.codebook_size)
        return {"loss": error + extra, "mse": error.detach() / 4, **use}

    @torch.no_grad()
    def encode(self, images: Batch | Tensor) -> Tensor:
        """Images -> ids (B, h, w) int64, the same in every precision.

        Args:
            images: from `collate`, or (B, 3, H, W): uint8, or floats in [0, 1].
        """
        pixels = self._pixels(images)
        with torch.autocast(pixels.device.type, enabled=False):
            return self.codec.quantizer.ids(self.codec.encoder(pixels).movedim(1, -1))

    @torch.no_grad()
    def decode(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Ids -> images.

        Args:
            ids: (B, h, w) or (B, h * w); a start token in front is dropped.
            dtype: a float type for values in [0, 1], or torch.uint8.

        Returns:
            (B, 3, H, W).

        Raises:
            InputError: another number of ids, or one outside the codebook.
        """
        if ids.is_floating_point() or ids.ndim not in (2, 3):
            raise InputError(
                f"ids are {ids.dtype} {tuple(ids.shape)}, expected whole numbers, (B, h, w) or (B, h * w)"
            )
        flat = ids.flatten(1).long()
        if self.causal and ids.ndim == 2 and flat.shape[1] == self.count + 1:
            flat = flat[:, 1:]
        if flat.shape[1] != self.count or (ids.ndim == 3 and tuple(ids.shape[1:]) != self.grid):
            raise InputError(
                f"ids are {tuple(ids.shape)}, expected {self.count} per image, a grid of {self.grid}"
            )
        low, high = (int(flat.min()), int(flat.max())) if flat.numel() else (0, 0)
        if low < 0 or high >= self.codebook_size:
            raise InputError(
                f"ids run from {low} to {high}, expected 0 to {self.codebook_size - 1}; when sampling, exclude the "
                f"start token {self.start_id}"
            )
        flat = flat.to(self.pos_embed.device)
        with torch.autocast(flat.device.type, enabled=False):
            codes = self.codec.quantizer.codes(flat.unflatten(1, self.grid))
            pixels = (self.codec.decoder(codes.movedim(-1, 1)).clamp(-1, 1) + 1) / 2
        return (pixels * 255).round().to(torch.uint8) if dtype == torch.uint8 else pixels.to(dtype)

    def usage(self, images: Batch | Tensor) -> dict[str, float]:
        """Use of the codebook by these images: `used` (share of codes) and `perplexity`."""
        return {k: float(v) for k, v in codebook_use(self.encode(images), self.codebook_size).items()}

    def _pixels(self, images: Batch | Tensor) -> Tensor:
        """A batch, uint8 or floats in [0, 1] -> (B, 3, H, W) float32 in [-1, 1]."""
        pixels = images if isinstance(images, Tensor) else images["pixels"]
        right_type = pixels.dtype == torch.uint8 or pixels.is_floating_point()
        if not right_type or pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, *self.size):
            raise InputError(
                f"images are {tuple(pixels.shape)} {pixels.dtype}, expected (B, 3, {self.size[0]}, {self.size[1]}), uint8 "
                "or floats in [0, 1]; read() and collate() convert files"
            )
        return pixels.float() / (127.5 if pixels.dtype == torch.uint8 else 0.5) - 1

    # ---- tokens ----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """A batch on the model's device -> Tokens with `ids`, (B, N, dim), or (B, 1 + N, dim) with `causal`.

        Args:
            batch: from `collate`, or images (B, 3, H, W): uint8, or floats in [0, 1].
        """
        return self.embed_ids(self.encode(batch).flatten(1))

    def embed_ids(self, ids: Tensor) -> Tokens:
        """Ids (B, N) without start token -> Tokens, as `forward` returns them: for data that was encoded before."""
        pos = F.pad(grid_coords(self.grid, ids.device).float(), (1, 0))  # (N, 3): (0, y, x)
        if self.causal:
            ids = F.pad(ids, (1, 0), value=self.start_id)
            pos = F.pad(pos, (0, 0, 1, 0))
            pos[:, 0] = torch.arange(len(pos), device=ids.device)
        order = "causal" if self.causal else "bidirectional"
        b, n = ids.shape
        return self.wrap(self.embed(ids), (n,) * b, order, ids=ids, pos=pos.expand(b, -1, -1))

    def embed(self, ids: Tensor, offset: int = 0) -> Tensor:
        """Ids (B, n), start token included -> embeddings (B, n, dim); the first id is at position `offset`."""
        return self.embedding(ids) + self.pos_embed[offset : offset + ids.shape[1]]
