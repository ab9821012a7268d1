"""Patches of a grid and their positions: shared by images, videos and views.

A patch is flattened in the order (C, *patch), which is the order of a convolution's weight, so a linear layer over
patches equals a convolution whose stride is its kernel. A side that is not a multiple of the patch is padded by
repeating its edge: nothing is cropped.

Shapes: B batch, C channels, N patches, D width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from worldtokens.errors import InputError

# Interpolation of a learned position table: anti-aliased with a cubic (timm) or a triangle (SigLIP 2), with the cubic over
# the square of the longer side (timm's `pos_embed_ar_preserving`), or with a cubic without anti-aliasing (transformers).
POSITION_INTERPOLATIONS = ("bicubic", "bilinear", "bicubic_aspect", "bicubic_no_antialias")

# (grid, patches) by the number of axes: series, images, videos
PATTERNS = {
    1: ("b c (x px)", "b x (c px)"),
    2: ("b c (y py) (x px)", "b (y x) (c py px)"),
    3: ("b c (t pt) (y py) (x px)", "b (t y x) (c pt py px)"),
}


@overload
def sides(value: int | Sequence[int], n: Literal[1], name: str) -> tuple[int]: ...
@overload
def sides(value: int | Sequence[int], n: Literal[2], name: str) -> tuple[int, int]: ...
@overload
def sides(value: int | Sequence[int], n: Literal[3], name: str) -> tuple[int, int, int]: ...
def sides(value: int | Sequence[int], n: int, name: str) -> tuple[int, ...]:
    """One int for all of `n` sides, or one for each -> a tuple of `n` positive ints.

    Raises:
        InputError: another count, or something that is not a positive whole number.
    """
    given = (value,) * n if isinstance(value, int) else value
    if not isinstance(given, list | tuple) or len(given) != n or any(type(v) is not int for v in given):
        raise InputError(f"{name} is {value!r}, expected a whole number or {n} of them")
    if min(given) < 1:
        raise InputError(f"{name} is {value!r}, expected 1 or more")
    return tuple(given)


@overload
def grid_size(size: tuple[int, int], patch: Sequence[int]) -> tuple[int, int]: ...
@overload
def grid_size(size: tuple[int, int, int], patch: Sequence[int]) -> tuple[int, int, int]: ...
@overload
def grid_size(size: Sequence[int], patch: Sequence[int]) -> tuple[int, ...]: ...
def grid_size(size: Sequence[int], patch: Sequence[int]) -> tuple[int, ...]:
    """Number of patches along each side, a remainder counting as a whole patch: (230,), (16,) -> (15,)."""
    return tuple(-(-s // p) for s, p in zip(size, patch, strict=True))


def pad_to_patches(x: Tensor, patch: Sequence[int]) -> Tensor:
    """Repeat the last row, column, ... until each trailing side is a multiple of its patch.

    Repeating the edge adds no contrast that the image lacks, and is the same before and after normalisation.

    Args:
        x: (..., *sides), any type.
        patch: one size for each of the trailing sides.
    """
    for axis, p in zip(range(-len(patch), 0), patch, strict=True):
        n = x.shape[axis]
        if n % p:
            x = x.index_select(axis, torch.arange(n + -n % p, device=x.device).clamp(max=n - 1))
    return x


def patchify(x: Tensor, patch: Sequence[int]) -> Tensor:
    """Cut into patches in row-major order: (B, C, *sides) -> (B, N, C * prod(patch)).

    Args:
        x: any type; each side a multiple of its patch (`pad_to_patches`).
        patch: one to three sizes, one for each side after C: (ph, pw) for images, (pt, ph, pw) for videos.

    Raises:
        InputError: a side is not a multiple of its patch.
    """
    size = x.shape[2:]
    if len(size) != len(patch) or any(s % p for s, p in zip(size, patch, strict=True)):
        raise InputError(
            f"sides {tuple(size)} are not multiples of the patch {tuple(patch)}: pad_to_patches first"
        )
    grid, patches = PATTERNS[len(patch)]
    return rearrange(x, f"{grid} -> {patches}", **_lengths("p", patch))


def unpatchify(x: Tensor, patch: Sequence[int], grid: Sequence[int]) -> Tensor:
    """The inverse of `patchify`: (B, N, C * prod(patch)) -> (B, C, *sides).

    Args:
        grid: patches along each side; its product is N.

    Raises:
        InputError: N is not the product of `grid`, or a patch has no whole number of channels.
    """
    n, size = x.shape[1:]
    if n != math.prod(grid) or size % math.prod(patch):
        raise InputError(
            f"patches of shape {(n, size)} do not fill a grid {tuple(grid)} of patches {tuple(patch)}"
        )
    whole, patches = PATTERNS[len(patch)]
    return rearrange(x, f"{patches} -> {whole}", **_lengths("p", patch), **_lengths("", grid))


def _lengths(prefix: str, sizes: Sequence[int]) -> dict[str, int]:
    """Axis lengths by their names in `PATTERNS`: ("p", (16, 8)) -> {"py": 16, "px": 8}."""
    return {prefix + axis: n for axis, n in zip("tyx"[-len(sizes) :], sizes, strict=True)}


def grid_coords(grid: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Whole-number coordinates of a grid's patches in row-major order: (N, len(grid)) int64."""
    axes = [torch.arange(n, device=device) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)


