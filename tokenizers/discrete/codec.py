"""The autoencoder between images and codes: convolutions around a quantizer."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.tokenizers.discrete.quantize import Quantizer


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a skip connection; norms are per image, so other images of a batch have no effect."""

    def __init__(self, width: int) -> None:
        super().__init__()
        groups = next(g for g in (8, 4, 2, 1) if width % g == 0)
        self.norm1, self.conv1 = nn.GroupNorm(groups, width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, width), nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)  # a block starts as the identity
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class Codec(nn.Module):
    """Autoencoder: one strided convolution to the grid of ids, residual blocks at that resolution, and back.

    Its weights keep the precision in which they were created, whatever `.to(dtype)` requests: ids must not change
    because the model around runs in half precision.

    Args:
        factor: side in pixels of the patch of one id.
        width: channels of the convolutions.
        depth: residual blocks in the encoder and in the decoder.
        quantizer: from vectors to ids.
    """

    def __init__(self, factor: int, width: int, depth: int, quantizer: Quantizer) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, factor, stride=factor),
            *[ResidualBlock(width) for _ in range(depth)],
            nn.Conv2d(width, quantizer.width, 1),
        )
        self.quantizer = quantizer
        self.decoder = nn.Sequential(
            nn.Conv2d(quantizer.width, width, 3, padding=1),
            *[ResidualBlock(width) for _ in range(depth)],
            nn.Conv2d(width, 3 * factor**2, 1),
            nn.PixelShuffle(factor),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Codec:
        def keep_dtype(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device) if out.dtype != t.dtype else out

        return super()._apply(keep_dtype, recurse)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, 3, H, W) in [-1, 1] -> the reconstruction, ids (B, h, w), the loss of the quantizer."""
        z = self.encoder(pixels).movedim(1, -1)
        codes, ids, loss = self.quantizer(z)
        return self.decoder(codes.movedim(-1, 1)), ids, loss
