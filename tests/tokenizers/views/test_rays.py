"""Pluecker rays worked out by hand."""

import math

import numpy as np
import pytest
import torch

from worldtokens.tokenizers.views.rays import pluecker_rays


def test_rays_by_hand(camera, pose):
    # a camera at (0, 0, -3) facing along z; pixel (row 1, column 2) has its centre at (2.5, 1.5)
    rays = pluecker_rays(camera(matrix=pose(0, 0, -3)), (8, 12))[0, :, 1, 2]
    d = np.array([(2.5 - 6) / 10, (1.5 - 4) / 10, 1.0])
    d /= np.linalg.norm(d)
    moment = np.array([3 * d[1], -3 * d[0], 0.0])  # (0, 0, -3) x (a, b, c) = (3 b, -3 a, 0)
    assert rays[:3].numpy() == pytest.approx(d, abs=1e-6) and rays[3:].numpy() == pytest.approx(
        moment, abs=1e-6
    )


def test_the_axes_are_those_of_opencv(camera, rotation):
    rays = pluecker_rays(camera(cx=6.5, cy=4.5), (8, 12))[0]
    assert rays[:3, 4, 6].tolist() == pytest.approx([0, 0, 1])  # the centre is forward, along z
    assert rays[0, 4, 7] > 0 and rays[1, 5, 6] > 0  # the next column is to the right, the next row below
    # rotated to the left about y by 90 degrees, the centre is along -x
    left = pluecker_rays(camera(cx=6.5, cy=4.5, matrix=rotation("y", -math.pi / 2)), (8, 12))[0]
    assert left[:3, 4, 6].tolist() == pytest.approx([-1, 0, 0], abs=1e-6)


def test_directions_are_unit_vectors_orthogonal_to_moments(poses, camera):
    rays = pluecker_rays(torch.cat([camera(matrix=m) for m in poses]), (8, 12))
    d, m = rays.split(3, 1)
    assert (d.norm(dim=1) - 1).abs().max() < 1e-6 and (d * m).sum(1).abs().max() < 1e-5


def test_a_ray_does_not_depend_on_its_start(camera, pose):
    """Moving the camera along one pixel's ray keeps that pixel's six numbers and changes the others."""
    matrix = pose(1, 2, -3, ("y", 0.3), ("x", -0.2))
    ref = pluecker_rays(camera(matrix=matrix), (8, 12))[0]
    for way in (-2.0, 0.5, 4.0):
        slid = matrix.copy()
        slid[:3, 3] += way * ref[:3, 3, 5].double().numpy()
        got = pluecker_rays(camera(matrix=slid), (8, 12))[0]
        assert (got[:, 3, 5] - ref[:, 3, 5]).abs().max() < 1e-5
        assert (got[3:, 0, 0] - ref[3:, 0, 0]).abs().max() > 1e-2


def test_rays_of_two_views_of_a_point_intersect_there(poses, camera, pose):
    point = np.array([0.4, -0.3, 2.0])
    for matrix in [*poses[:1], pose(1, 0, 0, ("y", -0.3))]:
        local = np.linalg.inv(matrix) @ np.r_[point, 1]
        # an image of one pixel whose centre (0.5, 0.5) sees the point
        cx, cy = 0.5 - 10 * local[0] / local[2], 0.5 - 10 * local[1] / local[2]
        ray = pluecker_rays(camera(cx=cx, cy=cy, matrix=matrix), (1, 1))[0, :, 0, 0].double().numpy()
        # a point p lies on the line when p x d is its moment
        assert np.cross(point, ray[:3]) == pytest.approx(ray[3:], abs=1e-5)
