"""Images -> Tokens: fixed size, or native aspect with as many patches as the image needs.

Notable:

- pixels travel as uint8 and are normalised on the device, so a batch is a quarter of its float size on the way;
- fixed-size resizing is Pillow's and gives the bytes of open_clip's and torchvision's transforms;
- a JPEG far larger than needed is decoded at 1/2, 1/4 or 1/8 (`draft`), which is where loading photos loses its time;
- in native mode every image has a patch grid of its own, and still nothing loops over images in `forward`.

Shapes: B images, N patches, D width, P = 3 * ph * pw values of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.image.read import read_image
from worldtokens.tokenizers.image.sizes import full_size, native_size
from worldtokens.tokenizers.patches import (
    STRETCHES,
    grid_coords,
    grid_of,
    pad_to_patches,
    patchify,
    resample_positions,
    sides,
    sincos_positions,
    stretch_weights,
)
from worldtokens.tokens import Tokens

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class ImageTokenizer(Tokenizer):
    """Images -> one token a patch, as in ViT (Dosovitskiy 2020), or of native aspect, as in NaViT (Dehghani 2023).

    **Fixed size** (`size` given): resized with Pillow, then cut. **Native aspect** (`size=None`): an image with at
    most `max_tokens` patches keeps its pixels as they are; a larger one is scaled down, both sides alike, until its
    patches fit; none is scaled up. A side that is not a multiple of the patch has its last row or column repeated up
    to one, so nothing is dropped and nothing is stretched (230 px in patches of 16 are 15 patches).

    A token's `pos` is (0, y, x) of its patch. The class token comes first, at (0, 0, 0). All tokens of an image read
    each other (block 0).

    Args:
        dim: width D of the tokens.
        patch: side of a patch in pixels, or (height, width).
        size: side in pixels, or (height, width), of every image; None for native aspect.
        max_tokens: native aspect only, the largest number of patches of an image (the class token not counted).
        mean, std: RGB normalisation of values in [0, 1]; default: those of OpenAI's CLIP. Inception's are 0.5.
        interpolation: ``"nearest"``, ``"bilinear"``, ``"bicubic"`` or ``"lanczos"``.
        resize: how an image becomes `size`: ``"crop"`` (scale to cover it, cut the centre out), ``"squash"`` (stretch)
            or ``"pad"`` (scale to fit in, `background` around it; patches that hold background alone are not tokens). With
            native aspect: ``"full"`` scales every image, up or down, to as many whole patches as `max_tokens` allows.
        positions: ``"learned"`` (a table, stretched over other grids), ``"sincos"`` (2-D, fixed) or ``"none"``.
        position_grid: side, or (rows, columns), of the learned table; default: the patches of `size`, or the largest
            square within `max_tokens`.
        class_token: put a learned token before the patches.
        background: RGB, 0 to 255, under transparency and around a ``"pad"`` image.
        bias: give the patch projection a bias.
        registers: learned tokens behind the class token that no patch owns (Darcet et al. 2023), at (-1, 0, 0),
            (-2, 0, 0), ...
        crop: with ``"crop"`` and ``"squash"``, the share of the resized sides that the cut keeps: timm's `crop_pct`.
        span: count `pos` so that every image's grid has this side, or (rows, columns): a trunk that turns by
            positions then sees those of its training size. None: in patches.
        centred: with `span`, count to the middles of the patches, from the middle of the image, as DINOv3 does.
        draft: let JPEGs be decoded at 1/2, 1/4 or 1/8, as long as their sides stay at least twice what they are
            resized to. The raw image is then the smaller one. Turn off for the very pixels of open_clip's transform,
            or where an augmentation cuts small pieces out.
        stretch: how learned positions reach over another grid: ``"bicubic"``, ``"bilinear"``, ``"bicubic_square"`` (over
            the square of the longer side; the aspect is kept) or ``"plain"`` (without anti-aliasing, as transformers does).
        halves: a cut whose middle falls between two pixels: ``"even"`` (torchvision's) or ``"down"`` (transformers').

    Raises:
        InputError: a setting is out of its range.
    """

    modality = "image"

    def __init__(
        self,
        dim: int,
        patch: int | tuple[int, int] = 16,
        size: int | tuple[int, int] | None = 224,
        max_tokens: int = 256,
        mean: tuple[float, float, float] = CLIP_MEAN,
        std: tuple[float, float, float] = CLIP_STD,
        interpolation: str = "bicubic",
        resize: str = "crop",
        positions: str = "learned",
        position_grid: int | tuple[int, int] | None = None,
        class_token: bool = False,
        background: tuple[int, int, int] = (255, 255, 255),
        bias: bool = True,
        draft: bool = True,
        registers: int = 0,
        crop: float = 1.0,
        span: float | tuple[float, float] | None = None,
        centred: bool = False,
        stretch: str = "bicubic",
        halves: str = "even",
    ) -> None:
        super().__init__()
        (self.dim,) = sides(dim, 1, "dim")
        self.patch = sides(patch, 2, "patch")
        self.size = None if size is None else sides(size, 2, "size")
        (self.max_tokens,) = sides(max_tokens, 1, "max_tokens")
        self.interpolation = _one_of("interpolation", interpolation, tuple(FILTERS))
        self.resize = _one_of("resize", resize, ("crop", "squash", "pad", "full"))
        if resize == "full" and size is not None:
            raise InputError("resize='full' fills a budget of patches: give size=None and max_tokens=")
        self.positions = _one_of("positions", positions, ("learned", "sincos", "none"))
        self.stretch = _one_of("stretch", stretch, STRETCHES)
        self.halves = _one_of("halves", halves, ("even", "down"))
        self.background = tuple(background)
        if len(self.background) != 3 or any(type(v) is not int or not 0 <= v <= 255 for v in self.background):
            raise InputError(f"background is {background!r}, expected three whole numbers from 0 to 255: RGB")
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InputError(f"mean is {mean!r} and std {std!r}, expected three numbers each, std above 0")
        self.draft = draft
        if not 0 < crop <= 1 or (crop != 1 and (size is None or resize == "pad")):
            raise InputError(f"crop is {crop!r}, expected above 0 to 1, and 1 with size=None or resize='pad'")
        if type(registers) is not int or registers < 0:
            raise InputError(f"registers is {registers!r}, expected 0 or more")
        self.crop, self.span, self.centred = float(crop), _span(span), centred
        if centred and span is None:
            raise InputError("centred=True counts to the sides of a span: give span=")
        self.prefix = registers + bool(class_token)  # tokens before the patches
        if position_grid is not None:
            self.position_grid = sides(position_grid, 2, "position_grid")
        elif self.size is not None:
            self.position_grid = grid_of(self.size, self.patch)
        else:
            self.position_grid = (math.isqrt(self.max_tokens),) * 2

        self.proj = nn.Linear(3 * math.prod(self.patch), dim, bias=bias)
        self.pos_embed = (
            nn.Parameter(torch.empty(*self.position_grid, dim)) if positions == "learned" else None
        )
        self.class_token = nn.Parameter(torch.empty(1, 1, dim)) if class_token else None
        self.registers = nn.Parameter(torch.empty(1, registers, dim)) if registers else None
        if positions == "sincos":
            sincos_positions(torch.zeros(1, 2), dim)  # says so now if dim is too small
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
        """One image -> RGB uint8 (3, H, W), upright; see `image.read_image` for what is taken.

        Args:
            source: path, bytes, binary file, PIL image, numpy array (H, W[, C]) or tensor (C, H, W).
            frame: which frame of an animation, from 0.

        Raises:
            InputError: it cannot be read; names the file.
        """
        return read_image(source, frame, self.background, self.scaled if self.draft else None)

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) in pixels that an image is resized to, before any cutting or padding."""
        if self.size is None:
            fit = full_size if self.resize == "full" else native_size
            return fit(height, width, self.patch, self.max_tokens)
        h, w = (math.floor(s / self.crop) for s in self.size)
        if self.resize == "squash":
            return h, w
        if self.resize == "pad":
            ratio = max(height / h, width / w)
            return min(h, max(1, round(height / ratio))), min(w, max(1, round(width / ratio)))
        if h == w:  # torchvision's Resize(int) rounds the longer side down
            return (h, int(h * width / height)) if height <= width else (int(w * height / width), w)
        ratio = min(height / h, width / w)  # open_clip's for other shapes rounds to the nearest
        return max(h, round(height / ratio)), max(w, round(width / ratio))

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw images -> one batch of uint8.

        Returns:
            Fixed size: `pixels` (B, 3, h, w); with ``resize="pad"`` also `keep` (B, n), the places in the grid of the
            patches that are tokens, and `lengths`. Native aspect: `patches` (B, N, P), `coords` (B, N, 2) as (y, x),
            `lengths`, and for learned positions each token's weights on the table's rows and columns.

        Raises:
            InputError: a raw image is not uint8 (3, H, W), or there is none.
        """
        if not len(raws):
            raise InputError("no image to collate: expected at least one")
        for i, raw in enumerate(raws):
            if not isinstance(raw, Tensor) or raw.dtype != torch.uint8 or raw.ndim != 3 or raw.shape[0] != 3:
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(
                    f"image {i} of the batch is {found}, expected uint8 (3, H, W) as read() gives"
                )
            if not raw.numel():
                raise InputError(f"image {i} of the batch is {tuple(raw.shape)}: holds no pixel")
        return self._collate_native(raws) if self.size is None else self._collate_fixed(raws)

    def _collate_fixed(self, raws: Sequence[Tensor]) -> Batch:
        h, w = self.size
        pixels = torch.empty(len(raws), 3, h, w, dtype=torch.uint8)
        boxes = []
        # written channel by channel, so that the device cuts patches out of contiguous rows
        for out, raw in zip(pixels.numpy().transpose(0, 2, 3, 1), raws, strict=True):
            rows, columns = self.scaled(*raw.shape[1:])
            if self.resize == "pad":
                top, left = (h - rows) // 2, (w - columns) // 2
                out[:] = self.background
                out[top : top + rows, left : left + columns] = self._resized(raw, (rows, columns))
                boxes.append((top, left, top + rows, left + columns))
            else:
                middle = round if self.halves == "even" else math.floor
                corner = middle((rows - h) / 2.0), middle((columns - w) / 2.0)
                out[:] = self._resized(raw, (rows, columns), corner, (h, w))
        batch = Batch(pixels=pixels)
        if boxes:
            self._keep_inside(batch, boxes)
        return batch

    def _resized(
        self,
        raw: Tensor,
        to: tuple[int, int],
        corner: tuple[int, int] = (0, 0),
        cut: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """Resize an image and cut a window out: (3, H, W) -> (h, w, 3)."""
        cut = cut or to
        a = raw.permute(1, 2, 0).numpy()
        if tuple(raw.shape[1:]) == to:
            return a[corner[0] : corner[0] + cut[0], corner[1] : corner[1] + cut[1]]
        im = Image.fromarray(np.ascontiguousarray(a))
        (top, left), (h, w), (rows, columns) = corner, cut, to
        if rows * columns <= 64 * h * w:
            im = im.resize((columns, rows), FILTERS[self.interpolation])
            return np.asarray(im)[top : top + h, left : left + w]
        # a very thin image covers the window only when it is enormous: compute the window alone (Pillow rounds
        # between its two passes in another order then, so values differ by a few levels)
        sy, sx = raw.shape[1] / rows, raw.shape[2] / columns
        box = (left * sx, top * sy, (left + w) * sx, (top + h) * sy)
        return np.asarray(im.resize((w, h), FILTERS[self.interpolation], box=box))

    def _keep_inside(self, batch: Batch, boxes: Sequence[tuple[int, int, int, int]]) -> None:
        """Note which patches hold image, when not all do: their places in the grid, moved to the left."""
        (ph, pw), grid = self.patch, grid_of(self.size, self.patch)
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
        ph, pw = self.patch
        grids, cut = [], []
        for raw in raws:
            rows, columns = self.scaled(*raw.shape[1:])
            small = torch.from_numpy(np.array(self._resized(raw, (rows, columns)))).permute(2, 0, 1)
            small = pad_to_patches(small, self.patch)
            grids.append((small.shape[1] // ph, small.shape[2] // pw))
            cut.append(patchify(small[None], self.patch)[0])
        lengths = tuple(len(c) for c in cut)
        coords = [grid_coords(g) for g in grids]
        batch = Batch(patches=_stack(cut), coords=_stack(coords), lengths=lengths)
        if self.span is not None:
            batch["scale"] = torch.tensor([self._scale(g) for g in grids])[:, None]
        if self.pos_embed is not None:
            each = [stretch_weights(g, self.position_grid, self.stretch) for g in grids]
            for axis, name in enumerate(("row_weights", "column_weights")):
                batch[name] = _stack([w[axis][c[:, axis]] for w, c in zip(each, coords, strict=True)])
        return batch

    # ---- tokens ----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """A batch on the model's device -> its tokens.

        Args:
            batch: from `collate`; or images of one shape as a plain tensor (B, 3, H, W), either uint8 or a float
                type **already normalised**. H and W need not be `size`: learned positions are stretched then.

        Returns:
            (B, N, D), with one token more for the class token.

        Raises:
            InputError: a plain tensor is not (B, 3, H, W), or of another type.
        """
        if isinstance(batch, Tensor):
            if (
                batch.ndim != 4
                or batch.shape[1] != 3
                or not (batch.is_floating_point() or batch.dtype == torch.uint8)
            ):
                raise InputError(
                    f"images are {tuple(batch.shape)} {batch.dtype}, expected (B, 3, H, W), uint8 or normalised floats"
                )
            batch = Batch(pixels=batch)
        if "patches" in batch:
            return self._embed_native(batch)
        pixels = pad_to_patches(batch["pixels"], self.patch)
        grid = grid_of(pixels.shape[2:], self.patch)
        x = self._projected(patchify(pixels, self.patch))
        coords = grid_coords(grid, x.device)
        if self.pos_embed is not None:
            x = x + resample_positions(self.pos_embed, grid, self.stretch).flatten(0, 1)
        elif self.positions == "sincos":
            x = x + sincos_positions(coords, self.dim).to(self.proj.weight.dtype)
        coords = coords.expand(
            x.shape[0], -1, -1
        )  # not len(x), which an exported graph would hold as a number
        if "keep" in batch:
            keep = batch["keep"][..., None]
            x, coords = x.gather(1, keep.expand(-1, -1, self.dim)), coords.gather(1, keep.expand(-1, -1, 2))
        lengths = batch.get("lengths")  # None: every patch is a token
        if self.span is not None:
            coords = self._reached(coords, torch.tensor(self._scale(grid), device=x.device))
        return self._finish(x, coords, lengths)

    def _embed_native(self, batch: Batch) -> Tokens:
        x = self._projected(batch["patches"])
        if self.pos_embed is not None:
            # (B, N, rows, 1) * (B, N, 1, columns): each token's weights over the whole table, one product for all
            weights = batch["row_weights"][..., None] * batch["column_weights"][..., None, :]
            table = self.pos_embed.flatten(0, 1)
            # autocast gives the product in bfloat16; tokens are in the weights' type, as with a fixed size
            x = x + (weights.flatten(2).to(table.dtype) @ table).to(table.dtype)
        elif self.positions == "sincos":
            x = x + sincos_positions(batch["coords"], self.dim).to(self.proj.weight.dtype)
        coords = batch["coords"]
        if self.span is not None:
            coords = self._reached(coords, batch["scale"])
        return self._finish(x, coords, batch["lengths"])

    def _reached(self, coords: Tensor, scale: Tensor) -> Tensor:
        """Coordinates in patches -> over `span`."""
        if not self.centred:
            return coords * scale
        return (coords + 0.5) * scale - 0.5 * torch.tensor(self.span, device=coords.device)

    def _scale(self, grid: Sequence[int]) -> tuple[float, ...]:
        """What a grid's coordinates are multiplied by to reach over `span`."""
        return tuple(s / g for s, g in zip(self.span, grid, strict=True))

    def _projected(self, patches: Tensor) -> Tensor:
        """(B, N, P), uint8 or normalised floats -> (B, N, D)."""
        to = self.proj.weight.dtype
        if patches.dtype == torch.uint8:
            # (value / 255 - mean) / std, in float32 and from Python numbers: a buffer would be rounded by
            # module.to(bfloat16). Patches are cut before, while a value is one byte.
            patches = patches.to(torch.float32)
            channels = patches.unflatten(-1, (3, -1)).unbind(-2)  # three views (B, N, ph * pw)
            for values, mean, std in zip(channels, self.mean, self.std, strict=True):
                values.mul_(1 / (255 * std)).sub_(mean / std)
        return self.proj(patches.to(to))

    def _finish(self, x: Tensor, coords: Tensor, lengths: Sequence[int] | None) -> Tokens:
        pos = torch.nn.functional.pad(coords.to(torch.float32), (1, 0))  # t = 0 before (y, x)
        before = [t for t in (self.class_token, self.registers) if t is not None]
        if before:
            x = torch.cat([*(t.expand(x.shape[0], -1, -1).to(x.dtype) for t in before), x], 1)
            pos = torch.nn.functional.pad(pos, (0, 0, self.prefix, 0))
            if self.registers is not None:
                n = self.registers.shape[1]
                pos[:, self.prefix - n : self.prefix, 0] = -torch.arange(1, n + 1, device=pos.device)
            lengths = None if lengths is None else [n + self.prefix for n in lengths]
        return self.wrap(x, lengths, "bidirectional", pos=pos)


def _span(value: float | Sequence[float] | None) -> tuple[float, float] | None:
    if value is None:
        return None
    given = (value, value) if isinstance(value, int | float) else tuple(value)
    if len(given) != 2 or not all(isinstance(v, int | float) and v > 0 for v in given):
        raise InputError(f"span is {value!r}, expected a number above 0 or two")
    return given


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
    return value


def _stack(parts: list[Tensor]) -> Tensor:
    """Tensors of unequal length -> (B, longest, ...), zeros behind the shorter ones."""
    return nn.utils.rnn.pad_sequence(parts, batch_first=True)
