"""Rays of a pinhole camera in Pluecker coordinates."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def pluecker_rays(cameras: Tensor, size: tuple[int, int]) -> Tensor:
    """The ray through the centre of every pixel in Pluecker coordinates.

    A ray is its unit direction d and its moment o x d about the origin, where o is the position of the camera. Any
    other point of the ray in place of o gives the same moment: the six numbers identify the line, not its start.

    Args:
        cameras: (V, 16) float32: fx, fy, cx, cy in pixels of `size`, then the 3 x 4 camera-to-world matrix.
        size: (h, w).

    Returns:
        (V, 6, h, w) float32: d as x, y, z in world coordinates, then the moment.
    """
    h, w = size
    fx, fy, cx, cy = cameras[:, :4, None, None].unbind(1)  # each (V, 1, 1)
    pose = cameras[:, 4:].unflatten(-1, (3, 4))
    # a padded view has no camera; a focal length of 1 keeps its rays finite
    fx, fy = (f.masked_fill(f == 0, 1) for f in (fx, fy))
    x = (torch.arange(w, device=cameras.device) + 0.5 - cx) / fx  # (V, 1, w)
    y = (torch.arange(h, device=cameras.device)[:, None] + 0.5 - cy) / fy  # (V, h, 1)
    local = torch.stack(torch.broadcast_tensors(x, y, torch.ones_like(x)), -1)  # (V, h, w, 3)
    # written as sums: a matrix product might be rounded to TF32 on a GPU
    d = (pose[:, None, None, :, :3] * local[..., None, :]).sum(-1)
    d = nn.functional.normalize(d, dim=-1)
    o = pose[:, None, None, :, 3].expand_as(d)
    return torch.cat([d, torch.linalg.cross(o, d)], -1).permute(0, 3, 1, 2)
