"""Samplers that integrate a learned velocity from noise to data (Euler, Heun), and classifier-free guidance.

A velocity is a function ``velocity(x, t)`` with x (B, ...) and t (B,): dx/dt at time t, from noise at t = 0 to data at
t = 1 (rectified flow, Liu et al. 2023). A sampler is any function ``(velocity, x, timesteps) -> x``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worldtokens.errors import InputError

Velocity = Callable[[Tensor, Tensor], Tensor]
Sampler = Callable[[Velocity, Tensor, Sequence[float]], Tensor]


def make_timesteps(steps: int, shift: float = 1.0) -> list[float]:
    """Timesteps 0 = t_0 < ... < t_steps = 1.

    Args:
        steps: 1 or more.
        shift: above 1 places more timesteps near the noise, for larger images (Esser et al. 2024); 1: uniform.

    Raises:
        InputError: a value out of its range.
    """
    if steps < 1 or shift <= 0:
        raise InputError(f"steps={steps} and shift={shift}, expected 1 or more, and above 0")
    uniform = [i / steps for i in range(steps + 1)]
    return [t / (t + shift * (1 - t)) for t in uniform]


def euler(velocity: Velocity, x: Tensor, timesteps: Sequence[float]) -> Tensor:
    """Euler's method: one evaluation per step; the error is proportional to 1 / steps."""
    for now, then in itertools.pairwise(timesteps):
        x = x + (then - now) * velocity(x, _expand(now, x))
    return x


def heun(velocity: Velocity, x: Tensor, timesteps: Sequence[float]) -> Tensor:
    """Heun's method: the mean of the velocities at both ends of a step; the error is proportional to 1 / steps^2.

    Two evaluations per step, but one at the last: its end is t = 1, where training has hardly any samples (as in
    Karras et al. 2022).
    """
    for i, (now, then) in enumerate(itertools.pairwise(timesteps)):
        v = velocity(x, _expand(now, x))
        step = then - now
        if i < len(timesteps) - 2:
            v = (v + velocity(x + step * v, _expand(then, x))) / 2
        x = x + step * v
    return x


def guide(conditional: Tensor, unconditional: Tensor, guidance: float) -> Tensor:
    """Classifier-free guidance (Ho & Salimans 2022): extrapolates beyond the conditional; 1 returns the conditional."""
    return torch.lerp(unconditional, conditional, guidance)


def _expand(t: float, x: Tensor) -> Tensor:
    return torch.full((len(x),), t, device=x.device)
