"""Videos -> Tokens: tubelets of a few frames, or patches of single frames.

Notable:

- frames are selected by time stamp and only those are decoded (`video/read.py`): memory and time do not grow with the
  length of the video;
- frames are uint8 up to the device and are normalised there;
- T that is not a multiple of the tubelet is padded by repeating the last frame, as the sides are: nothing is dropped;
- `by_time` and `by_position` make each time step, or each position, a segment of its own: ViViT's factorised attention,
  over space first and over time after.

Shapes: B videos, T frames, N tubelets, D width, P = 3 * pt * ph * pw values per tubelet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from worldtokens.errors import InputError
from worldtokens.layout import Layout
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.patches import (
    axis_weights,
    grid_coords,
    grid_size,
    pad_to_patches,
    patchify,
    sides,
    sincos_positions,
)
from worldtokens.tokenizers.video.read import FrameSampling, read_video
from worldtokens.tokens import Tokens

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class VideoTokenizer(Tokenizer):
    """Videos -> one token per tubelet of frames, as in ViViT (Arnab et al. 2021) and VideoMAE (Tong et al. 2022).

    Tokens are ordered by time, then row, then column; attention is bidirectional (block 0). A token's `pos` is (t, y, x)
    of its tubelet in the grid, or t in seconds with ``time="seconds"``.

    Args:
        dim: width D of the tokens.
        tubelet: (frames, height, width) of a tubelet; (1, 16, 16) gives patches of single frames.
        frames: number of frames of a video, evenly spaced; with `fps` or `every` the maximum, from its start.
        fps: select a frame every 1 / fps seconds instead.
        every: select every n-th frame instead.
        size: side in pixels, or (height, width); frames are scaled to cover it and centre-cropped. None: each video's own.
        positions: ``"learned"`` (one table over time and one over space, interpolated for other grids), ``"sincos"`` (3-D)
            or ``"none"``.
        time: unit of `pos`'s t: ``"grid"`` or ``"seconds"``, the mean time stamp of a tubelet's frames.
        mean, std: RGB normalisation of values in [0, 1]; default: ImageNet's.

    Raises:
        InputError: a setting is out of its range.
    """

    modality = "video"

    def __init__(
        self,
        dim: int,
        tubelet: tuple[int, int, int] = (2, 16, 16),
        frames: int = 16,
        fps: float | None = None,
        every: int | None = None,
        size: int | tuple[int, int] | None = 224,
        positions: str = "learned",
        time: str = "grid",
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        (self.dim,) = sides(dim, 1, "dim")
        self.tubelet = sides(tubelet, 3, "tubelet")
        self.sampling = FrameSampling(frames, fps, every)
        self.size = None if size is None else sides(size, 2, "size")
        if positions not in ("learned", "sincos", "none"):
            raise InputError(f"positions is {positions!r}, expected 'learned', 'sincos' or 'none'")
        if time not in ("grid", "seconds"):
            raise InputError(f"time is {time!r}, expected 'grid' or 'seconds'")
        self.positions, self.time = positions, time
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InputError(f"mean is {mean!r} and std {std!r}, expected three numbers each, std above 0")
        self.proj = nn.Linear(3 * math.prod(self.tubelet), dim)
        self.time_embed = self.space_embed = None
        if positions == "learned":
            # the grid of `size`, or one of 14 x 14 that is interpolated for every video
            space = self.size or (14 * self.tubelet[1], 14 * self.tubelet[2])
            self.table = grid_size((frames, *space), self.tubelet)
            self.time_embed = nn.Parameter(torch.empty(self.table[0], dim))
            self.space_embed = nn.Parameter(torch.empty(*self.table[1:], dim))
        elif positions == "sincos":
            sincos_positions(torch.zeros(1, 3), dim)  # raises here where dim is too small
        self.init_weights()

    def init_weights(self) -> None:
        """Projection: normal with variance 1 / inputs, truncated at two sigma (LeCun), bias 0; positions: deviation 0.02."""
        nn.init.trunc_normal_(
            self.proj.weight, std=(std := self.proj.in_features**-0.5), a=-2 * std, b=2 * std
        )
        nn.init.zeros_(self.proj.bias)
        for table in (self.time_embed, self.space_embed):
            if table is not None:
                nn.init.normal_(table, std=0.02)

    # ---- raw videos --------------------------------------------------------------------------------------------

    def read(self, source: Any, fps: float = 25.0) -> Tensor:
        """One video -> its selected frames, RGB uint8 (T, 3, H, W), upright; see `read_video` for the sources accepted.

        The time stamps of the frames are the tensor's attribute `seconds`, float64 (T,).

        Args:
            source: a path, bytes or binary file; or all frames as a tensor uint8 (T, 3, H, W) / ndarray (T, H, W, 3).
            fps: frame rate of frames given as an array.

        Raises:
            InputError: it cannot be read; names the file.
        """
        frames, seconds = read_video(source, self.sampling, self.size, fps)
        frames.seconds = seconds  # type: ignore[attr-defined]  # `collate` reads it
        return frames

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Videos from `read` -> one batch.

        Returns:
            `patches` (B, N, P) uint8, `coords` (B, N, 3) as (t, y, x), `lengths`, `grids` (B times (steps, rows, columns)),
            `micros` (B, N) int64, the tubelets' times in microseconds, and for learned positions each token's weights on the
            tables.

        Raises:
            InputError: a video is not uint8 (T, 3, H, W), or the list is empty.
        """
        if not len(raws):
            raise InputError("no video to collate: expected at least one")
        patches, grids, micros = [], [], []
        for i, raw in enumerate(raws):
            if not isinstance(raw, Tensor) or raw.dtype != torch.uint8 or raw.ndim != 4 or raw.shape[1] != 3:
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(
                    f"video {i} of the batch is {found}, expected uint8 (T, 3, H, W) as read() returns"
                )
            if not raw.numel():
                raise InputError(f"video {i} of the batch is {tuple(raw.shape)}: it has no pixels")
            x = pad_to_patches(raw.transpose(0, 1), self.tubelet)  # (3, T, H, W)
            _, t, h, w = x.shape
            grid = grid_size((t, h, w), self.tubelet)
            patches.append(patchify(x[None], self.tubelet)[0])
            grids.append(grid)
            micros.append(self._micros(raw, grid))
        coords = [grid_coords(g) for g in grids]
        batch = Batch(
            patches=pad_sequence(patches, batch_first=True),
            coords=pad_sequence(coords, batch_first=True),
            micros=pad_sequence(micros, batch_first=True),
            lengths=tuple(len(p) for p in patches),
            grids=tuple(grids),
        )
        if self.time_embed is not None:
            for axis, name in enumerate(("time_weights", "row_weights", "column_weights")):
                new_old = [(g[axis], self.table[axis]) for g in grids]
                weights = [axis_weights(*n)[c[:, axis]] for n, c in zip(new_old, coords, strict=True)]
                batch[name] = pad_sequence(weights, batch_first=True)
        return batch

    def _micros(self, raw: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Mean time stamp of each tubelet's frames in microseconds, an integer so that no cast rounds it: (N,) int64."""
        stamps = getattr(raw, "seconds", None)
        if stamps is None or len(stamps) != len(raw):  # lost where an augmentation returns a new tensor
            stamps = torch.arange(len(raw), dtype=torch.float64) / (self.sampling.fps or 25.0)
        step = torch.arange(len(raw)) // self.tubelet[0]  # of each frame
        total = torch.zeros(grid[0], dtype=torch.float64).index_add_(0, step, stamps)
        mean = total / torch.bincount(step, minlength=grid[0])
        return (mean * 1e6).round().long().repeat_interleave(grid[1] * grid[2])

    def forward(self, batch: Batch) -> Tokens:
        """A batch from `collate` on the model's device -> its tokens (B, N, dim)."""
        x, coords = self._project(batch["patches"]), batch["coords"]
        if self.time_embed is not None:
            space = batch["row_weights"][..., None] * batch["column_weights"][..., None, :]
            x = x + batch["time_weights"].to(x.dtype) @ self.time_embed.to(x.dtype)
            x = x + space.flatten(2).to(x.dtype) @ self.space_embed.flatten(0, 1).to(x.dtype)
        elif self.positions == "sincos":
            x = x + sincos_positions(coords, self.dim).to(x.dtype)
        pos = coords.to(torch.float32)
        if self.time == "seconds":
            pos = torch.cat([(batch["micros"].double() / 1e6).float()[..., None], pos[..., 1:]], -1)
        return self.wrap(x, batch["lengths"], "bidirectional", pos=pos)

    def _project(self, patches: Tensor) -> Tensor:
        """(B, N, P) uint8 -> (B, N, D)."""
        patches = patches.to(torch.float32)
        channels = patches.unflatten(-1, (3, -1)).unbind(-2)
        for values, mean, std in zip(channels, self.mean, self.std, strict=True):
            values.mul_(1 / (255 * std)).sub_(mean / std)
        return self.proj(patches.to(self.proj.weight.dtype))


def by_time(tokens: Tokens, grids: Sequence[tuple[int, int, int]]) -> Tokens:
    """Make each time step of a video a segment: attention is over space only (ViViT's spatial encoder).

    Args:
        tokens: (B, N, D) from `VideoTokenizer`, one video per row.
        grids: ``batch["grids"]``.

    Returns:
        The same tokens; `pool` returns one vector per time step, (sum of steps, D).
    """
    segments = [grid_coords(g)[:, 0] for g in grids]
    return _regroup(tokens, None, segments, [(rows * columns,) * steps for steps, rows, columns in grids])


def by_position(tokens: Tokens, grids: Sequence[tuple[int, int, int]]) -> Tokens:
    """Make each position of a video a segment, ordered by time: attention is over time only (ViViT's temporal encoder).

    Args:
        tokens: (B, N, D) from `VideoTokenizer`, one video per row, in its order.
        grids: ``batch["grids"]``.

    Returns:
        The tokens reordered, all times of the first position before those of the second, with their `pos`.
    """
    orders = [rearrange(torch.arange(math.prod(g)), "(t n) -> (n t)", t=g[0]) for g in grids]
    segments = [torch.arange(rows * columns).repeat_interleave(steps) for steps, rows, columns in grids]
    return _regroup(tokens, orders, segments, [(steps,) * (rows * columns) for steps, rows, columns in grids])


def _regroup(
    tokens: Tokens, orders: list[Tensor] | None, segments: list[Tensor], lengths: list[tuple]
) -> Tokens:
    """Reorder the tokens of each row by `orders` (None: as they are) and set their segments."""
    n = tokens.shape[1]
    if len(segments) != len(tokens) or any(len(s) > n for s in segments):
        raise InputError(
            f"grids are of videos of {[len(s) for s in segments]} tokens, tokens are {tuple(tokens.shape)}"
        )
    fields = {}
    if orders is not None:
        index = torch.arange(n).repeat(len(tokens), 1)
        for row, order in zip(index, orders, strict=True):
            row[: len(order)] = order
        index = index.to(tokens.device)
        for name in ("x", "pos"):
            value = getattr(tokens, name)
            fields[name] = value.gather(1, index[..., None].expand(-1, -1, value.shape[-1]))
    segment = torch.zeros(len(tokens), n, dtype=torch.int32)
    for row, s in zip(segment, segments, strict=True):
        row[: len(s)] = s
    return tokens.replace(
        segment=segment.to(tokens.device), layout=Layout(tuple(lengths), "bidirectional"), **fields
    )
