"""Clips -> Tokens: tubelets of a few frames, or patches of single ones.

Notable:

- frames are chosen by time stamp and only those are decoded (`clips.py`), so memory and time do not grow with the film;
- frames travel as uint8 and are normalised on the device;
- T that is not a multiple of the tubelet is filled by repeating the last frame, as sides are: nothing is dropped;
- ViViT's factorised readings are `by_time` and `by_place`: the same tokens, each time step (or place) a segment of its
  own, so that the one trunk reads space first and time after.

Shapes: B clips, T frames, N tubelets, D width, P = 3 * pt * ph * pw values of a tubelet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
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
from worldtokens.tokenizers.video.read import Sampling, read_video
from worldtokens.tokens import Tokens

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class VideoTokenizer(Tokenizer):
    """Clips -> one token a tubelet of frames, as in ViViT (Arnab et al. 2021) and VideoMAE (Tong et al. 2022).

    Tokens come time first, then rows, then columns, and read each other (block 0). A token's `pos` is (t, y, x) of its
    tubelet in the grid, or t in seconds with ``time="seconds"``.

    Args:
        dim: width D of the tokens.
        tubelet: (frames, height, width) of a tubelet; (1, 16, 16) gives patches of single frames.
        frames: how many frames of a clip, spread evenly over it; with `fps` or `every` the most, from its start.
        fps: take a frame every 1 / fps seconds instead.
        every: take each so many-th frame instead.
        size: side in pixels, or (height, width), that frames are scaled to cover, centre cut out; None keeps a clip's own.
        positions: ``"learned"`` (a table over time and one over places, stretched over other grids), ``"sincos"`` (3-D) or
            ``"none"``.
        time: ``"grid"`` or ``"seconds"``: the unit of `pos`'s t. Seconds are the mean time stamp of a tubelet's frames.
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
        self.sampling = Sampling(frames, fps, every)
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
        self.time_embed = self.place_embed = None
        if positions == "learned":
            # the grid of `size`, or one of 14 x 14 that is stretched over every clip's own
            self.table = grid_size(
                (frames, *(self.size or (14 * self.tubelet[1], 14 * self.tubelet[2]))), self.tubelet
            )
            self.time_embed = nn.Parameter(torch.empty(self.table[0], dim))
            self.place_embed = nn.Parameter(torch.empty(*self.table[1:], dim))
        elif positions == "sincos":
            sincos_positions(torch.zeros(1, 3), dim)  # says so now if dim is too small
        self.init_weights()

    def init_weights(self) -> None:
        """Projection: normal with variance 1 / inputs, cut at two sigma (LeCun), bias 0; positions: deviation 0.02."""
        nn.init.trunc_normal_(
            self.proj.weight, std=(std := self.proj.in_features**-0.5), a=-2 * std, b=2 * std
        )
        nn.init.zeros_(self.proj.bias)
        for table in (self.time_embed, self.place_embed):
            if table is not None:
                nn.init.normal_(table, std=0.02)

    # ---- the three verbs ---------------------------------------------------------------------------------------

    def read(self, source: Any, rate: float = 25.0) -> Tensor:
        """One clip -> its chosen frames, RGB uint8 (T, 3, H, W), upright; see `clips.read_video` for what is taken.

        The frames' time stamps stand beside them as the tensor's attribute `seconds`, float64 (T,).

        Args:
            source: a path, bytes or binary file; or all frames as a tensor uint8 (T, 3, H, W) / ndarray (T, H, W, 3).
            rate: frames per second of frames given as an array.

        Raises:
            InputError: it cannot be read; names the file.
        """
        frames, seconds = read_video(source, self.sampling, self.size, rate)
        frames.seconds = seconds
        return frames

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Clips from `read` -> one batch.

        Returns:
            `patches` (B, N, P) uint8, `coords` (B, N, 3) as (t, y, x), `lengths`, `grids` (B times (steps, rows, columns)),
            `micros` (B, N) int64, the tubelets' times in microseconds, and for learned positions each token's weights on the tables.

        Raises:
            InputError: a clip is not uint8 (T, 3, H, W), or there is none.
        """
        if not len(raws):
            raise InputError("no clip to collate: expected at least one")
        cut, grids, micros = [], [], []
        for i, raw in enumerate(raws):
            if not isinstance(raw, Tensor) or raw.dtype != torch.uint8 or raw.ndim != 4 or raw.shape[1] != 3:
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(
                    f"clip {i} of the batch is {found}, expected uint8 (T, 3, H, W) as read() gives"
                )
            if not raw.numel():
                raise InputError(f"clip {i} of the batch is {tuple(raw.shape)}: holds no pixel")
            x = pad_to_patches(raw.transpose(0, 1), self.tubelet)  # (3, T, H, W)
            grid = grid_size(x.shape[1:], self.tubelet)
            cut.append(patchify(x[None], self.tubelet)[0])
            grids.append(grid)
            micros.append(self._micros(raw, grid))
        coords = [grid_coords(g) for g in grids]
        batch = Batch(
            patches=pad_sequence(cut, batch_first=True),
            coords=pad_sequence(coords, batch_first=True),
            micros=pad_sequence(micros, batch_first=True),
            lengths=tuple(len(c) for c in cut),
            grids=tuple(grids),
        )
        if self.time_embed is not None:
            for axis, name in enumerate(("time_weights", "row_weights", "column_weights")):
                parts = [
                    axis_weights(g[axis], self.table[axis])[c[:, axis]]
                    for g, c in zip(grids, coords, strict=True)
                ]
                batch[name] = pad_sequence(parts, batch_first=True)
        return batch

    def _micros(self, raw: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The mean time stamp of each tubelet's frames in microseconds, whole so that no cast rounds it: (N,) int64."""
        stamps = getattr(raw, "seconds", None)
        if stamps is None or len(stamps) != len(raw):  # an augmentation made a new tensor of it
            stamps = torch.arange(len(raw), dtype=torch.float64) / (self.sampling.fps or 25.0)
        of = torch.arange(len(raw)) // self.tubelet[0]
        total = torch.zeros(grid[0], dtype=torch.float64).index_add_(0, of, stamps)
        mean = total / torch.bincount(of, minlength=grid[0])
        return (mean * 1e6).round().long().repeat_interleave(grid[1] * grid[2])

    def forward(self, batch: Batch) -> Tokens:
        """A batch from `collate` on the model's device -> its tokens (B, N, dim)."""
        x, coords = self._projected(batch["patches"]), batch["coords"]
        if self.time_embed is not None:
            places = batch["row_weights"][..., None] * batch["column_weights"][..., None, :]
            x = x + batch["time_weights"].to(x.dtype) @ self.time_embed.to(x.dtype)
            x = x + places.flatten(2).to(x.dtype) @ self.place_embed.flatten(0, 1).to(x.dtype)
        elif self.positions == "sincos":
            x = x + sincos_positions(coords, self.dim).to(x.dtype)
        pos = coords.to(torch.float32)
        if self.time == "seconds":
            pos = torch.cat([(batch["micros"].double() / 1e6).float()[..., None], pos[..., 1:]], -1)
        return self.wrap(x, batch["lengths"], "bidirectional", pos=pos)

    def _projected(self, patches: Tensor) -> Tensor:
        """(B, N, P) uint8 -> (B, N, D)."""
        patches = patches.to(torch.float32)
        channels = patches.unflatten(-1, (3, -1)).unbind(-2)
        for values, mean, std in zip(channels, self.mean, self.std, strict=True):
            values.mul_(1 / (255 * std)).sub_(mean / std)
        return self.proj(patches.to(self.proj.weight.dtype))


