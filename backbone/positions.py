"""Rotary position embeddings (RoPE) over `Tokens.pos`: one to three axes, computed in float32.

RoFormer (Su et al. 2021) rotates each pair of channels by an angle proportional to a position; with two or three axes
the pairs are divided between the axes, as in 2-D and 3-D RoPE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Scaling = tuple[float, float, float, float]


def rope_angles(
    pos: Tensor, head_dim: int, axes: int, theta: float = 10000.0, scaling: Scaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles.

    Args:
        pos: (B, N, 3) float, (t, y, x).
        head_dim: channels of a head, even.
        axes: 1 rotates by t, 2 by (y, x), 3 by (t, y, x). Each axis gets ``head_dim // 2 // axes`` pairs; remaining
            pairs are not rotated.
        theta: the longest wavelength is about 2 pi theta positions.
        scaling: as `TransformerConfig.rope_scaling`.

    Returns:
        cos, sin, each (B, N, 1, head_dim / 2) float32.
    """
    used = pos[..., :1] if axes == 1 else pos[..., 3 - axes :]
    pairs = head_dim // 2 // axes
    # the order of operations of published models: another order rounds to 2e-4 turns of difference at position 4,000
    freq = 1.0 / theta ** (torch.arange(pairs, dtype=torch.float32, device=pos.device) / pairs)
    if scaling is not None:
        freq = scale_frequencies(freq, scaling)
    angles = (used.float()[..., None] * freq).flatten(-2)  # (B, N, axes * pairs)
    rest = head_dim // 2 - angles.shape[-1]
    if rest:
        angles = torch.nn.functional.pad(angles, (0, rest))
    return angles.cos()[:, :, None], angles.sin()[:, :, None]


def scale_frequencies(freq: Tensor, scaling: Scaling) -> Tensor:
    """Llama 3.1's frequencies for texts longer than those in training."""
    factor, low, high, original = scaling
    turns = original / (2 * math.pi / freq)  # of each pair within the original length
    share = ((turns - low) / (high - low)).clamp(0, 1)  # 1: unchanged
    return (1 - share) * freq / factor + share * freq


def check_scaling(scaling: Sequence[float]) -> Scaling:
    """Four numbers in their ranges, as floats."""
    good = len(scaling) == 4 and all(isinstance(v, int | float) and v > 0 for v in scaling)
    if not good or scaling[1] >= scaling[2]:
        raise ValueError(
            f"rope_scaling={scaling!r}, expected (factor, low, high, original), all above 0 and low below high"
        )
    return tuple(float(v) for v in scaling)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x by the given angles: (B, N, H, head_dim) -> the same."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
