"""Sampling and grouping of points against plain references, with ties and large clouds."""

import numpy as np
import pytest
import torch

from worldtokens.tokenizers.points.sampling import (
    downsample,
    farthest_points,
    nearest_neighbours,
    sample_surface,
)

RNG = np.random.default_rng(0)
CUBE = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=float)
GRID = np.stack(np.meshgrid(*[np.arange(5.0)] * 3), -1).reshape(-1, 3)  # full of ties


def test_faces_are_sampled_by_area():
    points = np.array([[0, 0, 0], [3, 0, 0], [0, 3, 0], [0, 0, 1], [1, 0, 1], [0, 1, 1.0]])
    faces = np.array([[0, 1, 2], [3, 4, 5]])  # areas 4.5 and 0.5
    where, normals = sample_surface(points, faces, 100)
    low = where[where[:, 2] == 0]
    assert len(low) == 90 and (low[:, :2] >= 0).all() and (low.sum(1) <= 3 + 1e-9).all()
    assert normals.tolist() == [[0, 0, 1]] * 100
    assert np.abs(low.mean(0) - [1, 1, 0]).max() < 0.05  # the centre of the triangle


def test_samples_are_more_uniform_than_random_ones():
    points = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0.0]])
    where, _ = sample_surface(points, np.array([[0, 1, 2], [0, 2, 3]]), 256)

    def unevenness(p):
        counts, _, _ = np.histogram2d(p[:, 0], p[:, 1], bins=8, range=[[0, 1], [0, 1]])
        return counts.std()

    random = [unevenness(np.random.default_rng(i).random((256, 2))) for i in range(10)]
    assert unevenness(where) < 0.75 * min(random)


def fps_by_hand(points: np.ndarray, n: int) -> list[int]:
    """One cloud, one sample at a time, in float32."""
    centre = (points.min(0) + points.max(0)) / np.float32(2)

    def d(q):
        e = points - q
        return e[:, 0] * e[:, 0] + e[:, 1] * e[:, 1] + e[:, 2] * e[:, 2]

    samples = [int(np.argmax(d(centre)))]
    while len(samples) < n:
        far = np.min([d(points[p]) for p in samples], axis=0)
        far[samples] = -1
        samples.append(int(np.argmax(far)))
    return samples


@pytest.mark.parametrize("points", [RNG.normal(size=(200, 3)), GRID, CUBE, np.zeros((5, 3))])
def test_farthest_points_and_neighbours_equal_a_plain_reference(points):
    x = torch.tensor(np.unique(points, axis=0) if points.any() else points, dtype=torch.float32)
    n, a = min(20, len(x)), x.numpy()
    samples = farthest_points(x[None], n)[0].tolist()
    assert samples == fps_by_hand(a, n)
    members, real = nearest_neighbours(x[None], x[None, samples], 9)
    assert real.all()
    for i, centre in enumerate(samples):
        e = a - a[centre]
        d = e[:, 0] * e[:, 0] + e[:, 1] * e[:, 1] + e[:, 2] * e[:, 2]
        assert members[0, i].tolist() == sorted(range(len(a)), key=lambda j: (d[j], j))[:9]


def test_neighbours_in_chunks_equal_those_at_once(monkeypatch):
    x = torch.randn(2, 50, 3)
    whole = nearest_neighbours(x, x[:, :20], 5)
    monkeypatch.setattr("worldtokens.tokenizers.points.sampling.CHUNK", 300)
    chunks = nearest_neighbours(x, x[:, :20], 5)
    assert torch.equal(whole[0], chunks[0]) and torch.equal(whole[1], chunks[1])


def test_n_samples_of_n_points_are_all_points_even_with_ties():
    for points in (torch.zeros(1, 12, 3), torch.tensor(CUBE[None], dtype=torch.float32)):
        n = points.shape[1]
        assert sorted(farthest_points(points, n)[0].tolist()) == list(range(n))


def test_downsampling_is_uniform_and_independent_of_the_order():
    points = RNG.random((20_000, 3)) * np.array([4.0, 1.0, 1.0])
    kept = downsample(points, 500)
    assert len(np.unique(kept, axis=0)) == 500
    assert np.array_equal(downsample(RNG.permutation(points), 500), kept)
    counts, _ = np.histogram(kept[:, 0], bins=4, range=(0, 4))
    assert np.abs(counts - 125).max() <= 5  # random choice has a deviation of 10
    assert len(downsample(points[:500], 500)) == 500
