"""The spaces of a diffusion model: pixels of an ImageTokenizer, or latents of a DiscreteTokenizer's codec.

A space has four methods: `clean` (a batch as values of about unit scale), `embed` (noisy values to Tokens), `unfold` (the
trunk's output per token to the shape of `clean`) and `images` (values to images).

Shapes: B images, N tokens, P values per token, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tasks.classification.mixing import normalized_images
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.discrete.tokenizer import DiscreteTokenizer
from worldtokens.tokenizers.image.tokenizer import ImageTokenizer
from worldtokens.tokenizers.patches import grid_coords, grid_size, sides, sincos_positions, unpatchify
from worldtokens.tokens import Tokens


class Space(Protocol):
    """Methods of a space; `front` is the tokenizer that the space was made for."""

    values: int  # P

    def shape(self, front: Any, size: int | Sequence[int] | None = None) -> tuple[int, ...]: ...
    def clean(self, front: Any, batch: Batch | Tensor) -> Tensor: ...
    def embed(self, front: Any, x: Tensor) -> Tokens: ...
    def unfold(self, front: Any, out: Tensor, like: Tensor) -> Tensor: ...
    def images(self, front: Any, x: Tensor) -> list[Image.Image]: ...


def make_space(front: Tokenizer) -> Space:
    """The space of a tokenizer.

    Raises:
        ValueError: the tokenizer has no space.
    """
    if isinstance(front, ImageTokenizer):
        return Pixels(front)
    if isinstance(front, DiscreteTokenizer):
        return Codes(front)
    raise ValueError(f"the target needs an ImageTokenizer or a DiscreteTokenizer, got {type(front).__name__}")


class Pixels(nn.Module):
    """Normalised pixels, (B, 3, H, W).

    Tokens are the tokenizer's patch embeddings; `unfold` is the exact inverse of its patchify.
    """

    def __init__(self, front: ImageTokenizer) -> None:
        super().__init__()
        if (
            front.size is None
            or front.preprocess.resize == "pad"
            or any(s % p for s, p in zip(front.size, front.patch, strict=True))
        ):
            raise ValueError(
                f"size={front.size}, patch={front.patch}, resize={front.preprocess.resize!r}: a target needs one image "
                "size, a multiple of the patch, and resize='crop' or 'squash'"
            )
        self.values = front.proj.in_features

    def shape(self, front: ImageTokenizer, size: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """Shape of one image: (3, H, W), at the tokenizer's size or another.

        Raises:
            InputError: a side is not a multiple of the patch.
        """
        size = front.size if size is None else sides(size, 2, "size")
        if any(s % p for s, p in zip(size, front.patch, strict=True)):
            raise InputError(f"size is {size}, expected multiples of the patch {front.patch}")
        return 3, *size

    def clean(self, front: ImageTokenizer, batch: Batch | Tensor) -> Tensor:
        """A tokenizer's batch, or normalised floats (returned unchanged), as (B, 3, H, W) float32."""
        return normalized_images(front, batch)

    def embed(self, front: ImageTokenizer, x: Tensor) -> Tokens:
        """(B, 3, H, W) -> (B, N, D)"""
        return front(x)

    def unfold(self, front: ImageTokenizer, out: Tensor, like: Tensor) -> Tensor:
        """(B, N, P) -> (B, 3, H, W)"""
        return unpatchify(out[:, front.prefix :], front.patch, grid_size(like.shape[2:], front.patch))

    def images(self, front: ImageTokenizer, x: Tensor) -> list[Image.Image]:
        """(B, 3, H, W) -> B PIL images."""
        mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (front.mean, front.std))
        return _to_pil(x.float() * std + mean)


class Codes(nn.Module):
    """Codes of a frozen image codec, (B, W, h, w): latent diffusion (Rombach et al. 2022).

    Codes are divided by `scale`; sampled codes go to the codec's decoder without quantisation. Each grid position is one
    token, with sin-cos positions.
    """

    def __init__(self, front: DiscreteTokenizer) -> None:
        super().__init__()
        self.values = front.codec.quantizer.width
        self.project = nn.Linear(self.values, front.dim)
        # set from the first training batch, saved with the model
        self.register_buffer("scale", torch.zeros(()))
        nn.init.normal_(self.project.weight, std=self.values**-0.5)
        nn.init.zeros_(self.project.bias)
        front.freeze()
        front.requires_grad_(False)  # token ids and their embeddings are not used

    def shape(self, front: DiscreteTokenizer, size: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """Shape of one image's codes: (W, h, w).

        Raises:
            InputError: a side is not a multiple of the codec's factor.
        """
        size = front.size if size is None else sides(size, 2, "size")
        if any(s % front.factor for s in size):
            raise InputError(f"size is {size}, expected multiples of {front.factor}")
        return self.values, *(s // front.factor for s in size)

    @torch.no_grad()
    def clean(self, front: DiscreteTokenizer, batch: Batch | Tensor) -> Tensor:
        """Codes of a tokenizer's batch, or of images: (B, W, h, w) float32 of unit standard deviation."""
        codes = front.codec.quantizer.codes(front.encode(batch)).movedim(-1, 1).float()
        first = (self.scale == 0) & self.training
        self.scale.copy_(torch.where(first, codes.std().clamp(min=1e-6), self.scale))
        return codes / torch.where(self.scale == 0, 1.0, self.scale)

    def embed(self, front: DiscreteTokenizer, x: Tensor) -> Tokens:
        """(B, W, h, w) -> (B, N, D)"""
        b, _, h, w = x.shape
        coords = grid_coords((h, w), x.device)
        tokens = self.project(x.flatten(2).transpose(1, 2)) + sincos_positions(coords, front.dim).to(x.dtype)
        pos = nn.functional.pad(coords.float(), (1, 0)).expand(b, -1, -1)
        return front.wrap(tokens, (h * w,) * b, "bidirectional", pos=pos)

    def unfold(self, front: DiscreteTokenizer, out: Tensor, like: Tensor) -> Tensor:
        """(B, N, W) -> (B, W, h, w)"""
        return out.transpose(1, 2).unflatten(2, like.shape[2:])

    @torch.no_grad()
    def images(self, front: DiscreteTokenizer, x: Tensor) -> list[Image.Image]:
        """(B, W, h, w) -> B PIL images."""
        with torch.autocast(x.device.type, enabled=False):
            return _to_pil((front.codec.decoder(x.float() * self.scale) + 1) / 2)


def _to_pil(x: Tensor) -> list[Image.Image]:
    """(B, 3, H, W) in [0, 1] -> PIL images."""
    levels = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(each) for each in levels]