def sincos_positions(coords: Tensor, dim: int, temperature: float = 10000.0) -> Tensor:
    """Fixed sine and cosine positions over any number of axes, as in ViT and MAE; coordinates need not be a grid.

    With k axes each gets dim // (2k) frequencies, laid out as (sin of every axis, cos of every axis) like timm's
    `build_sincos2d_pos_embed`. The channels left over are zero.

    Args:
        coords: (..., k), in patches.
        dim: width D, at least 2k.

    Returns:
        (..., D) float32.

    Raises:
        InputError: `dim` is too small.
    """
    k = coords.shape[-1]
    bands = dim // (2 * k)
    if bands == 0:
        raise InputError(f"dim is {dim}, but sin-cos positions over {k} axes need at least {2 * k}")
    exponent = torch.arange(bands, dtype=torch.float32, device=coords.device) / bands
    angle = coords.float()[..., None] * temperature**-exponent  # (..., k, bands)
    out = torch.stack([angle.sin(), angle.cos()], -3).flatten(-3)
    return F.pad(out, (0, dim - out.shape[-1])) if dim > out.shape[-1] else out


def resample_positions(table: Tensor, grid: Sequence[int], how: str = "bicubic") -> Tensor:
    """Interpolate a learned position table to another grid, as timm's `resample_abs_pos_embed` does.

    The old grid is the table's own shape: it need not be square, and (2, 8) differs from (4, 4).

    Args:
        table: (rows, columns, D).
        grid: the new rows and columns.
        how: one of `POSITION_INTERPOLATIONS`.

    Returns:
        (rows, columns, D) in the table's type.
    """
    # symbolic sides are those of a graph that is being exported
    known = not any(isinstance(n, torch.SymInt) for n in grid)
    if known and tuple(table.shape[:2]) == tuple(grid):
        return table
    # Not F.interpolate on the table: as of torch 2.14 its anti-aliased form gives wrong values on the CPU when the
    # result is one column wide, which a narrow image is. Each axis by itself is right.
    weights = [w.to(table.device) for w in interpolation_weights(grid, table.shape[:2], how, known)]
    return torch.einsum("yi,xj,ijd->yxd", *weights, table.float()).to(table.dtype)


def interpolation_weights(
    grid: Sequence[int], old: Sequence[int], how: str = "bicubic", known: bool = True
) -> tuple[Tensor, Tensor]:
    """Weights of a table's rows and columns in the rows and columns of another grid: (new, old) float32 each (CPU).

    Args:
        grid: the new rows and columns.
        old: the table's.
        how: one of `POSITION_INTERPOLATIONS`.
        known: False where the sides are symbolic, those of a graph that is being exported.
    """
    mode = how.removesuffix("_aspect")
    weights = axis_weights if known else symbolic_axis_weights
    if mode == how or (known and tuple(grid) == tuple(old)):
        y, x = (weights(n, o, mode) for n, o in zip(grid, old, strict=True))
        return y, x
    longest = max(grid) if known else torch.sym_max(*grid)
    y, x = (weights(longest, o, mode)[:n] for n, o in zip(grid, old, strict=True))
    return y, x


@functools.lru_cache(maxsize=4096)
def axis_weights(new: int, old: int, how: str = "bicubic") -> Tensor:
    """Weight of each of `old` table rows in each of `new` positions: (new, old) float32 (CPU).

    `resample_positions` is linear and separable, so ``einsum("yi,xj,ijd->yxd", wy, wx, table)`` equals it; that
    form serves a batch in which every image has its own grid.
    """
    mode = "bilinear" if how == "bilinear" else "bicubic"
    # no gradient and no inference flag may stick to a cached tensor
    with torch.inference_mode(False), torch.no_grad():
        eye = torch.eye(old)[None, None]
        antialias = how != "bicubic_no_antialias"
        return F.interpolate(eye, size=(new, old), mode=mode, antialias=antialias)[0, 0].clone()


def symbolic_axis_weights(new: int | torch.SymInt, old: int, how: str = "bicubic") -> Tensor:
    """`axis_weights` by its formula, so that a graph can be exported for any `new`.

    The kernel is a triangle or Catmull-Rom's cubic, widened when downsampling; for ``"bicubic_no_antialias"`` the cubic
    with a = -0.75, never widened.
    """
    ratio = old / new
    centre = (torch.arange(new, dtype=torch.float32) + 0.5) * ratio  # of each new position, in old ones
    if how == "bicubic_no_antialias":
        taps = (centre - 0.5).floor()[:, None] + torch.arange(-1, 3)  # the four old positions around it
        d = (centre[:, None] - 0.5 - taps).abs()
        near, far = (1.25 * d - 2.25) * d * d + 1, ((-0.75 * d + 3.75) * d - 6) * d + 3
        one_hot = taps.clamp(0, old - 1)[..., None] == torch.arange(old)  # edge values repeat beyond the edge
        return (torch.where(d <= 1, near, far)[..., None] * one_hot).sum(1)
    width = max(ratio, 1.0) if isinstance(new, int) else torch.sym_max(ratio, 1.0)
    x = ((torch.arange(old, dtype=torch.float32) + 0.5 - centre[:, None]) / width).abs()
    if how == "bilinear":
        w = (1 - x).clamp(min=0)
    else:
        near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
        w = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    return w / w.sum(1, keepdim=True)
