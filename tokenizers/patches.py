"""Cutting a grid into patches and telling each patch where it is: shared by images, clips and scenes.

A patch is flattened in the order (C, *patch), which is the order of a convolution's weight, so a linear layer over
patches and a convolution whose stride is its kernel are the same map. A side that is not a multiple of the patch
keeps its remainder: the last patch is filled by repeating the edge, nothing is dropped.

Shapes: B batch, C channels, N patches, D width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from worldtokens.errors import InputError

# how a learned table of positions is stretched: with anti-aliasing by a cubic (timm) or a triangle (SigLIP 2), by the cubic
# over the square of the longer side (timm's "par"), or by a cubic without anti-aliasing (transformers)
POSITION_INTERPOLATIONS = ("bicubic", "bilinear", "bicubic_aspect", "bicubic_no_antialias")


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


def grid_of(size: Sequence[int], patch: Sequence[int]) -> tuple[int, ...]:
    """How many patches cover each side, a remainder counting as a whole patch: (230,), (16,) -> (15,)."""
    return tuple(-(-s // p) for s, p in zip(size, patch, strict=True))


def pad_to_patches(x: Tensor, patch: Sequence[int]) -> Tensor:
    """Repeat the last row, column, ... until each trailing side is a multiple of its patch.

    Repeating the edge adds no line that is not in the image and means the same before and after normalisation.

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
        patch: sizes, one for each side after C: (ph, pw) for images, (pt, ph, pw) for clips.

    Raises:
        InputError: a side is not a multiple of its patch.
    """
    b, c, *size = x.shape
    if len(size) != len(patch) or any(s % p for s, p in zip(size, patch, strict=True)):
        raise InputError(
            f"sides {tuple(size)} are not multiples of the patch {tuple(patch)}: pad_to_patches first"
        )
    n = len(patch)
    x = x.reshape(b, c, *[v for s, p in zip(size, patch, strict=True) for v in (s // p, p)])
    # (B, C, g1, p1, g2, p2, ...) -> (B, g1, g2, ..., C, p1, p2, ...)
    x = x.permute(0, *range(2, 2 + 2 * n, 2), 1, *range(3, 3 + 2 * n, 2))
    return x.reshape(b, -1, c * math.prod(patch))


def unpatchify(x: Tensor, patch: Sequence[int], grid: Sequence[int]) -> Tensor:
    """The exact inverse of `patchify`: (B, N, C * prod(patch)) -> (B, C, *sides).

    Args:
        grid: patches along each side; its product is N.

    Raises:
        InputError: N is not the product of `grid`, or a patch has no whole number of channels.
    """
    b, n, size = x.shape
    c, rest = divmod(size, math.prod(patch))
    if n != math.prod(grid) or rest:
        raise InputError(
            f"patches of shape {(n, size)} do not fill a grid {tuple(grid)} of patches {tuple(patch)}"
        )
    k = len(patch)
    x = x.reshape(b, *grid, c, *patch)
    # (B, g1, g2, ..., C, p1, p2, ...) -> (B, C, g1, p1, g2, p2, ...)
    x = x.permute(0, 1 + k, *[v for i in range(k) for v in (1 + i, 2 + k + i)])
    return x.reshape(b, c, *[g * p for g, p in zip(grid, patch, strict=True)])


def grid_coords(grid: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Whole-number coordinates of a grid's patches in row-major order: (N, len(grid)) int64."""
    axes = [torch.arange(n, device=device) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)