def by_time(tokens: Tokens, grids: Sequence[tuple[int, int, int]]) -> Tokens:
    """Each time step of a clip a segment of its own: a trunk then reads space only (ViViT's first half).

    Args:
        tokens: (B, N, D) from `VideoTokenizer`, one clip a row.
        grids: ``batch["grids"]``.

    Returns:
        The same tokens; `pool` gives one vector for each time step, (sum of steps, D).
    """
    places = [grid_coords(g)[:, 0] for g in grids]
    return _regroup(tokens, None, places, [(rows * columns,) * steps for steps, rows, columns in grids])


def by_place(tokens: Tokens, grids: Sequence[tuple[int, int, int]]) -> Tokens:
    """Each place of a clip a segment of its own, in order of time: a trunk then reads time only (ViViT's second half).

    Args:
        tokens: (B, N, D) from `VideoTokenizer`, one clip a row, in its order.
        grids: ``batch["grids"]``.

    Returns:
        The tokens turned round, all times of the first place before those of the second; `pos` goes along.
    """
    orders = [torch.arange(math.prod(g)).view(g[0], -1).T.flatten() for g in grids]
    places = [torch.arange(rows * columns).repeat_interleave(steps) for steps, rows, columns in grids]
    return _regroup(tokens, orders, places, [(steps,) * (rows * columns) for steps, rows, columns in grids])


def _regroup(
    tokens: Tokens, orders: list[Tensor] | None, segments: list[Tensor], lengths: list[tuple]
) -> Tokens:
    n = tokens.shape[1]
    if len(segments) != len(tokens) or any(len(s) > n for s in segments):
        raise InputError(
            f"grids tell of clips of {[len(s) for s in segments]} tokens, tokens are {tuple(tokens.shape)}"
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
