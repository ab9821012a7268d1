"""Sampling and grouping of points: surfaces, space-filling curves, farthest point sampling, nearest neighbours.

Notable: every function is deterministic and breaks ties by index. Distances are computed without matrix products, so
that equal distances stay equal in any batch and on any device.

Shapes: B clouds, N points, G centres, K neighbours, V vertices, F faces, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 25  # distances held at a time in `nearest_neighbours`


def sample_surface(points: np.ndarray, faces: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """n points on the surface of a mesh, uniform by area and deterministic.

    The i-th point lies at the fraction (i + 1/2) / n of the cumulative area of the faces, and inside its face at the i-th
    point of the R2 sequence (Roberts 2018). A face with share a of the area gets n a points, plus or minus one.

    Args:
        points: (V, 3).
        faces: (F, 3).
        n: number of points.

    Returns:
        (n, 3) points and (n, 3) unit normals of their faces; of length 0 if the mesh has no area.
    """
    a, b, c = (points[faces[:, k]] for k in range(3))
    cross = np.cross(b - a, c - a)
    double = np.linalg.norm(cross, axis=1)
    total = np.cumsum(double)
    if not total[-1] > 0:
        return np.zeros((0, 3)), np.zeros((0, 3))
    i = np.arange(n)
    at = np.searchsorted(total, (i + 0.5) / n * total[-1], side="right").clip(max=len(faces) - 1)
    plastic = 1.32471795724474602596  # the root of x^3 = x + 1
    u, v = (0.5 + (i + 1) / plastic) % 1, (0.5 + (i + 1) / plastic**2) % 1
    root = np.sqrt(u)[:, None]
    v = v[:, None]
    where = (1 - root) * a[at] + root * (1 - v) * b[at] + root * v * c[at]
    return where, cross[at] / double[at, None]


def downsample(points: np.ndarray, n: int) -> np.ndarray:
    """At most n points of a cloud, every k-th along a Z-order curve (Morton 1966), independent of the order of its rows.

    Neighbours on the curve are neighbours in space, so the result keeps the density of the cloud. Repeated rows count
    once.

    Args:
        points: (N, 3 + C) float64, finite.
        n: maximum number of points.
    """
    if len(points) <= n:
        return points
    points = np.unique(points, axis=0)
    total = len(points)
    if total <= n:
        return points
    low, high = points[:, :3].min(0), points[:, :3].max(0)
    side = (high - low).max() or 1.0
    cell = ((points[:, :3] - low) / side * (2**20 - 1)).astype(np.uint64)  # 20 bits per axis
    code = np.zeros(total, dtype=np.uint64)
    for axis in range(3):
        code |= _spread(cell[:, axis]) << np.uint64(axis)
    curve = np.argsort(code, kind="stable")  # ties stay in the order of coordinates
    return points[curve[(np.arange(n) * 2 + 1) * total // (2 * n)]]


def _spread(v: np.ndarray) -> np.ndarray:
    """Insert two zero bits between the 20 bits of each value."""
    for shift, mask in ((32, 0x1F00000000FFFF), (16, 0x1F0000FF0000FF), (8, 0x100F00F00F00F00F),
                        (4, 0x10C30C30C30C30C3), (2, 0x1249249249249249)):  # fmt: skip
        v = (v | (v << np.uint64(shift))) & np.uint64(mask)
    return v


def _squared(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Squared distance from coordinates by axis, rounded the same way in every batch (no fused or reordered sums)."""
    dx, dy, dz = (p - q for p, q in zip(a, b, strict=True))
    return dx * dx + dy * dy + dz * dz


def farthest_points(xyz: Tensor, n: int, valid: Tensor | None = None) -> Tensor:
    """Farthest point sampling (Eldar et al. 1997; PointNet++, Qi et al. 2017) of a batch of clouds.

    The first sample is the point farthest from the centre of the bounding box; each next one is farthest from all
    samples so far. Ties go to the lower index. No point is sampled twice while others are left.

    Args:
        xyz: (B, N, 3) float32.
        n: number of samples, >= 1. Those beyond a cloud's number of points are arbitrary.
        valid: (B, N) bool; default: all.

    Returns:
        (B, n) int64 indices into N.
    """
    b, length, _ = xyz.shape
    axes = [a.contiguous() for a in xyz.unbind(-1)]
    invalid = torch.zeros(b, length, dtype=torch.bool, device=xyz.device) if valid is None else ~valid
    centre = []
    for a in axes:
        low = a.masked_fill(invalid, torch.inf).amin(1, keepdim=True)
        high = a.masked_fill(invalid, -torch.inf).amax(1, keepdim=True)
        centre.append((low + high) / 2)
    sample = _squared(axes, centre).masked_fill(invalid, -1).argmax(1, keepdim=True)  # (B, 1)
    far = torch.full_like(axes[0], torch.inf).masked_fill(invalid, -1)
    samples = [sample]
    for _ in range(n - 1):
        far = torch.minimum(far, _squared(axes, [a.gather(1, sample) for a in axes])).scatter(1, sample, -1)
        sample = far.argmax(1, keepdim=True)
        samples.append(sample)
    return torch.cat(samples, 1)


def nearest_neighbours(
    xyz: Tensor, centres: Tensor, k: int, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k nearest points of each centre in ascending distance; ties go to the lower index.

    Args:
        xyz: (B, N, 3) float32.
        centres: (B, G, 3).
        k: number of neighbours; N if that is smaller.
        valid: (B, N) bool; default: all.

    Returns:
        (B, G, K) int64 indices into N with K = min(k, N), and (B, G, K) bool, True = a real neighbour.
    """
    b, n, _ = xyz.shape
    k = min(k, n)
    axes = [a[:, None] for a in xyz.unbind(-1)]
    index = torch.arange(n, device=xyz.device)
    last = torch.iinfo(torch.int64).max
    indices, real = [], []
    for chunk in centres.split(max(1, CHUNK // max(1, b * n)), 1):
        d = _squared([c[..., None] for c in chunk.unbind(-1)], axes)  # (B, g, N)
        # distances are >= 0, so their bits sort as they do; the index in the low bits breaks ties the same way in any batch
        key = (d.view(torch.int32).to(torch.int64) << 32) | index
        if valid is not None:
            key = key.masked_fill(~valid[:, None], last)
        key = key.topk(k, dim=-1, largest=False, sorted=True).values
        real.append(key != last)
        indices.append((key & 0xFFFFFFFF).masked_fill(~real[-1], 0))
    return torch.cat(indices, 1), torch.cat(real, 1)


def take(points: Tensor, indices: Tensor) -> Tensor:
    """(B, N, W) at (B, M) indices -> (B, M, W)."""
    return points.gather(1, indices[..., None].expand(-1, -1, points.shape[-1]))
