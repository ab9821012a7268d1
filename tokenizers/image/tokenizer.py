"""Images -> Tokens: fixed size, or native aspect with as many patches as the image needs.

Notable:

- pixels are uint8 up to the device and are normalised there: a batch takes a quarter of its float size in transfer;
- fixed-size resizing is Pillow's and gives the bytes of open_clip's and torchvision's transforms;
- a JPEG far larger than needed is decoded at 1/2, 1/4 or 1/8 (`ImagePreprocess.draft`): decoding dominates loading;
- with native aspect every image has its own patch grid, and `forward` still has no loop over images.

Shapes: B images, N patches, D width, P = 3 * ph * pw values per patch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import settings
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.image.embedding import PatchEmbedConfig
from worldtokens.tokenizers.image.preprocess import ImagePreprocess, check_choice
from worldtokens.tokenizers.image.read import read_image
from worldtokens.tokenizers.image.sizes import full_size, native_size
from worldtokens.tokenizers.patches import (
    grid_coords,
    grid_size,
    interpolation_weights,
    pad_to_patches,
    patchify,
    resample_positions,
    sides,
    sincos_positions,
)
from worldtokens.tokens import Tokens

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class ImageTokenizer(Tokenizer):
    """Images -> one token per patch, as in ViT (Dosovitskiy 2020); with native aspect as in NaViT (Dehghani 2023).

    **Fixed size** (`size` given): resized with Pillow, then cut into patches. **Native aspect** (`size=None`): an image
    with at most `max_tokens` patches keeps its pixels; a larger one is scaled down, aspect kept, until its patches fit;
    none is scaled up. A side that is not a multiple of the patch is padded by repeating its last row or column: nothing
    is cropped or distorted (230 px in patches of 16 are 15 patches).

    A token's `pos` is (0, y, x) of its patch. The class token comes first, at (0, 0, 0). Attention within an image is
    bidirectional (block 0).

    Args:
        dim: width D of the tokens.
        patch: side of a patch in pixels, or (height, width).
        size: side in pixels, or (height, width), of every image; None: native aspect.
        max_tokens: native aspect only, the largest number of patches of an image (the class token not counted).
        mean, std: RGB normalisation of values in [0, 1]; default: those of OpenAI's CLIP. Inception's are 0.5.
        positions: ``"learned"`` (a table, interpolated for other grids), ``"sincos"`` (2-D, fixed) or ``"none"``.
        class_token: put a learned token before the patches.
        registers: number of learned tokens between class token and patches (Darcet et al. 2023), at (-1, 0, 0),
            (-2, 0, 0), ...
        preprocess: resize mode, filter, crop, background, JPEG draft decoding; `ImagePreprocess`, a dict of its fields,
            or None for the defaults.
        embedding: bias, position table, interpolation and scaling of positions; `PatchEmbedConfig`, a dict of its fields,
            or None for the defaults.

    Raises:
        InputError: a setting is unknown or out of its range.
    """

    modality = "image"
    settings_types = {"preprocess": ImagePreprocess, "embedding": PatchEmbedConfig}

    def __init__(
        self,
        dim: int,
        patch: int | tuple[int, int] = 16,
        size: int | tuple[int, int] | None = 224,
        max_tokens: int = 256,
        mean: tuple[float, float, float] = CLIP_MEAN,
        std: tuple[float, float, float] = CLIP_STD,
        positions: str = "learned",
        class_token: bool = False,
        registers: int = 0,
        preprocess: ImagePreprocess | dict[str, Any] | None = None,
        embedding: PatchEmbedConfig | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        (self.dim,) = sides(dim, 1, "dim")
        self.patch = sides(patch, 2, "patch")
        self.size = None if size is None else sides(size, 2, "size")
        (self.max_tokens,) = sides(max_tokens, 1, "max_tokens")
        self.preprocess = settings(ImagePreprocess, preprocess, "preprocess")
        self.preprocess.check_size(self.size)
        self.embedding = settings(PatchEmbedConfig, embedding, "embedding")
        self.positions = check_choice("positions", positions, ("learned", "sincos", "none"))
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InputError(f"mean is {mean!r} and std {std!r}, expected three numbers each, std above 0")
        if type(registers) is not int or registers < 0:
            raise InputError(f"registers is {registers!r}, expected 0 or more")
        self.position_grid: tuple[int, int]
        self.prefix = registers + bool(class_token)  # tokens before the patches
        if self.embedding.position_grid is not None:
            self.position_grid = sides(self.embedding.position_grid, 2, "position_grid")
        elif self.size is not None:
            self.position_grid = grid_size(self.size, self.patch)
        else:
            self.position_grid = (math.isqrt(self.max_tokens),) * 2

        self.proj = nn.Linear(3 * math.prod(self.patch), dim, bias=self.embedding.bias)
        learned = positions == "learned"
        self.pos_embed = nn.Parameter(torch.empty(*self.position_grid, dim)) if learned else None
        self.class_token = nn.Parameter(torch.empty(1, 1, dim)) if class_token else None
        self.registers = nn.Parameter(torch.empty(1, registers, dim)) if registers else None
        if positions == "sincos":
            sincos_positions(torch.zeros(1, 2), dim)  # raises here where dim is too small
        self.init_weights()

    def init_weights(self) -> None:
        """Projection: normal with variance 1 / inputs (LeCun), bias 0; positions, class token and
        registers: normal with deviation 0.02. Independent normalised values thus give tokens of unit variance."""
        nn.init.normal_(self.proj.weight, std=self.proj.in_features**-0.5)
        if self.proj.bias is not None:
            nn.init.zeros_(self.proj.bias)
        for table in (self.pos_embed, self.class_token, self.registers):
            if table is not None:
                nn.init.normal_(table, std=0.02)

    # ---- raw images ----------------------------------------------------------------------------------------

    def read(self, source: Any, frame: int = 0) -> Tensor:
        """One image -> RGB uint8 (3, H, W), upright; see `read_image` for the sources accepted.

        Args:
            source: path, bytes, binary file, PIL image, numpy array (H, W[, C]) or tensor (C, H, W).
            frame: index of the frame of an animation, from 0.

        Raises:
            InputError: it cannot be read; names the file.
        """
        fit = self.resized_size if self.preprocess.draft else None
        return read_image(source, frame, self.preprocess.background, fit)

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) in pixels that an image is resized to, before any crop or padding."""
        if self.size is not None:
            return self.preprocess.resized_size(height, width, self.size)
        fit = full_size if self.preprocess.resize == "full" else native_size
        return fit(height, width, self.patch, self.max_tokens)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw images -> one batch of uint8.

        Returns:
            Fixed size: `pixels` (B, 3, h, w); with ``resize="pad"`` also `keep` (B, n), the indices in the grid of the
            patches that are tokens, and `lengths`. Native aspect: `patches` (B, N, P), `coords` (B, N, 2) as (y, x),
            `lengths`, and for learned positions each token's weights on the table's rows and columns.

        Raises:
            InputError: a raw image is not uint8 (3, H, W), or the list is empty.
        """
        if not len(raws):
            raise InputError("no image to collate: expected at least one")
        for i, raw in enumerate(raws):
            if not isinstance(raw, Tensor) or raw.dtype != torch.uint8 or raw.ndim != 3 or raw.shape[0] != 3:
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(
                    f"image {i} of the batch is {found}, expected uint8 (3, H, W) as read() returns"
                )
            if not raw.numel():
                raise InputError(f"image {i} of the batch is {tuple(raw.shape)}: it has no pixels")
        return self._collate_native(raws) if self.size is None else self._collate_fixed(raws)

    def _collate_fixed(self, raws: Sequence[Tensor]) -> Batch:
        assert self.size is not None
        h, w = self.size
        pixels = torch.empty(len(raws), 3, h, w, dtype=torch.uint8)
        boxes = []
        # written channel by channel, so that the device cuts patches out of contiguous rows
        for out, raw in zip(pixels.numpy().transpose(0, 2, 3, 1), raws, strict=True):
            rows, columns = resized = self.resized_size(*raw.shape[1:])
            if self.preprocess.resize == "pad":
                top, left = (h - rows) // 2, (w - columns) // 2
                out[:] = self.preprocess.background
                out[top : top + rows, left : left + columns] = self.preprocess.resize_and_crop(raw, resized)
                boxes.append((top, left, top + rows, left + columns))
            else:
                offset = self.preprocess.crop_offset(resized, self.size)
                out[:] = self.preprocess.resize_and_crop(raw, resized, offset, self.size)
        batch = Batch(pixels=pixels)
        if boxes:
            self._drop_background(batch, boxes)
        return batch

    def _drop_background(self, batch: Batch, boxes: Sequence[tuple[int, int, int, int]]) -> None:
        """Add `keep` and `lengths` where some patches are background alone: indices of the others, moved to the left.

        Args:
            batch: receives the two entries.
            boxes: (top, left, bottom, right) of each image in pixels.
        """
        assert self.size is not None
        (ph, pw), grid = self.patch, grid_size(self.size, self.patch)
        yx = grid_coords(grid)
        top, left, bottom, right = torch.tensor(boxes).T[..., None]  # each (B, 1)
        y, x = yx[:, 0] * ph, yx[:, 1] * pw
        inside = (y + ph > top) & (y < bottom) & (x + pw > left) & (x < right)  # (B, N)
        if bool(inside.all()):
            return
        counts = inside.sum(1)
        batch["keep"] = (~inside).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(counts.max())]
        batch["lengths"] = tuple(counts.tolist())

    def _collate_native(self, raws: Sequence[Tensor]) -> Batch:
        grids, patches = [], []
        for raw in raws:
            resized = self.preprocess.resize_and_crop(raw, self.resized_size(*raw.shape[1:]))
            image = pad_to_patches(torch.from_numpy(np.array(resized)).permute(2, 0, 1), self.patch)
            grids.append(grid_size(image.shape[1:], self.patch))
            patches.append(patchify(image[None], self.patch)[0])
        coords = [grid_coords(g) for g in grids]
        lengths = tuple(len(p) for p in patches)
        batch = Batch(patches=_pad_stack(patches), coords=_pad_stack(coords), lengths=lengths)
        if self.embedding.span is not None:
            batch["scale"] = torch.tensor([self.embedding.scale(g) for g in grids])[:, None]
        if self.pos_embed is not None:
            how = self.embedding.interpolation
            weights = [interpolation_weights(g, self.position_grid, how) for g in grids]
            for axis, name in enumerate(("row_weights", "column_weights")):
                batch[name] = _pad_stack([w[axis][c[:, axis]] for w, c in zip(weights, coords, strict=True)])
        return batch

    # ---- tokens ----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """A batch on the model's device -> its tokens.

        Args:
            batch: from `collate`; or images of one shape as a plain tensor (B, 3, H, W), either uint8 or a float
                type **already normalised**. H and W need not be `size`: learned positions are interpolated then.

        Returns:
            (B, N, D); N includes class token and registers.

        Raises:
            InputError: a plain tensor is not (B, 3, H, W), or of another type.
        """
        if isinstance(batch, Tensor):
            right_type = batch.is_floating_point() or batch.dtype == torch.uint8
            if batch.ndim != 4 or batch.shape[1] != 3 or not right_type:
                raise InputError(
                    f"images are {tuple(batch.shape)} {batch.dtype}, expected (B, 3, H, W), uint8 or normalised floats"
                )
            batch = Batch(pixels=batch)
        if "patches" in batch:
            return self._embed_native(batch)
        pixels = pad_to_patches(batch["pixels"], self.patch)
        grid = grid_size(pixels.shape[2:], self.patch)
        x = self._project(patchify(pixels, self.patch))
        coords = grid_coords(grid, x.device)
        if self.pos_embed is not None:
            x = x + resample_positions(self.pos_embed, grid, self.embedding.interpolation).flatten(0, 1)
        elif self.positions == "sincos":
            x = x + sincos_positions(coords, self.dim).to(self.proj.weight.dtype)
        # x.shape[0], not len(x), which an exported graph would keep as a constant
        coords = coords.expand(x.shape[0], -1, -1)
        if "keep" in batch:
            keep = batch["keep"][..., None]
            x, coords = x.gather(1, keep.expand(-1, -1, self.dim)), coords.gather(1, keep.expand(-1, -1, 2))
        if self.embedding.span is not None:
            scale = torch.tensor(self.embedding.scale(grid), device=x.device)
            coords = self.embedding.scaled(coords, scale)
        return self._finish(x, coords, batch.get("lengths"))  # no lengths: every patch is a token

    def _embed_native(self, batch: Batch) -> Tokens:
        x, coords = self._project(batch["patches"]), batch["coords"]
        if self.pos_embed is not None:
            # (B, N, rows, 1) * (B, N, 1, columns): each token's weights over the whole table, one product for all
            weights = batch["row_weights"][..., None] * batch["column_weights"][..., None, :]
            table = self.pos_embed.flatten(0, 1)
            # autocast gives the product in bfloat16; tokens are in the weights' type, as with a fixed size
            x = x + (weights.flatten(2).to(table.dtype) @ table).to(table.dtype)
        elif self.positions == "sincos":
            x = x + sincos_positions(coords, self.dim).to(self.proj.weight.dtype)
        if self.embedding.span is not None:
            coords = self.embedding.scaled(coords, batch["scale"])
        return self._finish(x, coords, batch["lengths"])

    def _project(self, patches: Tensor) -> Tensor:
        """(B, N, P), uint8 or normalised floats -> (B, N, D)."""
        if patches.dtype == torch.uint8:
            # (value / 255 - mean) / std, in float32 and from Python numbers: a buffer would be rounded by
            # module.to(bfloat16). Patches are cut before, while a value is one byte.
            patches = patches.to(torch.float32)
            channels = patches.unflatten(-1, (3, -1)).unbind(-2)  # three views (B, N, ph * pw)
            for values, mean, std in zip(channels, self.mean, self.std, strict=True):
                values.mul_(1 / (255 * std)).sub_(mean / std)
        return self.proj(patches.to(self.proj.weight.dtype))

    def _finish(self, x: Tensor, coords: Tensor, lengths: Sequence[int] | None) -> Tokens:
        """Prepend class token and registers, and wrap: patches (B, N, D), (y, x) (B, N, 2) -> Tokens."""
        pos = nn.functional.pad(coords.to(torch.float32), (1, 0))  # t = 0 before (y, x)
        prefix = [t for t in (self.class_token, self.registers) if t is not None]
        if prefix:
            x = torch.cat([*(t.expand(x.shape[0], -1, -1).to(x.dtype) for t in prefix), x], 1)
            pos = nn.functional.pad(pos, (0, 0, self.prefix, 0))
            if self.registers is not None:
                n = self.registers.shape[1]
                pos[:, self.prefix - n : self.prefix, 0] = -torch.arange(1, n + 1, device=pos.device)
            lengths = None if lengths is None else [n + self.prefix for n in lengths]
        return self.wrap(x, lengths, "bidirectional", pos=pos)


def _pad_stack(tensors: list[Tensor]) -> Tensor:
    """Tensors of unequal length -> (B, longest, ...), zeros behind the shorter ones."""
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True)
