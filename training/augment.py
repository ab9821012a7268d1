"""Augmentation of raw waveforms and point clouds, against overfitting on small data sets.

Use them in a recipe's `data.augment`; for images use torchvision's transforms. Both draw from torch's global generator,
which the training loop seeds for each row.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.errors import InputError


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


class AudioJitter(nn.Module):
    """Random speed, equaliser, shift, noise and gain of a waveform, as from another speaker, room or microphone.

    Args:
        sample_rate: Hz of the waveform, the front-end's `sample_rate`.
        speed: largest change of speed, and of pitch with it. 0.2 draws a factor between 1 / 1.2 and 1.2, uniformly in
            its logarithm.
        shift: the most seconds of near-silence put in front.
        gain_db: decibels; the gain is drawn from -gain_db to +gain_db.
        eq_db: decibels by which octaves are raised or lowered, smoothly over frequency, as by another microphone.
        noise_db: the loudest white noise, in decibels relative to the waveform's own level (-20 is a tenth of its
            amplitude); each waveform draws from 40 decibels lower up to this. None: no noise.

    Raises:
        InputError: an argument is out of its range.
    """

    def __init__(
        self,
        sample_rate: int = 16000,
        speed: float = 0.15,
        shift: float = 0.1,
        gain_db: float = 6.0,
        eq_db: float = 6.0,
        noise_db: float | None = -20.0,
    ) -> None:
        super().__init__()
        if sample_rate < 1:
            raise InputError(f"AudioJitter: sample_rate={sample_rate}, expected 1 or more")
        for name, value in (("speed", speed), ("shift", shift), ("gain_db", gain_db), ("eq_db", eq_db)):
            if not value >= 0:
                raise InputError(f"AudioJitter: {name}={value}, expected 0 or more")
        self.sample_rate, self.speed, self.shift = sample_rate, speed, shift
        self.gain_db, self.eq_db, self.noise_db = gain_db, eq_db, noise_db

    def forward(self, waveform: Tensor) -> Tensor:
        """Mono float (T,) -> (T',), T' close to T."""
        max_log = math.log1p(self.speed)
        length = max(1, round(len(waveform) / math.exp(_uniform(-max_log, max_log))))
        waveform = F.interpolate(waveform[None, None], size=length, mode="linear")[0, 0]
        if self.eq_db:
            spectrum = torch.fft.rfft(waveform)
            octaves = torch.linspace(0, 1, len(spectrum)).clamp(min=1e-4).log2()  # 0 at the Nyquist frequency
            gains = (torch.rand(1, 1, 8) * 2 - 1) * self.eq_db  # one per octave, from low to high
            position = ((octaves + 7) / 7).clamp(0, 1) * 7
            low = position.floor().long().clamp(max=6)
            fraction = position - low
            decibels = gains[0, 0][low] * (1 - fraction) + gains[0, 0][low + 1] * fraction
            waveform = torch.fft.irfft(spectrum * 10 ** (decibels / 20), n=length)
        waveform = F.pad(waveform, (round(_uniform(0, self.shift) * self.sample_rate), 0))
        rms = waveform.square().mean().sqrt()
        if self.noise_db is not None:
            noise = torch.randn(len(waveform)) * rms
            waveform = waveform + noise * 10 ** (_uniform(self.noise_db - 40, self.noise_db) / 20)
        return waveform * 10 ** (_uniform(-self.gain_db, self.gain_db) / 20)


class PointJitter(nn.Module):
    """Random rotation about the upright axis, scaling, mirroring, point dropout and coordinate noise of a point cloud.

    Args:
        rotate: largest angle in degrees.
        axis: the upright axis, which stays fixed: 0, 1 or 2 for x, y, z. OBJ furniture stands along y.
        scale: each axis is scaled by a factor between 1 / (1 + scale) and 1 + scale.
        min_keep: smallest share of the points that is kept, above 0 to 1.
        jitter: standard deviation of each coordinate's noise, as a share of the cloud's radius.
        normals: columns 3 to 5 are unit normals, transformed with the points.
        mirror: mirror every second cloud on average.

    Raises:
        InputError: an argument is out of its range.
    """

    def __init__(
        self,
        rotate: float = 180.0,
        axis: int = 1,
        scale: float = 0.2,
        min_keep: float = 0.6,
        jitter: float = 0.01,
        normals: bool = False,
        mirror: bool = True,
    ) -> None:
        super().__init__()
        if axis not in (0, 1, 2) or not 0 < min_keep <= 1 or min(rotate, scale, jitter) < 0:
            raise InputError(
                f"PointJitter: axis={axis}, min_keep={min_keep}, rotate={rotate}, scale={scale}, jitter={jitter}; "
                "expected axis 0, 1 or 2, min_keep above 0 and at most 1, the others 0 or more"
            )
        self.rotate, self.axis, self.scale, self.min_keep = rotate, axis, scale, min_keep
        self.jitter, self.normals, self.mirror = jitter, normals, mirror

    def forward(self, points: Tensor) -> Tensor:
        """(N, 3 + C) -> (M, 3 + C), M <= N."""
        keep = _uniform(self.min_keep, 1.0)
        points = points[torch.rand(len(points)).argsort()[: max(1, round(keep * len(points)))]]
        angle = math.radians(_uniform(-self.rotate, self.rotate))
        a, b = [i for i in range(3) if i != self.axis]
        matrix = torch.eye(3, dtype=points.dtype)
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[a, b], matrix[b, a] = -math.sin(angle), math.sin(angle)
        max_log = math.log1p(self.scale)
        factors = torch.tensor([math.exp(_uniform(-max_log, max_log)) for _ in range(3)], dtype=points.dtype)
        if self.mirror and torch.rand(()) < 0.5:
            factors[a] = -factors[a]
        matrix = matrix * factors  # points are rows: p @ matrix.T
        xyz = points[:, :3] @ matrix.T
        xyz = xyz + self.jitter * _radius(xyz) * torch.randn_like(xyz)
        features = points[:, 3:]
        if self.normals:
            # a normal stays perpendicular to its surface when it is transformed by the inverse transpose
            normals = features[:, :3] @ torch.linalg.inv(matrix)
            features = torch.cat([F.normalize(normals, dim=1), features[:, 3:]], 1)
        return torch.cat([xyz, features], 1)


def _radius(xyz: Tensor) -> Tensor:
    return (xyz - xyz.mean(0)).norm(dim=1).max()
