"""What training does to raw sounds and point clouds, so that a model does not learn the few recordings by heart.

For a recipe's `data.augment`; images have torchvision's transforms. Both draw from torch's global generator, which the
loop seeds for each row.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldtokens.errors import InputError


def _draw(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


class AudioJitter(nn.Module):
    """A sound as another speaker, room or microphone might have given it.

    Args:
        rate: Hz of the front-end that reads it.
        speed: largest change of speed, and pitch with it: 0.2 draws a factor between 1 / 1.2 and 1.2, evenly in its
            logarithm.
        shift: most seconds of near-silence put in front.
        gain: decibels, drawn from -gain to +gain.
        colour: decibels by which octaves are raised or lowered, smoothly, as another microphone would.
        noise: loudest white noise, in decibels relative to the sound's own level (-20 is a tenth of its amplitude); each
            sound draws from 40 decibels lower up to this. None: no noise.

    Raises:
        InputError: a setting is out of its range.
    """

    def __init__(
        self,
        rate: int = 16000,
        speed: float = 0.15,
        shift: float = 0.1,
        gain: float = 6.0,
        colour: float = 6.0,
        noise: float | None = -20.0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("rate", rate - 1),
            ("speed", speed),
            ("shift", shift),
            ("gain", gain),
            ("colour", colour),
        ):
            if not value >= 0:
                raise InputError(f"{name} of AudioJitter is out of its range, expected 0 or more")
        self.rate, self.speed, self.shift, self.gain = rate, speed, shift, gain
        self.colour, self.noise = colour, noise

    def forward(self, wave: Tensor) -> Tensor:
        """Mono float (T,) -> another of about that length."""
        most = math.log1p(self.speed)
        length = max(1, round(len(wave) / math.exp(_draw(-most, most))))
        wave = F.interpolate(wave[None, None], size=length, mode="linear")[0, 0]
        if self.colour:
            spectrum = torch.fft.rfft(wave)
            octaves = torch.linspace(0, 1, len(spectrum)).clamp(min=1e-4).log2()  # 0 at half the rate
            anchors = (torch.rand(1, 1, 8) * 2 - 1) * self.colour  # one an octave, from low to high
            place = ((octaves + 7) / 7).clamp(0, 1) * 7
            low = place.floor().long().clamp(max=6)
            part = place - low
            decibels = anchors[0, 0][low] * (1 - part) + anchors[0, 0][low + 1] * part
            wave = torch.fft.irfft(spectrum * 10 ** (decibels / 20), n=length)
        wave = F.pad(wave, (round(_draw(0, self.shift) * self.rate), 0))
        level = wave.square().mean().sqrt()
        if self.noise is not None:
            wave = wave + torch.randn(len(wave)) * level * 10 ** (_draw(self.noise - 40, self.noise) / 20)
        return wave * 10 ** (_draw(-self.gain, self.gain) / 20)


class PointJitter(nn.Module):
    """A cloud turned about its upright axis, stretched, thinned and shaken.

    Args:
        turn: largest angle in degrees.
        axis: that stays as it is: 0, 1 or 2 for x, y, z. OBJ furniture stands along y.
        stretch: each axis is scaled by a factor between 1 / (1 + stretch) and 1 + stretch.
        keep: smallest share of the points that stays.
        shake: standard deviation of each coordinate's noise, as a share of the cloud's radius.
        normals: columns 3 to 5 are unit normals, which turn and stretch along.
        mirror: mirror every second cloud.

    Raises:
        InputError: a setting is out of its range.
    """

    def __init__(
        self,
        turn: float = 180.0,
        axis: int = 1,
        stretch: float = 0.2,
        keep: float = 0.6,
        shake: float = 0.01,
        normals: bool = False,
        mirror: bool = True,
    ) -> None:
        super().__init__()
        if axis not in (0, 1, 2) or not 0 < keep <= 1 or min(turn, stretch, shake) < 0:
            raise InputError(
                f"PointJitter: axis={axis}, keep={keep}, turn={turn}, stretch={stretch}, shake={shake}; expected axis 0, 1 or "
                "2, keep above 0 and at most 1, the others 0 or more"
            )
        self.turn, self.axis, self.stretch, self.keep = turn, axis, stretch, keep
        self.shake, self.normals, self.mirror = shake, normals, mirror

    def forward(self, cloud: Tensor) -> Tensor:
        """(n, 3 + C) -> (m, 3 + C) with m up to n."""
        share = _draw(self.keep, 1.0)
        cloud = cloud[torch.rand(len(cloud)).argsort()[: max(1, round(share * len(cloud)))]]
        angle, (a, b) = math.radians(_draw(-self.turn, self.turn)), [i for i in range(3) if i != self.axis]
        matrix = torch.eye(3, dtype=cloud.dtype)
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[a, b], matrix[b, a] = -math.sin(angle), math.sin(angle)
        most = math.log1p(self.stretch)
        factors = torch.tensor([math.exp(_draw(-most, most)) for _ in range(3)], dtype=cloud.dtype)
        if self.mirror and torch.rand(()) < 0.5:
            factors[a] = -factors[a]
        matrix = matrix * factors  # points as rows: p @ matrix.T
        points = cloud[:, :3] @ matrix.T
        points = points + self.shake * _radius(points) * torch.randn_like(points)
        rest = cloud[:, 3:]
        if self.normals:
            # a normal stays at right angles to its surface when it goes with the inverse transpose
            turned = rest[:, :3] @ torch.linalg.inv(matrix)
            rest = torch.cat([F.normalize(turned, dim=1), rest[:, 3:]], 1)
        return torch.cat([points, rest], 1)


def _radius(points: Tensor) -> Tensor:
    return (points - points.mean(0)).norm(dim=1).max()