def sincos_positions(coords: Tensor, dim: int, temperature: float = 10000.0) -> Tensor:
    """Fixed sine and cosine positions over any number of axes, as in ViT and MAE; any coordinates, not only a grid.

    Width is shared evenly: with k axes each gets dim // (2k) frequencies, laid out as (sin of every axis, cos of
    every axis) like timm's `build_sincos2d_pos_embed`. What does not divide stays zero at the end.

    Args:
        coords: (..., k), in patches.
        dim: width D, at least 2k.

    Returns:
        (..., D) float32.
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
    """Stretch a learned table of positions over another grid, as timm's `resample_abs_pos_embed` does.

    The old grid is the table's own shape, so nothing is assumed to be square and equal counts such as (2, 8) and (4, 4)
    are told apart.

    Args:
        table: (rows, columns, D).
        grid: the rows and columns wanted.
        how: of `POSITION_INTERPOLATIONS`.

    Returns:
        (rows, columns, D) in the table's type.
    """
    known = not any(
        isinstance(n, torch.SymInt) for n in grid
    )  # else: the sides of a graph that is being exported
    if known and tuple(table.shape[:2]) == tuple(grid):
        return table
    # Not F.interpolate on the table: as of torch 2.14 its anti-aliased form gives wrong values on the CPU when the
    # result is one column wide, which a narrow image is. Each axis by itself is right.
    weights = [w.to(table.device) for w in interpolation_weights(grid, table.shape[:2], how, known)]
    return torch.einsum("yi,xj,ijd->yxd", *weights, table.float()).to(table.dtype)


def interpolation_weights(
    grid: Sequence[int], old: Sequence[int], how: str = "bicubic", known: bool = True
) -> tuple[Tensor, Tensor]:
    """How much each row, and each column, of a table counts in each of a grid's: (new, old) float32 each (CPU).

    Args:
        grid: rows and columns wanted.
        old: the table's.
        how: of `POSITION_INTERPOLATIONS`.
        known: False where the sides are those of a graph that is being exported.
    """
    mode = how.removesuffix("_aspect")
    weigh = axis_weights if known else filter_weights
    if mode == how or (known and tuple(grid) == tuple(old)):
        y, x = (weigh(n, o, mode) for n, o in zip(grid, old, strict=True))
        return y, x
    longest = max(grid) if known else torch.sym_max(*grid)
    y, x = (weigh(longest, o, mode)[:n] for n, o in zip(grid, old, strict=True))
    return y, x


@functools.lru_cache(maxsize=4096)
def axis_weights(new: int, old: int, how: str = "bicubic") -> Tensor:
    """How much each of `old` table rows counts in each of `new` places: (new, old) float32 (CPU).

    `resample_positions` is linear and separable, so ``einsum("yi,xj,ijd->yxd", wy, wx, table)`` equals it; that
    form serves a batch in which every image has a grid of its own.
    """
    mode = "bilinear" if how == "bilinear" else "bicubic"
    # no gradient and no inference flag may stick to a cached tensor
    with torch.inference_mode(False), torch.no_grad():
        eye = torch.eye(old)[None, None]
        return F.interpolate(eye, size=(new, old), mode=mode, antialias=how != "bicubic_no_antialias")[
            0, 0
        ].clone()


def filter_weights(new: int | torch.SymInt, old: int, how: str = "bicubic") -> Tensor:
    """`axis_weights` by its formula, which a graph can hold that is exported for any `new`: a triangle or Catmull-Rom's
    cubic, widened where places grow fewer; for ``"bicubic_no_antialias"`` the cubic whose slope is -0.75, at its own width."""
    ratio = old / new
    middle = (torch.arange(new, dtype=torch.float32) + 0.5) * ratio  # of each new place, in old ones
    if how == "bicubic_no_antialias":
        taps = (middle - 0.5).floor()[:, None] + torch.arange(
            -1, 3
        )  # the four old places around each new one
        d = (middle[:, None] - 0.5 - taps).abs()
        near, far = (1.25 * d - 2.25) * d * d + 1, ((-0.75 * d + 3.75) * d - 6) * d + 3
        here = taps.clamp(0, old - 1)[..., None] == torch.arange(old)  # beyond the edge the edge counts
        return (torch.where(d <= 1, near, far)[..., None] * here).sum(1)
    width = max(ratio, 1.0) if isinstance(new, int) else torch.sym_max(ratio, 1.0)
    x = ((torch.arange(old, dtype=torch.float32) + 0.5 - middle[:, None]) / width).abs()
    if how == "bilinear":
        w = (1 - x).clamp(min=0)
    else:
        near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
        w = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    return w / w.sum(1, keepdim=True)
