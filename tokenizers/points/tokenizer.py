"""Point clouds and meshes -> Tokens: patches of neighbouring points, as in Point-BERT and Point-MAE.

Notable: a cloud is a set, so nothing may depend on the order of its points. Points are put in the order of their
coordinates first, after which every later choice (the first pick, ties) can be made by index. Distances are computed
without matrix products, so that a tie stays a tie in any batch and on any device; coordinates travel as bits, so
that half-precision weights do not round them and change which points are picked.

Shapes: B clouds, N points, G patches, K neighbours, C extra columns, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.points.read import MAX_VALUE, read_geometry, sample_surface
from worldtokens.tokens import Tokens

NORMALISE = ("sphere", "centre", "none")
CHUNK = 1 << 25  # distances held at a time when neighbours are sought


class PointTokenizer(Tokenizer):
    """Clouds and meshes -> one token a patch of points (Point-BERT, Yu et al. 2022; Point-MAE, Pang et al. 2022).

    Centres are picked by farthest point sampling, beginning with the point farthest from the middle of the bounding
    box; a patch is a centre's nearest neighbours, itself among them, relative to it, through a small PointNet (two
    shared layers, their maximum joined to each point, two more layers, maximum). Norms are LayerNorms, where the papers
    have BatchNorms, so that clouds of a batch do not mix. An MLP of the centre is added as position.

    The cloud is a set: order and exact repetitions change nothing. A cloud with fewer than `patches` points gives a
    token for each of its points, and patches of fewer than `neighbours` points are masked; nothing is repeated.

    `pos` is a centre's (z, y, x) times `pos_scale`, so y and x lie on the axes that images use. By default the unit
    sphere is sqrt(patches) steps wide, as a square image of so many patches is.

    Args:
        dim: width D of the tokens.
        points: the most points of a cloud. A mesh is sampled at exactly so many, evenly by area and always the same ones
            (`meshes.sample_surface`). A cloud with more is thinned to so many along a space-filling curve, which
            keeps its shape and density.
        patches: tokens G of a cloud, at most `points`.
        neighbours: points K of a patch.
        features: extra columns C of each point that are embedded. Tensors, arrays, .npy, .npz and text columns give those
            behind x, y, z; clouds in .ply, .glb and .obj their colours in [0, 1]; meshes their unit normals. Further columns
            of a source are left out, and fewer are refused.
        normalise: ``"sphere"`` (mean to the origin, farthest point to distance 1), ``"centre"`` (mean to the
            origin) or ``"none"``. Features stay as they are.
        hidden: widths of the small PointNet's three hidden layers.
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
        normalise: str = "sphere",
        hidden: tuple[int, int, int] = (128, 256, 512),
        pos_scale: float | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (("dim", dim, 1), ("points", points, 1), ("patches", patches, 1),
                                   ("neighbours", neighbours, 1), ("features", features, 0)):  # fmt: skip
            if type(value) is not int or value < least:
                raise InputError(f"{name} is {value!r}, expected a whole number of at least {least}")
        if patches > points:
            raise InputError(
                f"patches={patches} is more than points={points}: each patch has a centre of its own"
            )
        if normalise not in NORMALISE:
            raise InputError(f"normalise is {normalise!r}, expected one of {', '.join(NORMALISE)}")
        self.dim, self.points, self.patches, self.neighbours = dim, points, patches, neighbours
        self.features, self.normalise = features, normalise
        self.pos_scale = patches**0.5 / 2 if pos_scale is None else float(pos_scale)
        first, second, third = hidden
        self.fc1, self.norm1 = nn.Linear(3 + features, first), nn.LayerNorm(first)
        self.fc2 = nn.Linear(first, second)
        # one layer over (maximum, point) is the sum of one over each: the maximum's share is computed once a patch
        self.fc3_all, self.fc3 = nn.Linear(second, third, bias=False), nn.Linear(second, third)
        self.norm3, self.fc4 = nn.LayerNorm(third), nn.Linear(third, dim)
        self.place = nn.Sequential(nn.Linear(3, 128), nn.GELU(), nn.Linear(128, dim))

    # ---- raw clouds ----------------------------------------------------------------------------------------

    def read(self, source: Any) -> Tensor:
        """One cloud -> (n, 3 + C) float64 with 1 <= n <= `points`, in the source's own units.

        Rows whose coordinates are NaN, which is how depth cameras write a missing return, are left out.

        Args:
            source: as in `meshes.read_geometry`: a path, bytes, a binary file, an array or tensor (V, 3 + C), a trimesh.

        Raises:
            InputError: it cannot be read or has no point; names the file.
        """
        shape = read_geometry(source)
        if shape.faces is not None:
            points, extra = sample_surface(shape.points, shape.faces, self.points)
            if not len(points):  # all faces are lines or dots: the corners are all there is
                corners = np.unique(shape.faces)
                points, extra = shape.points[corners], np.zeros((len(corners), 3))
        else:
            points, extra = shape.points, shape.extra
        have = 0 if extra is None else extra.shape[1]
        if have < self.features:
            raise InputError(
                f"{shape.name}: has {have} columns beside x, y, z, expected features={self.features}; give the front-end "
                f"features={have} or a source with more columns"
            )
        if self.features:
            points = np.concatenate([points, extra[:, : self.features]], 1)
        points = points[~np.isnan(points[:, :3]).any(1)]
        if not len(points):
            raise InputError(f"{shape.name}: all coordinates are NaN, expected at least one point")
        if not np.isfinite(points).all():
            raise InputError(f"{shape.name}: a feature is NaN or infinite, expected finite numbers")
        return torch.from_numpy(thin(points, self.points))

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Raw clouds -> one batch: in order, without repetitions, normalised, padded.

        Returns:
            `bits` (B, N, 3 + C) int32, the float32 values bit by bit; `count` (B,) int64, points of each;
            `lengths`, tokens of each.

        Raises:
            InputError: a raw cloud is not (n, 3 + C) floats, has no point, or is not finite.
        """
        if not len(raws):
            raise InputError("no cloud to collate: expected at least one")
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
                raise InputError(f"cloud {i} of the batch holds NaN, infinity or values beyond {MAX_VALUE:g}")
            clouds.append(self._tidy(raw.double().numpy()))
        count = [len(c) for c in clouds]
        padded = nn.utils.rnn.pad_sequence(clouds, batch_first=True)
        return Batch(
            bits=padded.view(torch.int32),
            count=torch.tensor(count),
            lengths=tuple(min(n, self.patches) for n in count),
        )

    def _tidy(self, points: np.ndarray) -> Tensor:
        """(n, 3 + C) float64 -> (n', 3 + C) float32: a set in the order of its coordinates, normalised."""
        points = np.unique(thin(points, self.points) + 0.0, axis=0)  # + 0.0 makes -0.0 the 0.0 that it equals
        if self.normalise != "none":
            points[:, :3] -= points[:, :3].mean(0)
        if self.normalise == "sphere":
            radius = np.sqrt((points[:, :3] ** 2).sum(1).max())
            points[:, :3] /= radius if radius > 0 else 1.0
        # rounding may make neighbours equal
        return torch.from_numpy(np.unique(points.astype(np.float32) + np.float32(0), axis=0))

    # ---- tokens --------------------------------------------------------------------------------------------

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """A batch on the model's device -> its tokens.

        Args:
            batch: from `collate`; or clouds of one size as a plain float tensor (B, N, 3 + C), **already normalised**.

        Returns:
            (B, G, D), shorter clouds padded.

        Raises:
            InputError: a plain tensor has another shape.
        """
        if isinstance(batch, Tensor):
            batch = self._from_tensor(batch)
        bits, count, lengths = batch["bits"], batch["count"], batch["lengths"]
        points = bits.view(torch.float32)
        xyz = points[..., :3]
        valid = torch.arange(points.shape[1], device=points.device) < count[:, None]
        picks, members, near = self.group(xyz, valid, max(lengths))
        centres = _take(xyz, picks)  # (B, G, 3)
        patches = _take(points, members.flatten(1)).unflatten(1, members.shape[1:])  # (B, G, K, 3 + C)
        local = torch.cat([patches[..., :3] - centres[:, :, None], patches[..., 3:]], -1)
        x = self._embed(local, near) + self.place(centres.to(self.fc1.weight.dtype))
        pos = centres.flip(-1) * self.pos_scale  # x, y, z -> (z, y, x)
        return self.wrap(x, lengths, "bidirectional", pos=pos)

    def group(self, xyz: Tensor, valid: Tensor, patches: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which points make the patches.

        Args:
            xyz: (B, N, 3) float32 in the order that `collate` gives.
            valid: (B, N) bool.
            patches: how many, G.

        Returns:
            centres (B, G) and members (B, G, K) as places in N, and which members are real (B, G, K).
        """
        with torch.no_grad():
            picks = farthest_points(xyz, patches, valid)
            members, near = nearest(xyz, _take(xyz, picks), self.neighbours, valid)
        return picks, members, near

    def _from_tensor(self, points: Tensor) -> Batch:
        wide = 3 + self.features
        if (
            points.ndim != 3
            or points.shape[2] != wide
            or not points.shape[1]
            or not points.is_floating_point()
        ):
            raise InputError(
                f"clouds are {tuple(points.shape)} {points.dtype}, expected floats (B, N, {wide}) with N >= 1"
            )
        b, n, _ = points.shape
        points = points.float() + 0.0
        order = torch.arange(n, device=points.device).expand(b, n)
        for column in reversed(range(wide)):  # stable sorts from the last column to the first
            by = points[..., column].gather(1, order).argsort(dim=1, stable=True)
            order = order.gather(1, by)
        count = torch.full((b,), n, device=points.device)
        bits = _take(points, order).view(torch.int32)
        return Batch(bits=bits, count=count, lengths=(min(n, self.patches),) * b)

    def _embed(self, local: Tensor, near: Tensor) -> Tensor:
        """The small PointNet: (B, G, K, 3 + C) and which of them are real -> (B, G, D)."""
        act = nn.functional.gelu
        h = self.fc2(act(self.norm1(self.fc1(local.to(self.fc1.weight.dtype)))))
        whole = _largest(h, near)[:, :, None]  # (B, G, 1, second)
        h = self.fc3_all(whole) + self.fc3(h)
        return _largest(self.fc4(act(self.norm3(h))), near)


def _largest(h: Tensor, near: Tensor) -> Tensor:
    """(B, G, K, W) -> (B, G, W), over the real ones; zeros where there is none."""
    # the first member is the centre, so only padding has none
    return h.masked_fill(~near[..., None], -torch.inf).amax(2).masked_fill(~near[..., :1], 0)


def _take(points: Tensor, places: Tensor) -> Tensor:
    """(B, N, W) at (B, M) places -> (B, M, W)."""
    return points.gather(1, places[..., None].expand(-1, -1, points.shape[-1]))


def thin(points: np.ndarray, most: int) -> np.ndarray:
    """At most so many rows of a cloud, chosen along a Z-order curve (Morton 1966), whatever the order of its rows.

    Neighbours on the curve are neighbours in space, so every k-th of them is spread as the cloud is. Repeated rows
    count once.

    Args:
        points: (n, 3 + C) float64, finite.
        most: rows wanted at most.
    """
    if len(points) <= most:
        return points
    points = np.unique(points, axis=0)
    n = len(points)
    if n <= most:
        return points
    low, high = points[:, :3].min(0), points[:, :3].max(0)
    side = (high - low).max() or 1.0
    cell = ((points[:, :3] - low) / side * (2**20 - 1)).astype(np.uint64)  # 20 bits an axis
    code = np.zeros(n, dtype=np.uint64)
    for axis in range(3):
        code |= _spread(cell[:, axis]) << np.uint64(axis)
    curve = np.argsort(code, kind="stable")  # ties stay in the order of coordinates
    return points[curve[(np.arange(most) * 2 + 1) * n // (2 * most)]]


def _spread(v: np.ndarray) -> np.ndarray:
    """Put two zero bits between the 20 bits of each value."""
    for shift, mask in ((32, 0x1F00000000FFFF), (16, 0x1F0000FF0000FF), (8, 0x100F00F00F00F00F),
                        (4, 0x10C30C30C30C30C3), (2, 0x1249249249249249)):  # fmt: skip
        v = (v | (v << np.uint64(shift))) & np.uint64(mask)
    return v


def _squared(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Squared distance from coordinates by axis, rounded alike in every batch (no fused or reordered sums)."""
    dx, dy, dz = (p - q for p, q in zip(a, b, strict=True))
    return dx * dx + dy * dy + dz * dz


def farthest_points(xyz: Tensor, n: int, valid: Tensor | None = None) -> Tensor:
    """Farthest point sampling (Eldar et al. 1997; PointNet++, Qi et al. 2017), all clouds at once.

    The first pick is the point farthest from the middle of the bounding box; each next one is farthest from those
    picked. Ties go to the lower index. No point is picked twice while others are left.

    Args:
        xyz: (B, N, 3) float32.
        n: picks, at least 1. Those beyond a cloud's number of points are meaningless.
        valid: (B, N) bool; default: all.

    Returns:
        (B, n) int64 places in N.
    """
    b, length, _ = xyz.shape
    axes = [a.contiguous() for a in xyz.unbind(-1)]
    out_of_play = torch.zeros(b, length, dtype=torch.bool, device=xyz.device) if valid is None else ~valid
    middle = []
    for a in axes:
        low = a.masked_fill(out_of_play, torch.inf).amin(1, keepdim=True)
        high = a.masked_fill(out_of_play, -torch.inf).amax(1, keepdim=True)
        middle.append((low + high) / 2)
    pick = _squared(axes, middle).masked_fill(out_of_play, -1).argmax(1, keepdim=True)  # (B, 1)
    far = torch.full_like(axes[0], torch.inf).masked_fill(out_of_play, -1)
    picks = [pick]
    for _ in range(n - 1):
        far = torch.minimum(far, _squared(axes, [a.gather(1, pick) for a in axes])).scatter(1, pick, -1)
        pick = far.argmax(1, keepdim=True)
        picks.append(pick)
    return torch.cat(picks, 1)


def nearest(xyz: Tensor, centres: Tensor, k: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k nearest points of each centre, nearest first; ties go to the lower index.

    Args:
        xyz: (B, N, 3) float32.
        centres: (B, G, 3).
        k: neighbours wanted; fewer come back where N is smaller.
        valid: (B, N) bool; default: all.

    Returns:
        members (B, G, min(k, N)) int64 places in N, and which are real (B, G, min(k, N)) bool.
    """
    b, n, _ = xyz.shape
    k = min(k, n)
    axes = [a[:, None] for a in xyz.unbind(-1)]
    index = torch.arange(n, device=xyz.device)
    never = torch.iinfo(torch.int64).max
    members, real = [], []
    for part in centres.split(max(1, CHUNK // max(1, b * n)), 1):
        d = _squared([c[..., None] for c in part.unbind(-1)], axes)  # (B, g, N)
        # distances are not negative, so their bits sort as they do; the index below breaks ties in any batch alike
        key = (d.view(torch.int32).to(torch.int64) << 32) | index
        if valid is not None:
            key = key.masked_fill(~valid[:, None], never)
        key = key.topk(k, dim=-1, largest=False, sorted=True).values
        real.append(key != never)
        members.append((key & 0xFFFFFFFF).masked_fill(~real[-1], 0))
    return torch.cat(members, 1), torch.cat(real, 1)
