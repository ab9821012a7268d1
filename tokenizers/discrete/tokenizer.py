"""Images -> whole numbers -> images, so that a language model can read and draw them.

    tok = wt.DiscreteTokenizer(dim=256)          # 64 x 64 pixels -> 8 x 8 ids out of 1,000
    tok.loss(tok.collate([tok.read("a.png")]))   # train it as an autoencoder first
    ids = tok.encode(images)                   # (B, 8, 8)
    tok.decode(ids, torch.uint8)                 # (B, 3, 64, 64)
    tok.freeze()                                 # then as a front-end: Tokens with ids

Notable: the autoencoder keeps float32 weights whatever the rest runs in, because a rounded weight would give an image
other ids; and its ids are made without a gradient, so a language model's loss trains the embedding alone.

Shapes: B images, H x W pixels, h x w ids, N = h * w, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.discrete.quantize import FSQ, Quantizer, codebook_use
from worldtokens.tokenizers.image.read import read_image
from worldtokens.tokenizers.patches import grid_coords, sides
from worldtokens.tokens import Tokens


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a straight path; norms are over one image, so no batch mate matters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        groups = next(g for g in (8, 4, 2, 1) if width % g == 0)
        self.norm1, self.conv1 = nn.GroupNorm(groups, width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, width), nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)  # a block begins as the straight path alone
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class Codec(nn.Module):
    """The autoencoder: one strided convolution down to the grid of ids, all the work at that size, and back.

    Its weights stay in the precision that they were made in, whatever `.to(dtype)` asks: ids must not change
    because the model around runs in half precision.
    """

    def __init__(self, factor: int, width: int, depth: int, quantizer: Quantizer) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, factor, stride=factor),
            *[Residual(width) for _ in range(depth)],
            nn.Conv2d(width, quantizer.width, 1),
        )
        self.quantizer = quantizer
        self.decoder = nn.Sequential(
            nn.Conv2d(quantizer.width, width, 3, padding=1),
            *[Residual(width) for _ in range(depth)],
            nn.Conv2d(width, 3 * factor**2, 1),
            nn.PixelShuffle(factor),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Codec:
        def kept(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device) if out.dtype != t.dtype else out

        return super()._apply(kept, recurse)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, 3, H, W) in [-1, 1] -> the same rebuilt, ids (B, h, w), the quantizer's loss."""
        z = self.encoder(pixels).movedim(1, -1)
        codes, ids, loss = self.quantizer(z)
        return self.decoder(codes.movedim(-1, 1)), ids, loss


