"""Samplers: exact solutions, orders of convergence, timesteps, guidance."""

import math

import pytest
import torch

import worldtokens as wt
from worldtokens.tasks.diffusion.samplers import euler, guide, heun, make_timesteps


@pytest.mark.parametrize("sampler", [euler, heun])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_point_mass_is_reached_exactly(sampler, steps):
    """If all data is one point, the velocity is constant: even a single step reaches it."""
    point = torch.tensor([[1.0, -2.0, 0.5]])
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    out = sampler(lambda x, t: (point - x) / (1 - t)[:, None], x, make_timesteps(steps))
    assert (out - point).abs().max() < 1e-6


def test_orders_of_convergence():
    """dx/dt = x cos t has the solution x0 exp(sin t): half the step halves Euler's error and quarters Heun's."""
    x = torch.ones(1, 1, dtype=torch.float64)

    def error(sampler, steps):
        out = sampler(lambda x, t: x * t.double().cos()[:, None], x, make_timesteps(steps))
        return abs(float(out) - math.exp(math.sin(1.0)))

    assert 1.9 < error(euler, 32) / error(euler, 64) < 2.1
    assert 3.8 < error(heun, 128) / error(heun, 256) < 4.2


def test_number_of_velocity_evaluations():
    times = []
    for sampler, expected in ((euler, 5), (heun, 9)):
        times.clear()
        sampler(lambda x, t: times.append(float(t[0])) or x, torch.zeros(1, 1), make_timesteps(5))
        assert len(times) == expected and max(times) < 1


def test_timesteps():
    assert make_timesteps(4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    shifted = make_timesteps(4, shift=3.0)
    assert shifted[0] == 0 and shifted[-1] == 1 and shifted[2] == pytest.approx(0.25)
    with pytest.raises(wt.InputError, match="1 or more"):
        make_timesteps(0)


def test_guidance_by_hand():
    a, b = torch.tensor([1.0]), torch.tensor([3.0])
    assert [float(guide(b, a, g)) for g in (0.0, 1.0, 2.5)] == [1.0, 3.0, 6.0]
