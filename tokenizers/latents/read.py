"""Reads triplanes: .npy and .npz files, arrays and tensors -> (3, C, H, W) float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.tokenizers.files import read_arrays, read_bytes

MAX_VALUES = 1 << 26  # per sample; 256 MB


def read_triplane(source: Any, channels: int, patch: tuple[int, ...]) -> Tensor:
    """Three feature planes -> (3, C, H, W) float32.

    Args:
        source: a tensor or ndarray of that shape, or an .npy or .npz file (path, bytes, binary file) with one such array,
            named `planes` if the file has several arrays.
        channels: C.
        patch: H and W are multiples of this (height, width).

    Raises:
        InputError: it cannot be read, has another shape, or is not finite; names the file.
    """
    if isinstance(source, np.ndarray | Tensor):
        name, planes = f"<{type(source).__name__.lower()}>", source
    else:
        name, data, _ = read_bytes(source, ("npy", "npz"))
        arrays = read_arrays(data, name)
        planes = arrays.get("planes", next(iter(arrays.values()), None) if len(arrays) == 1 else None)
        if planes is None:
            raise InputError(
                f"{name}: has arrays {sorted(arrays)[:8]}, expected `planes` (3, {channels}, H, W)"
            )
    numbers = planes.is_floating_point() if isinstance(planes, Tensor) else planes.dtype.kind in "fiu"
    if planes.ndim != 4 or planes.shape[0] != 3 or planes.shape[1] != channels or not numbers:
        raise InputError(
            f"{name}: is {planes.dtype} of shape {tuple(planes.shape)}, expected floats (3, {channels}, H, W)"
        )
    height, width = planes.shape[2:]
    if not 0 < math.prod(planes.shape) <= MAX_VALUES or height % patch[0] or width % patch[1]:
        raise InputError(
            f"{name}: planes of {height}x{width} cells, expected sides that are multiples of the patch {patch} and at "
            f"most {MAX_VALUES:,} values"
        )
    planes = torch.as_tensor(planes).detach().cpu().float()
    if not bool(planes.isfinite().all()):
        raise InputError(f"{name}: has NaN or infinity")
    return planes
