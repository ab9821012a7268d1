"""Resampling of waveforms, and the check of sampling rates."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torchaudio
from torch import Tensor

from worldtokens.errors import InputError

MIN_RATE, MAX_RATE = 1_000, 768_000  # Hz


def resample(waveform: Tensor, sample_rate: int, to: int) -> Tensor:
    """Resample by torchaudio's windowed sinc: (..., T) at `sample_rate` Hz -> (..., ceil(T x to / sample_rate)).

    A ratio of large coprime numbers (44,101 to 16,000) would need a filter of gigabytes. It is replaced by the nearest
    ratio whose filter has a million taps: two millionths off in this example, at worst a thousandth.
    """
    sample_rate, to = check_sample_rate(sample_rate, "waveform"), check_sample_rate(to, "waveform")
    if sample_rate == to:
        return waveform
    ratio = Fraction(to, sample_rate)
    if ratio.numerator * ratio.denominator > 1 << 20:
        wide = max(ratio, 1 / ratio)
        near = wide.limit_denominator(max(1, math.isqrt(int((1 << 20) / wide))))
        ratio = near if ratio > 1 else 1 / near
    with torch.no_grad():
        return _resampler(ratio.denominator, ratio.numerator)(waveform.float())


@functools.lru_cache(maxsize=64)
def _resampler(sample_rate: int, to: int) -> torchaudio.transforms.Resample:
    # the transform computes its filter in float64, once; the function does it in float32, at every call
    return torchaudio.transforms.Resample(sample_rate, to)


def check_sample_rate(sample_rate: Any, name: str) -> int:
    """The sampling rate as an int.

    Raises:
        InputError: not whole Hz between 1,000 and 768,000; names the source.
    """
    number = (
        isinstance(sample_rate, int | float | np.integer | np.floating)
        and not isinstance(sample_rate, bool)
        and sample_rate == sample_rate
    )
    if not number or int(sample_rate) != sample_rate or not MIN_RATE <= sample_rate <= MAX_RATE:
        raise InputError(
            f"{name}: the sampling rate is {sample_rate!r}, expected whole Hz between {MIN_RATE:,} and {MAX_RATE:,}"
        )
    return int(sample_rate)
