"""Point clouds and meshes -> Tokens: patches of neighbouring points, as in Point-BERT and Point-MAE.

Notable: a point cloud is a set, so the tokens must not depend on the order of its points. Points are sorted by
coordinates first; every later choice (the first sample, ties) is then made by index. Coordinates are stored in the
batch as int32 bits, so that casting the batch to half precision does not round them and change the grouping.

Shapes: B clouds, N points, G patches, K neighbours, C features, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.points.read import MAX_VALUE, read_geometry
from worldtokens.tokenizers.points.sampling import (
    downsample,
    farthest_points,
    nearest_neighbours,
    sample_surface,
    take,
)
from worldtokens.tokens import Tokens

NORMALIZE = ("sphere", "centre", "none")


class PointTokenizer(Tokenizer):
    """Point clouds and meshes -> one token per patch of points (Point-BERT, Yu et al. 2022; Point-MAE, Pang et al. 2022).

    Patch centres come from farthest point sampling, starting at the point farthest from the centre of the bounding box. A
    patch holds a centre's nearest neighbours (the centre included), relative to the centre. A mini-PointNet embeds it: two
    shared layers, their maximum concatenated to each point, two more layers, maximum. Norms are LayerNorms instead of the
    papers' BatchNorms, so that clouds of a batch do not mix. An MLP of the centre is added as position embedding.

    Order and exact repetitions of points change nothing. A cloud with fewer than `patches` points gives one token per
    point, and patches with fewer than `neighbours` points are masked; no point is repeated.

    `pos` is the centre's (z, y, x) times `pos_scale`, so y and x are the axes that images use. By default the unit sphere
    is sqrt(patches) units wide, like a square image of as many patches.

    Args:
        dim: width D of the tokens.
        points: maximum number of points N. A mesh is sampled at exactly as many, uniformly by area and deterministically
            (`sampling.sample_surface`). A larger cloud is downsampled along a space-filling curve, which keeps its
            density.
        patches: tokens G per cloud, at most `points`.
        neighbours: points K per patch.
        features: extra columns C of each point that are embedded. Tensors, arrays, .npy, .npz and text files give the
            columns after x, y, z; point clouds in .ply, .glb and .obj their colours in [0, 1]; meshes their unit normals.
            Further columns of a source are ignored; fewer raise an error.
        normalize: ``"sphere"`` (mean at the origin, farthest point at distance 1), ``"centre"`` (mean at the origin) or
            ``"none"``. Features are not normalised.
        hidden: widths of the mini-PointNet's three hidden layers.
        pos_scale: token-grid units per unit of (normalised) length; None: sqrt(patches) / 2.

    Raises:
        InputError: a setting is out of its range.
    """

    modality = "points"

    def __init__(
        self,
        dim: int,
        points: int = 1024,
        patches: int = 64,
        neighbours: int = 32,
        features: int = 0,
        normalize: str = "sphere",
        hidden: tuple[int, int, int] = (128, 256, 512),
        pos_scale: float | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (("dim", dim, 1), ("points", points, 1), ("patches", patches, 1),
                                   ("neighbours", neighbours, 1), ("features", features, 0)):  # fmt: skip
            if type(value) is not int or value < least:
                raise InputError(f"{name} is {value!r}, expected an integer >= {least}")
        if patches > points:
            raise InputError(f"patches={patches} is more than points={points}: each patch has its own centre")
        if normalize not in NORMALIZE:
            raise InputError(f"normalize is {normalize!r}, expected one of {', '.join(NORMALIZE)}")
        self.dim, self.points, self.patches, self.neighbours = dim, points, patches, neighbours
        self.features, self.normalize = features, normalize
        self.pos_scale = patches**0.5 / 2 if pos_scale is None else float(pos_scale)
        first, second, third = hidden
        self.fc1, self.norm1 = nn.Linear(3 + features, first), nn.LayerNorm(first)
        self.fc2 = nn.Linear(first, second)
        # a layer over concat(maximum, point) is a sum of two layers; that of the maximum is computed once per patch
        self.fc3_all, self.fc3 = nn.Linear(second, third, bias=False), nn.Linear(second, third)
        self.norm3, self.fc4 = nn.LayerNorm(third), nn.Linear(third, dim)
        self.pos_embed = nn.Sequential(nn.Linear(3, 128), nn.GELU(), nn.Linear(128, dim))

    # ---- raw point clouds ------------------------------------------------------------------------------------

    def read(self, source: Any) -> Tensor:
        """One point cloud -> (n, 3 + C) float64 with 1 <= n <= `points`, in the source's units.

        Points with NaN coordinates, as depth cameras write for missing returns, are dropped.

        Args:
            source: as in `read.read_geometry`: a path, bytes, a binary file, an array or tensor (V, 3 + C), a trimesh.

        Raises:
            InputError: it cannot be read or has no points; names the file.
        """
        geometry = read_geometry(source)
        extra: np.ndarray | None
        if geometry.faces is not None:
            points, extra = sample_surface(geometry.points, geometry.faces, self.points)
            if not len(points):  # all faces are degenerate: only the corners are left
                corners = np.unique(geometry.faces)
                points, extra = geometry.points[corners], np.zeros((len(corners), 3))
        else:
            points, extra = geometry.points, geometry.extra
        have = 0 if extra is None else extra.shape[1]
        if have < self.features:
            raise InputError(
                f"{geometry.name}: has {have} columns besides x, y, z, expected features={self.features}; build the "
                f"front-end with features={have} or give a source with more columns"
            )
        if self.features and extra is not None:
            points = np.concatenate([points, extra[:, : self.features]], 1)
        points = points[~np.isnan(points[:, :3]).any(1)]
        if not len(points):
            raise InputError(f"{geometry.name}: all coordinates are NaN, expected at least one point")
        if not np.isfinite(points).all():
            raise InputError(f"{geometry.name}: a feature is NaN or infinite, expected finite numbers")
        return torch.from_numpy(downsample(points, self.points))

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw point clouds -> one batch: sorted, deduplicated, normalised, padded.

        Returns:
            `bits` (B, N, 3 + C) int32, the bits of float32 values; `count` (B,) int64, points per cloud; `lengths`,
            tokens per cloud.

        Raises:
            InputError: a raw cloud is not (n, 3 + C) floats, has no points, or is not finite.
        """
        if not len(raws):
            raise InputError("no point cloud to collate: expected at least one")
        clouds = []
        for i, raw in enumerate(raws):
            if not isinstance(raw, Tensor) or raw.ndim != 2 or not raw.is_floating_point():
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(
                    f"cloud {i} of the batch is {found}, expected floats (n, {3 + self.features})"
                )
            if raw.shape[1] != 3 + self.features or not len(raw):
                raise InputError(
                    f"cloud {i} of the batch is {tuple(raw.shape)}, expected (n, {3 + self.features}) with n >= 1: x, y, z "
                    f"and features={self.features} columns"
                )
            if not bool((raw.abs() <= MAX_VALUE).all()):
                raise InputError(f"cloud {i} of the batch has NaN, infinity or values beyond {MAX_VALUE:g}")
            clouds.append(self._sorted(raw.double().numpy()))
        count = [len(c) for c in clouds]
        padded = nn.utils.rnn.pad_sequence(clouds, batch_first=True)
        return Batch(
            bits=padded.view(torch.int32),
            count=torch.tensor(count),
            lengths=tuple(min(n, self.patches) for n in count),
        )

    def _sorted(self, points: np.ndarray) -> Tensor:
        """(n, 3 + C) float64 -> (n', 3 + C) float32: sorted by coordinates, without repetitions, normalised."""
        points = np.unique(downsample(points, self.points) + 0.0, axis=0)  # + 0.0 turns -0.0 into 0.0
        if self.normalize != "none":
            points[:, :3] -= points[:, :3].mean(0)
        if self.normalize == "sphere":
            radius = np.sqrt((points[:, :3] ** 2).sum(1).max())
            points[:, :3] /= radius if radius > 0 else 1.0
        # rounding to float32 may make points equal
        return torch.from_numpy(np.unique(points.astype(np.float32) + np.float32(0), axis=0))

    # ---- tokens --------------------------------------------------------------------------------------------

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """A batch on the model's device -> Tokens (B, G, D), padded.

        Args:
            batch: from `collate`; or clouds of one size as a plain float tensor (B, N, 3 + C), **already normalised**.

        Raises:
            InputError: a plain tensor has another shape.
        """
        if isinstance(batch, Tensor):
            batch = self._from_tensor(batch)
        bits, count, lengths = batch["bits"], batch["count"], batch["lengths"]
        points = bits.view(torch.float32)
        xyz = points[..., :3]
        valid = torch.arange(points.shape[1], device=points.device) < count[:, None]
        centre, member, real = self.group(xyz, valid, max(lengths))
        centres = take(xyz, centre)  # (B, G, 3)
        patches = take(points, member.flatten(1)).unflatten(1, member.shape[1:])  # (B, G, K, 3 + C)
        local = torch.cat([patches[..., :3] - centres[:, :, None], patches[..., 3:]], -1)
        x = self._embed(local, real) + self.pos_embed(centres.to(self.fc1.weight.dtype))
        pos = centres.flip(-1) * self.pos_scale  # x, y, z -> (z, y, x)
        return self.wrap(x, lengths, "bidirectional", pos=pos)

    def group(self, xyz: Tensor, valid: Tensor, patches: int) -> tuple[Tensor, Tensor, Tensor]:
        """Groups points into patches.

        Args:
            xyz: (B, N, 3) float32 in the order of `collate`.
            valid: (B, N) bool.
            patches: number of patches G.

        Returns:
            indices into N of the centres (B, G) and of their members (B, G, K), and (B, G, K) bool, True = a real member.
        """
        with torch.no_grad():
            centre = farthest_points(xyz, patches, valid)
            member, real = nearest_neighbours(xyz, take(xyz, centre), self.neighbours, valid)
        return centre, member, real

    def _from_tensor(self, points: Tensor) -> Batch:
        width = 3 + self.features
        if (
            points.ndim != 3
            or points.shape[2] != width
            or not points.shape[1]
            or not points.is_floating_point()
        ):
            raise InputError(
                f"point clouds are {tuple(points.shape)} {points.dtype}, expected floats (B, N, {width}) with N >= 1"
            )
        b, n, _ = points.shape
        points = points.float() + 0.0
        order = torch.arange(n, device=points.device).expand(b, n)
        for column in reversed(range(width)):  # stable sorts from the last column to the first
            by = points[..., column].gather(1, order).argsort(dim=1, stable=True)
            order = order.gather(1, by)
        count = torch.full((b,), n, device=points.device)
        bits = take(points, order).view(torch.int32)
        return Batch(bits=bits, count=count, lengths=(min(n, self.patches),) * b)

    def _embed(self, local: Tensor, real: Tensor) -> Tensor:
        """The mini-PointNet: points (B, G, K, 3 + C) and (B, G, K) bool, True = real -> (B, G, D)."""
        act = nn.functional.gelu
        h = self.fc2(act(self.norm1(self.fc1(local.to(self.fc1.weight.dtype)))))
        whole = _max(h, real)[:, :, None]  # (B, G, 1, second)
        h = self.fc3_all(whole) + self.fc3(h)
        return _max(self.fc4(act(self.norm3(h))), real)


def _max(h: Tensor, real: Tensor) -> Tensor:
    """(B, G, K, W) -> (B, G, W), the maximum over real members; zeros at padding."""
    # the first member is the centre, so only padding has no real member
    return h.masked_fill(~real[..., None], -torch.inf).amax(2).masked_fill(~real[..., :1], 0)