class DiscreteTokenizer(Tokenizer):
    """Images -> a grid of ids out of a codebook, row by row, each embedded and told its place.

    An image is scaled to cover `size` and its centre cut out. Tokens read each other, or with `causal` from the first
    to the last behind a start token, as a language model needs them; `vocab_size` counts the start token, whose
    id is the last.

    A token's `pos` is (0, y, x) of its place in the grid, and with `causal` (number in the row, y, x).

    Args:
        dim: width D of the tokens.
        size: side in pixels, or (height, width); a multiple of `factor`.
        factor: pixels along the side of one id's patch.
        width: channels of the autoencoder.
        depth: residual blocks on each side of the codes.
        quantizer: `FSQ` or `VectorQuantizer`, or another `Quantizer`. None: ``FSQ((8, 5, 5, 5))``, 1,000 codes.
        causal: put a start token first and read from left to right.
        background: RGB, 0 to 255, under transparency.
        frozen: the autoencoder is trained no more, see `freeze`.

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
                f"size {self.size} is no multiple of factor={factor}: some pixels would have no id"
            )
        self.grid = (self.size[0] // factor, self.size[1] // factor)
        self.background, self.causal = tuple(background), causal
        if len(self.background) != 3 or any(type(v) is not int or not 0 <= v <= 255 for v in self.background):
            raise InputError(f"background is {background!r}, expected three whole numbers from 0 to 255: RGB")
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
        self.position = nn.Parameter(torch.empty(self.count + causal, dim))
        # as small as a place, or a trunk would hardly see places
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)
        self.frozen = False
        self.freeze(frozen)

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        args = super().config_args(folder)
        # as they are now: the quantizer lives in the codec, and may have been made here
        return args | {"frozen": self.frozen, "quantizer": self.codec.quantizer}

    def freeze(self, frozen: bool = True) -> DiscreteTokenizer:
        """Stop (or take up again) training the autoencoder, so that ids stay what they are."""
        self.frozen = frozen
        self.codec.requires_grad_(not frozen)
        return self.train(self.training)

    def train(self, mode: bool = True) -> DiscreteTokenizer:
        super().train(mode)
        self.codec.train(mode and not self.frozen)
        return self

    # ---- raw images ----------------------------------------------------------------------------------------

    def read(self, source: Any) -> Tensor:
        """One image -> RGB uint8 (3, H, W), upright, of any size; see `image.read_image` for what is taken.

        Raises:
            InputError: it cannot be read; names the file.
        """
        return read_image(source, background=self.background)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw images -> `pixels` (B, 3, H, W) uint8 of the one size.

        Raises:
            InputError: a raw image is not uint8 (3, H, W), or there is none.
        """
        if not len(raws):
            raise InputError("no image to collate: expected at least one")
        h, w = self.size
        pixels = np.empty((len(raws), h, w, 3), np.uint8)
        for i, (out, raw) in enumerate(zip(pixels, raws, strict=True)):
            fits = (
                isinstance(raw, Tensor) and raw.dtype == torch.uint8 and raw.ndim == 3 and raw.shape[0] == 3
            )
            if not fits or not raw.numel():
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(
                    f"image {i} of the batch is {found}, expected uint8 (3, H, W) as read() gives"
                )
            a = np.ascontiguousarray(raw.permute(1, 2, 0).numpy())
            if a.shape[:2] != (h, w):
                a = np.asarray(ImageOps.fit(Image.fromarray(a), (w, h), Image.Resampling.BICUBIC))
            out[:] = a
        return Batch(pixels=torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous())

    # ---- the autoencoder -------------------------------------------------------------------------------------

    def loss(self, batch: Batch | Tensor) -> dict[str, Tensor]:
        """How far images are from what their ids give back, for training the autoencoder.

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
    def encode(self, pictures: Batch | Tensor) -> Tensor:
        """Images -> ids (B, h, w) int64, the same in every precision.

        Args:
            images: from `collate`, or (B, 3, H, W): uint8, or floats in [0, 1].
        """
        pixels = self._pixels(pictures)
        with torch.autocast(pixels.device.type, enabled=False):
            return self.codec.quantizer.ids(self.codec.encoder(pixels).movedim(1, -1))

    @torch.no_grad()
    def decode(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Ids -> images.

        Args:
            ids: (B, h, w) or (B, h * w); a start token in front is left out.
            dtype: a float type for values in [0, 1], or torch.uint8.

        Returns:
            (B, 3, H, W).

        Raises:
            InputError: another count of ids, or one outside the codebook.
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
                f"ids are {tuple(ids.shape)}, expected {self.count} an image, a grid of {self.grid}"
            )
        low, high = (int(flat.min()), int(flat.max())) if flat.numel() else (0, 0)
        if low < 0 or high >= self.codebook_size:
            raise InputError(
                f"ids run from {low} to {high}, expected 0 to {self.codebook_size - 1}; when sampling, leave the start "
                f"token {self.start_id} out of the choice"
            )
        flat = flat.to(self.position.device)
        with torch.autocast(flat.device.type, enabled=False):
            codes = self.codec.quantizer.codes(flat.unflatten(1, self.grid))
            pixels = (self.codec.decoder(codes.movedim(-1, 1)).clamp(-1, 1) + 1) / 2
        return (pixels * 255).round().to(torch.uint8) if dtype == torch.uint8 else pixels.to(dtype)

    def usage(self, pictures: Batch | Tensor) -> dict[str, float]:
        """How much of the codebook these images use: `used` (share of codes) and `perplexity`."""
        return {k: float(v) for k, v in codebook_use(self.encode(pictures), self.codebook_size).items()}

    def _pixels(self, pictures: Batch | Tensor) -> Tensor:
        """Any accepted form -> (B, 3, H, W) float32 in [-1, 1]."""
        pixels = pictures if isinstance(pictures, Tensor) else pictures["pixels"]
        fits = pixels.dtype == torch.uint8 or pixels.is_floating_point()
        if not fits or pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, *self.size):
            raise InputError(
                f"images are {tuple(pixels.shape)} {pixels.dtype}, expected (B, 3, {self.size[0]}, {self.size[1]}), uint8 "
                "or floats in [0, 1]; read() and collate() bring files to that"
            )
        return pixels.float() / (127.5 if pixels.dtype == torch.uint8 else 0.5) - 1

    # ---- tokens ----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """A batch on the model's device -> Tokens with `ids`, (B, N, dim), or (B, 1 + N, dim) with `causal`.

        Args:
            batch: from `collate`, or images (B, 3, H, W): uint8, or floats in [0, 1].
        """
        return self.embedded(self.encode(batch).flatten(1))

    def embedded(self, ids: Tensor) -> Tokens:
        """Ids (B, N) without start token -> Tokens, as `forward` gives them: for data encoded once and kept."""
        pos = F.pad(grid_coords(self.grid, ids.device).float(), (1, 0))  # (N, 3): (0, y, x)
        if self.causal:
            ids = F.pad(ids, (1, 0), value=self.start_id)
            pos = F.pad(pos, (0, 0, 1, 0))
            pos[:, 0] = torch.arange(len(pos), device=ids.device)
        order = "causal" if self.causal else "bidirectional"
        b, n = ids.shape
        return self.wrap(self.embed(ids), (n,) * b, order, ids=ids, pos=pos.expand(b, -1, -1))

    def embed(self, ids: Tensor, offset: int = 0) -> Tensor:
        """Ids (B, n), start token included, -> embeddings (B, n, dim), the first one standing at place `offset`."""
        return self.embedding(ids) + self.position[offset : offset + ids.shape[1]]
