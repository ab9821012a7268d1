"""Triplanes -> Tokens, and any front-end's tokens resampled to a fixed number of learned latents.

Shapes: B samples, C channels, N tokens, L latents, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worldtokens.backbone.resampler import Resampler
from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.latents.read import read_triplane
from worldtokens.tokenizers.patches import grid_coords, grid_size, patchify, sides, sincos_positions
from worldtokens.tokens import Tokens

# for each plane, the axes of its rows and columns, as indices into (z, y, x)
PLANES = ((1, 2), (0, 2), (0, 1))


class TriplaneTokenizer(Tokenizer):
    """Three feature planes of a scene (EG3D, Chan et al. 2022) -> one token per patch of each plane.

    The planes are (y, x), (z, x) and (z, y), rows first. A token's `pos` is its patch index along the plane's two axes and
    -1 along the third, so all positions are distinct. Sin-cos embeddings of `pos` and a learned embedding of the plane
    are added.

    Args:
        dim: width D of the tokens, at least 6.
        channels: channels C of the planes.
        patch: side of a patch in cells, or (height, width).

    Raises:
        InputError: a setting is out of its range.
    """

    modality = "latents"

    def __init__(self, dim: int, channels: int, patch: int | tuple[int, int] = 1) -> None:
        super().__init__()
        (self.dim,), (self.channels,) = sides(dim, 1, "dim"), sides(channels, 1, "channels")
        self.patch = sides(patch, 2, "patch")
        sincos_positions(torch.zeros(1, 3), dim)  # raises now if dim is too small
        self.proj = nn.Linear(channels * math.prod(self.patch), dim)
        self.plane_embed = nn.Parameter(torch.empty(3, dim))
        nn.init.normal_(self.plane_embed, std=0.02)

    def read(self, source: Any) -> Tensor:
        """Planes -> (3, C, H, W) float32, see `read.read_triplane`.

        Raises:
            InputError: it cannot be read, has another shape, or is not finite; names the file.
        """
        return read_triplane(source, self.channels, self.patch)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw planes -> `patches` (B, N, C ph pw), `coords` (B, N, 3) and `plane` (B, N) int64, `lengths`."""
        if not len(raws):
            raise InputError("no planes to collate: expected at least one sample")
        patches, coords, plane = [], [], []
        for i, raw in enumerate(raws):
            if not isinstance(raw, Tensor) or raw.ndim != 4 or raw.shape[:2] != (3, self.channels):
                found = tuple(raw.shape) if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(f"sample {i} of the batch is {found}, expected (3, {self.channels}, H, W)")
            cells = grid_coords(grid_size(raw.shape[2:], self.patch))  # (n, 2)
            n = len(cells)
            pos = torch.full((3, n, 3), -1)
            for p, axes in enumerate(PLANES):
                pos[p][:, list(axes)] = cells
            patches.append(patchify(raw, self.patch).flatten(0, 1))
            coords.append(pos.flatten(0, 1))
            plane.append(torch.arange(3).repeat_interleave(n))
        pad = nn.utils.rnn.pad_sequence
        return Batch(
            patches=pad(patches, batch_first=True),
            coords=pad(coords, batch_first=True),
            plane=pad(plane, batch_first=True),
            lengths=tuple(map(len, patches)),
        )

    def forward(self, batch: Batch) -> Tokens:
        """A batch on the model's device -> Tokens (B, N, D)."""
        x = self.proj(batch["patches"].to(self.proj.weight.dtype))
        x = x + sincos_positions(batch["coords"], self.dim).to(x.dtype) + self.plane_embed[batch["plane"]]
        return self.wrap(x, batch["lengths"], "bidirectional", pos=batch["coords"].float())


class LatentTokenizer(Tokenizer):
    """A triplane, or the tokens of another front-end, optionally resampled to L learned latents (Perceiver).

    Give exactly one of `channels` and `tokenizer`::

        LatentTokenizer(384, channels=32)                              # a triplane, one token per patch
        LatentTokenizer(384, channels=32, latents=64)                  # the same, resampled to 64 tokens
        LatentTokenizer(384, tokenizer=PointTokenizer(256), latents=64)  # any point cloud as 64 tokens

    Without `latents` the output is that of `TriplaneTokenizer`. With `latents` every sample becomes L tokens, whatever its
    size, and `pos` is their index along t.

    Args:
        dim: width D of the tokens.
        channels: channels C of the triplane.
        patch: side of a triplane patch in cells, or (height, width).
        tokenizer: another front-end, of any width.
        latents: tokens L per sample; None: no resampling.
        depth, heads: depth and number of heads of the `Resampler`.

    Raises:
        InputError: both or neither of `channels` and `tokenizer` are given, or `tokenizer` without `latents`.
    """

    modality = "latents"

    def __init__(
        self,
        dim: int,
        channels: int | None = None,
        patch: int | tuple[int, int] = 1,
        tokenizer: Tokenizer | None = None,
        latents: int | None = None,
        depth: int = 2,
        heads: int = 8,
    ) -> None:
        super().__init__()
        if (channels is None) == (tokenizer is None):
            raise InputError("give either channels= (a triplane) or tokenizer= (another front-end)")
        if tokenizer is not None and latents is None:
            raise InputError("tokenizer= needs latents=, the number of tokens per sample")
        (self.dim,) = sides(dim, 1, "dim")
        # not named `tokenizer`: a triplane's front-end is not an argument
        self.base: Tokenizer
        if tokenizer is not None:
            self.base = tokenizer
        elif channels is not None:
            self.base = TriplaneTokenizer(dim, channels, patch)
        self.resampler: Resampler | None = None
        if latents is not None:
            sides(latents, 1, "latents")
            if dim % heads:
                raise InputError(f"heads={heads} must divide dim={dim}")
            self.resampler = Resampler(dim, latents, depth, heads, context_dim=self.base.dim)

    def read(self, source: Any) -> Tensor:
        """Planes (3, C, H, W), or `read` of `tokenizer`."""
        return self.base.read(source)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """`collate` of the triplane's or the given front-end."""
        return self.base.collate(raws)

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """A batch on the model's device -> Tokens (B, N or L, D)."""
        tokens = self.base(batch)
        return tokens if self.resampler is None else self.resampler(tokens)
