"""Settings of the patch embedding that a composer rarely sets: position table, coordinates, bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.image.preprocess import check_choice
from worldtokens.tokenizers.patches import POSITION_INTERPOLATIONS, sides


@dataclass(frozen=True)
class PatchEmbedConfig:
    """Patch projection and positions of `ImageTokenizer`.

    Args:
        bias: give the patch projection a bias.
        position_grid: side, or (rows, columns), of the learned position table; None: the patches of `size`, or the
            largest square within `max_tokens`.
        interpolation: how learned positions are interpolated to another grid: ``"bicubic"`` or ``"bilinear"`` (both
            anti-aliased, as in timm), ``"bicubic_aspect"`` (over the square of the longer side, which keeps the aspect
            ratio: timm's `pos_embed_ar_preserving`) or ``"bicubic_no_antialias"`` (transformers).
        span: scale the coordinates `pos` so that every image's grid has this side, or (rows, columns): rotary positions
            are then those of the training size. None: in patches.
        centred: with `span`, measure `pos` from the centre of the image to the centres of the patches, as DINOv3 does.

    Raises:
        InputError: a setting is out of its range.
    """

    bias: bool = True
    position_grid: int | tuple[int, int] | None = None
    interpolation: str = "bicubic"
    span: float | tuple[float, float] | None = None
    centred: bool = False

    def __post_init__(self) -> None:
        check_choice("interpolation of positions", self.interpolation, POSITION_INTERPOLATIONS)
        if self.position_grid is not None:
            object.__setattr__(self, "position_grid", sides(self.position_grid, 2, "position_grid"))
        if self.span is not None:
            span = (self.span, self.span) if isinstance(self.span, int | float) else tuple(self.span)
            if len(span) != 2 or not all(isinstance(v, int | float) and v > 0 for v in span):
                raise InputError(f"span is {self.span!r}, expected a number above 0 or two")
            object.__setattr__(self, "span", span)
        elif self.centred:
            raise InputError("centred=True measures within a span: set span=")

    def scale(self, grid: Sequence[int]) -> tuple[float, ...]:
        """Factor on the coordinates of a grid that makes it as large as `span`."""
        assert isinstance(self.span, tuple)
        return tuple(s / g for s, g in zip(self.span, grid, strict=True))

    def scaled(self, coords: Tensor, scale: Tensor) -> Tensor:
        """Coordinates in patches -> coordinates within `span`."""
        if not self.centred:
            return coords * scale
        return (coords + 0.5) * scale - 0.5 * torch.tensor(self.span, device=coords.device)
