"""What is already latent -> Tokens: triplanes, and any front-end's tokens read into a fixed number of learned latents.

Shapes: B samples, C channels, N tokens, L latents, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from worldtokens.backbone.resampler import Resampler
from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.files import read_arrays, read_bytes
from worldtokens.tokenizers.patches import grid_coords, grid_of, patchify, sides, sincos_positions
from worldtokens.tokens import Tokens

MAX_VALUES = 1 << 26  # of one sample; 256 MB
# the two axes, as places in (z, y, x), that the rows and columns of each plane run along
PLANES = ((1, 2), (0, 2), (0, 1))


class TriplaneTokenizer(Tokenizer):
    """Three feature planes of a scene (EG3D, Chan et al. 2022) -> a token for each patch of each plane.

    The planes are (y, x), (z, x) and (z, y), rows first. A token's `pos` is its patch's place along the plane's two axes
    and -1 along the third, as if the planes were three walls of a box: all places differ. Sin-cos positions of that and
    a learned vector for each plane are added.

    Args:
        dim: width D of the tokens, at least 6.
        channels: C of the planes.
        patch: side of a patch in cells, or (height, width).

    Raises:
        InputError: a setting is out of its range.
    """

    modality = "latents"

    def __init__(self, dim: int, channels: int, patch: int | tuple[int, int] = 1) -> None:
        super().__init__()
        (self.dim,), (self.channels,) = sides(dim, 1, "dim"), sides(channels, 1, "channels")
        self.patch = sides(patch, 2, "patch")
        sincos_positions(torch.zeros(1, 3), dim)  # says so now if dim is too small
        self.proj = nn.Linear(channels * math.prod(self.patch), dim)
        self.plane = nn.Parameter(torch.empty(3, dim))
        nn.init.normal_(self.plane, std=0.02)

    def read(self, source: Any) -> Tensor:
        """Planes -> (3, C, H, W) float32.

        Args:
            source: a tensor or ndarray of that shape, or an .npy or .npz file (path, bytes, binary file) that holds one,
                under the name `planes` if it holds several.

        Raises:
            InputError: it cannot be read, or is not finite numbers of that shape, the sides multiples of `patch`.
        """
        if isinstance(source, np.ndarray | Tensor):
            name, a = f"<{type(source).__name__.lower()}>", source
        else:
            name, data, _ = read_bytes(source, ("npy", "npz"))
            arrays = read_arrays(data, name)
            a = arrays.get("planes", next(iter(arrays.values()), None) if len(arrays) == 1 else None)
            if a is None:
                raise InputError(
                    f"{name}: holds {sorted(arrays)[:8]}, expected `planes` (3, {self.channels}, H, W)"
                )
        numbers = a.is_floating_point() if isinstance(a, Tensor) else a.dtype.kind in "fiu"
        if a.ndim != 4 or a.shape[0] != 3 or a.shape[1] != self.channels or not numbers:
            raise InputError(
                f"{name}: is {a.dtype} of shape {tuple(a.shape)}, expected floats (3, {self.channels}, H, W)"
            )
        if not 0 < math.prod(a.shape) <= MAX_VALUES or any(
            s % p for s, p in zip(a.shape[2:], self.patch, strict=True)
        ):
            raise InputError(
                f"{name}: planes of {a.shape[2]}x{a.shape[3]} cells, expected sides that are multiples of the patch "
                f"{self.patch} and no more than {MAX_VALUES:,} values"
            )
        planes = torch.as_tensor(a).detach().cpu().float()
        if not bool(planes.isfinite().all()):
            raise InputError(f"{name}: holds NaN or infinity")
        return planes

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw planes -> `patches` (B, N, C ph pw), `coords` (B, N, 3) and `plane` (B, N) int64, `lengths`."""
        if not len(raws):
            raise InputError("no planes to collate: expected at least one sample")
        patches, coords, plane = [], [], []
        for i, raw in enumerate(raws):
            if not isinstance(raw, Tensor) or raw.ndim != 4 or raw.shape[:2] != (3, self.channels):
                found = tuple(raw.shape) if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(f"sample {i} of the batch is {found}, expected (3, {self.channels}, H, W)")
            cells = grid_coords(grid_of(raw.shape[2:], self.patch))  # (n, 2)
            n = len(cells)
            where = torch.full((3, n, 3), -1)
            for p, axes in enumerate(PLANES):
                where[p][:, list(axes)] = cells
            patches.append(patchify(raw, self.patch).flatten(0, 1))
            coords.append(where.flatten(0, 1))
            plane.append(torch.arange(3).repeat_interleave(n))
        pad = nn.utils.rnn.pad_sequence
        return Batch(
            patches=pad(patches, batch_first=True),
            coords=pad(coords, batch_first=True),
            plane=pad(plane, batch_first=True),
            lengths=tuple(map(len, patches)),
        )

    def forward(self, batch: Batch) -> Tokens:
        """A batch on the model's device -> (B, N, D)."""
        x = self.proj(batch["patches"].to(self.proj.weight.dtype))
        x = x + sincos_positions(batch["coords"], self.dim).to(x.dtype) + self.plane[batch["plane"]]
        return self.wrap(x, batch["lengths"], "bidirectional", pos=batch["coords"].float())


class LatentTokenizer(Tokenizer):
    """Latents of anything: a triplane, or what another front-end makes, read by learned latents (Perceiver).

    Exactly one of `channels` and `tokenizer` is given::

        LatentTokenizer(384, channels=32)                              # a triplane, a token a patch
        LatentTokenizer(384, channels=32, latents=64)                  # the same, read into 64 tokens
        LatentTokenizer(384, tokenizer=PointTokenizer(256), latents=64)  # any cloud as 64 tokens

    Without `latents` the tokens of the planes are given as they are, with `pos` along the planes' axes (see
    `TriplaneTokenizer`). With it each sample becomes so many tokens, whatever its size, and t counts them.

    Args:
        dim: width D of the tokens.
        channels: C of the triplane.
        patch: of the triplane, in cells.
        tokenizer: another front-end, of any width.
        latents: tokens L of a sample; None: those of the front-end.
        depth, heads: of the `Resampler`.

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
            raise InputError("give either channels= (a triplane) or tokenizer= (a front-end to read from)")
        if tokenizer is not None and latents is None:
            raise InputError("tokenizer= needs latents=, the number of tokens that each sample becomes")
        (self.dim,) = sides(dim, 1, "dim")
        # not named `tokenizer`, since the planes' front-end is not an argument
        self.front = TriplaneTokenizer(dim, channels, patch) if tokenizer is None else tokenizer
        self.resampler = None
        if latents is not None:
            sides(latents, 1, "latents")
            if dim % heads:
                raise InputError(f"heads={heads} must divide dim={dim}")
            self.resampler = Resampler(dim, latents, depth, heads, context_dim=self.front.dim)

    def read(self, source: Any) -> Tensor:
        """As the front-end below reads: planes (3, C, H, W), or what `tokenizer` takes."""
        return self.front.read(source)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """As the front-end below collates."""
        return self.front.collate(raws)

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """A batch on the model's device -> (B, N or L, D)."""
        tokens = self.front(batch)
        return tokens if self.resampler is None else self.resampler(tokens)
