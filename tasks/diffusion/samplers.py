"""Following a learned velocity from noise to data: Euler's and Heun's methods, and guidance.

A velocity is a function ``velocity(x, t)`` with x (B, ...) and t (B,): where x is going at time t, from noise at t = 0 to
data at t = 1 (rectified flow, Liu et al. 2023). A sampler is any function ``(velocity, x, times) -> x``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worldtokens.errors import InputError

Velocity = Callable[[Tensor, Tensor], Tensor]
Sampler = Callable[[Velocity, Tensor, Sequence[float]], Tensor]


def times(steps: int, shift: float = 1.0) -> list[float]:
    """0 = t_0 < ... < t_steps = 1.

    Args:
        steps: 1 or more.
        shift: above 1 puts more of the steps near the noise, as larger images need it (Esser et al. 2024); 1: even.

    Raises:
        InputError: a value out of its range.
    """
    if steps < 1 or shift <= 0:
        raise InputError(f"steps={steps} and shift={shift}, expected 1 or more, and above 0")
    even = [i / steps for i in range(steps + 1)]
    return [t / (t + shift * (1 - t)) for t in even]


def euler(velocity: Velocity, x: Tensor, times: Sequence[float]) -> Tensor:
    """One look at the velocity for each step; the error falls with the number of steps."""
    for now, then in itertools.pairwise(times):
        x = x + (then - now) * velocity(x, _each(x, now))
    return x


def heun(velocity: Velocity, x: Tensor, times: Sequence[float]) -> Tensor:
    """The mean of the velocities at both ends of a step; the error falls with the square of the number of steps.

    Two looks a step, but one at the last, whose far end is the data itself, where a model was hardly trained (as in
    Karras et al. 2022).
    """
    for i, (now, then) in enumerate(itertools.pairwise(times)):
        v = velocity(x, _each(x, now))
        step = then - now
        if i < len(times) - 2:
            v = (v + velocity(x + step * v, _each(x, then))) / 2
        x = x + step * v
    return x


def guided(conditional: Tensor, unconditional: Tensor, guidance: float) -> Tensor:
    """Classifier-free guidance (Ho & Salimans 2022): beyond what the condition changes; 1 gives the conditional itself."""
    return torch.lerp(unconditional, conditional, guidance)


def _each(x: Tensor, t: float) -> Tensor:
    return torch.full((len(x),), t, device=x.device)
