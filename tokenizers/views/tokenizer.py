"""Views of one scene, images with cameras -> Tokens: patches of colours plus patches of Pluecker rays.

Conventions of the cameras: see `views/read.py`.

Shapes: S scenes, V views, N patches per view, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from einops import rearrange, repeat
from PIL import Image
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.patches import grid_coords, grid_size, patchify, sides
from worldtokens.tokenizers.views.rays import pluecker_rays
from worldtokens.tokenizers.views.read import read_scene
from worldtokens.tokens import Tokens

MEAN = STD = (0.5, 0.5, 0.5)
CAMERA = 16  # fx, fy, cx, cy, then the 3 x 4 camera-to-world matrix row by row


class ViewTokenizer(Tokenizer):
    """Images of one scene -> one token per patch of every view.

    A token is a linear map of its patch's colours plus one of its pixels' rays, each ray in its six Pluecker coordinates
    (direction, moment), as in LFN (Sitzmann et al. 2021) and LVSM (Jin et al. 2024). Other positions are not needed: a
    ray says which line in the world its pixel sees.

    `pos` is (view, y, x) in patches. Attention within a scene is bidirectional (block 0). Scenes with fewer views are
    padded.

    Args:
        dim: width D of the tokens.
        patch: side of a patch in pixels, or (height, width).
        size: side, or (height, width), of every view in pixels; a multiple of `patch`. Images are scaled to cover it and
            centre-cropped; the intrinsics are adjusted.
        views: maximum number of views of a scene; of more, this many evenly spaced ones, first and last included. None:
            all.
        frame: world coordinates: ``"first"`` (the camera of the first view, so that a rigid motion of the scene changes
            nothing) or ``"world"`` (the extrinsics as they are).
        mean, std: RGB normalisation of values in [0, 1].

    Raises:
        InputError: a setting is out of its range.
    """

    modality = "views"

    def __init__(
        self,
        dim: int,
        patch: int | tuple[int, int] = 16,
        size: int | tuple[int, int] = 224,
        views: int | None = None,
        frame: str = "first",
        mean: tuple[float, float, float] = MEAN,
        std: tuple[float, float, float] = STD,
    ) -> None:
        super().__init__()
        (self.dim,) = sides(dim, 1, "dim")
        self.patch, self.size = sides(patch, 2, "patch"), sides(size, 2, "size")
        if any(s % p for s, p in zip(self.size, self.patch, strict=True)):
            raise InputError(
                f"size {self.size} is not a multiple of the patch {self.patch}, and rays cannot be padded"
            )
        if views is not None:
            sides(views, 1, "views")
        if frame not in ("first", "world"):
            raise InputError(f"frame is {frame!r}, expected 'first' or 'world'")
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InputError(f"mean is {mean!r} and std {std!r}, expected three numbers each, std above 0")
        self.views, self.frame = views, frame
        area = math.prod(self.patch)
        self.proj = nn.Linear(3 * area, dim)
        self.ray_proj = nn.Linear(6 * area, dim, bias=False)

    # ---- raw scenes ----------------------------------------------------------------------------------------

    def read(self, source: Any) -> Tensor:
        """One scene -> (V, 3 h w + 64) uint8: for each view its pixels, then the bytes of its camera.

        `images` and `cameras` split it.

        Args:
            source: a dict ``{"images": [...], "intrinsics": ..., "extrinsics": ...}``, where images are sources of
                `read_image`, intrinsics are (3, 3) for all or (V, 3, 3), extrinsics (V, 4, 4) or (V, 3, 4); or a
                folder with `cameras.json` (the same as JSON, images by file name) or with NeRF's `transforms.json`;
                or the path of such a file.

        Raises:
            InputError: something is missing or does not fit; names the file or view.
        """
        scene = read_scene(source)
        n = len(scene.images)
        indices = range(n)
        if self.views is not None and n > self.views:
            indices = np.linspace(0, n - 1, self.views).round().astype(int).tolist()
        poses = scene.poses[list(indices)]
        if self.frame == "first":
            poses = np.linalg.inv(poses[0]) @ poses
        rows = []
        for i, pose in zip(indices, poses, strict=True):
            pixels, k = self._resize_and_crop(*scene.view(i))
            camera = np.concatenate([k, pose[:3].reshape(-1)]).astype(np.float32)
            rows.append(np.concatenate([pixels.reshape(-1), camera.view(np.uint8)]))
        return torch.from_numpy(np.stack(rows))

    def _resize_and_crop(self, image: Tensor, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scale to cover `size`, centre-crop: (3, H, W) -> (3, h, w), with fx, fy, cx, cy adjusted."""
        (h, w), (rows, columns) = self.size, image.shape[1:]
        ratio = min(rows / h, columns / w)
        left, top = (columns - w * ratio) / 2, (rows - h * ratio) / 2
        im = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))
        box = (left, top, left + w * ratio, top + h * ratio)
        if im.size != (w, h):
            im = im.resize((w, h), Image.Resampling.BICUBIC, box=box)
        fx, fy, cx, cy = k
        return np.asarray(im).transpose(2, 0, 1), np.array([fx, fy, cx - left, cy - top]) / ratio

    def images(self, raw: Tensor) -> Tensor:
        """The pixels of a raw scene: (..., 3 h w + 64) uint8 -> (..., 3, h, w) uint8."""
        return raw[..., : -4 * CAMERA].unflatten(-1, (3, *self.size))

    def cameras(self, raw: Tensor) -> Tensor:
        """The cameras of a raw scene: -> (..., 16) float32: fx, fy, cx, cy for `size`, then 3 x 4 camera to world."""
        return raw[..., -4 * CAMERA :].contiguous().view(torch.float32)

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw scenes -> one batch: `raw` (S, V, 3 h w + 64) uint8, `lengths` in tokens.

        Cameras stay bytes in transfer, so that half-precision weights do not round them.

        Raises:
            InputError: a raw scene is not from `read`, or the list is empty.
        """
        width = 3 * math.prod(self.size) + 4 * CAMERA
        if not len(raws):
            raise InputError("no scene to collate: expected at least one")
        for i, raw in enumerate(raws):
            is_bytes = isinstance(raw, Tensor) and raw.dtype == torch.uint8
            if not is_bytes or raw.ndim != 2 or raw.shape[1] != width or not len(raw):
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(
                    f"scene {i} of the batch is {found}, expected uint8 (V, {width}) as read() returns"
                )
        n = math.prod(grid_size(self.size, self.patch))
        return Batch(
            raw=nn.utils.rnn.pad_sequence(list(raws), batch_first=True),
            lengths=tuple(len(r) * n for r in raws),
        )

    # ---- tokens --------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tokens:
        """A batch from `collate`, on the model's device -> (S, V N, D)."""
        raw = batch["raw"]
        s, v, _ = raw.shape
        dtype = self.proj.weight.dtype
        colours = patchify(self.images(raw).flatten(0, 1), self.patch).float()  # (S V, N, 3 area)
        channels = colours.unflatten(-1, (3, -1)).unbind(-2)
        normalised = [(c / 255 - m) / d for c, m, d in zip(channels, self.mean, self.std, strict=True)]
        rays = pluecker_rays(self.cameras(raw).flatten(0, 1), self.size)  # (S V, 6, h, w)
        x = self.proj(torch.cat(normalised, -1).to(dtype)) + self.ray_proj(
            patchify(rays, self.patch).to(dtype)
        )
        grid = grid_coords((v, *grid_size(self.size, self.patch)), x.device).float()  # (V N, 3): (view, y, x)
        pos = repeat(grid, "n c -> s n c", s=s)
        x = rearrange(x, "(s v) n d -> s (v n) d", s=s)
        return self.wrap(x, batch["lengths"], "bidirectional", pos=pos)
