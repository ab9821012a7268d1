"""From a spectrum or a wave to vectors: the layers between a sound's features and its tokens.

Each stem knows its one length formula, `grid`: how many tokens (in time, in frequency) a count of frames gives.
`forward` uses the same one, so that a mask cannot disagree with the tokens. Convolutions see zeros behind a row's
end, in the hidden layers too, as if the row had been alone.

Shapes: B batch, F frames, M mel bands, T samples, D width, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from worldtokens.errors import InputError


class FrameStem(nn.Module):
    """One token for each frame: a linear layer over its mel bands."""

    def __init__(self, n_mels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(n_mels, dim)

    def grid(self, frames: int) -> tuple[int, int]:
        return frames, 1

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """(B, F, M) -> (B, F, D)."""
        return self.proj(x.to(self.proj.weight.dtype))


class ConvStem(nn.Module):
    """Whisper's stem: two convolutions of width 3 with GELU, the second of stride 2, so two frames a token."""

    def __init__(self, n_mels: int, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(n_mels, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)

    def grid(self, frames: int) -> tuple[int, int]:
        return (frames + 1) // 2, 1

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """(B, F, M) -> (B, (F + 1) // 2, D)."""
        x = zero_after(x.to(self.conv1.weight.dtype).mT, counts)
        x = zero_after(functional.gelu(self.conv1(x)), counts)
        return functional.gelu(self.conv2(x)).mT


class PatchStem(nn.Module):
    """AST's patches of the spectrum, possibly overlapping: a convolution over (time, frequency).

    Tokens come time first (all bands of the first patch column, then the next column), so that padding lies at the
    end of a row. AST itself counts frequency first.

    Args:
        n_mels: mel bands of the spectrum.
        patch: frames and bands of a patch.
        stride: frames and bands between patches, no larger than the patch. Where patches overlap, bands at the
            top that do not fill a last patch are left out, as AST does (128 bands, 16 by 10: the top 2).
        whole: leave out the frames at the end that do not fill a patch, as AST does with its fixed 1,024. Without
            it the last patch is filled up with `blank`, so that every frame is in a token.
        blank: what frames behind the end hold.
    """

    def __init__(
        self,
        n_mels: int,
        dim: int,
        patch: tuple[int, int],
        stride: tuple[int, int],
        whole: bool,
        blank: float,
    ) -> None:
        super().__init__()
        if any(s > p for s, p in zip(stride, patch, strict=True)):
            raise InputError(
                f"stride {stride} is larger than the patch {patch}: what lies between would be lost"
            )
        if n_mels < patch[1] or (stride[1] == patch[1] and n_mels % patch[1]):
            raise InputError(
                f"{n_mels} mel bands do not divide into patches of {patch[1]}; change n_mels or patch"
            )
        self.patch, self.stride, self.whole, self.blank = patch, stride, whole, blank
        self.rows = (n_mels - patch[1]) // stride[1] + 1
        self.conv = nn.Conv2d(1, dim, patch, stride)

    def grid(self, frames: int) -> tuple[int, int]:
        over = max(0, frames - self.patch[0])
        return (over // self.stride[0] if self.whole else -(-over // self.stride[0])) + 1, self.rows

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """(B, F, M) -> (B, columns x rows, D)."""
        columns, _ = self.grid(x.shape[1])
        need = (columns - 1) * self.stride[0] + self.patch[0]
        x = functional.pad(x, (0, 0, 0, max(0, need - x.shape[1])), value=self.blank)
        # by a linear layer: oneDNN's bfloat16 convolution of one channel with kernels 24, 32 or 40 wide gives wrong numbers,
        # NaN among them (torch 2.14.1 on a CPU with AMX)
        x = x.to(self.conv.weight.dtype).unfold(1, self.patch[0], self.stride[0])
        x = x.unfold(2, self.patch[1], self.stride[1])  # (B, columns, rows, frames, bands)
        return functional.linear(x.flatten(3), self.conv.weight.flatten(1), self.conv.bias).flatten(1, 2)


class WaveStem(nn.Module):
    """wav2vec 2.0's seven strided convolutions over the wave (Baevski et al. 2020), then norm and projection.

    Each sound is brought to mean 0 and variance 1 first, over its own samples. A token reads 400 samples and they
    come every 320, at 16 kHz: 25 ms every 20 ms.

    Args:
        dim: width of the tokens.
        width: channels of the convolutions.
        norm: ``"group"`` (base models: one norm over time, after the first convolution, no biases) or
            ``"layer"`` (large models: after every convolution, with biases).
    """

    kernels = (10, 3, 3, 3, 3, 2, 2)
    strides = (5, 2, 2, 2, 2, 2, 2)
    least = 400
    step = math.prod(strides)

    def __init__(self, dim: int, width: int = 512, norm: str = "group") -> None:
        super().__init__()
        if norm not in ("group", "layer"):
            raise InputError(f"norm is {norm!r}, expected 'group' or 'layer'")
        ins = (1, *[width] * 6)
        self.convs = nn.ModuleList(
            nn.Conv1d(i, width, k, s, bias=norm == "layer")
            for i, k, s in zip(ins, self.kernels, self.strides, strict=True)
        )
        if norm == "group":
            self.norms = nn.ModuleList([nn.GroupNorm(width, width)])
        else:
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in self.kernels)
        for conv in self.convs:  # as wav2vec 2.0: variance kept through the stack
            nn.init.kaiming_normal_(conv.weight)
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(width, dim)

    def grid(self, samples: int) -> tuple[int, int]:
        return self._after(samples, len(self.kernels)), 1

    def _after(self, samples: int, layers: int) -> int:
        """The length after the first so many convolutions; a sound shorter than a window counts as one window."""
        n = max(samples, self.least)
        for k, s in list(zip(self.kernels, self.strides, strict=True))[:layers]:
            n = (n - k) // s + 1
        return n

    def forward(self, wave: Tensor, lengths: Sequence[int]) -> Tensor:
        """(B, T) float in [-1, 1] and B sample counts -> (B, N, D)."""
        x = _standardise(wave.float(), lengths)
        x = functional.pad(x, (0, max(0, self.least - x.shape[1])))[:, None]
        x = x.to(self.proj.weight.dtype)
        for i, conv in enumerate(self.convs):
            x = conv(x)
            if i < len(self.norms):
                x = self._norm(i, x, lengths)
            x = functional.gelu(x)
        return self.proj(self.norm(x.mT))

    def _norm(self, i: int, x: Tensor, lengths: Sequence[int]) -> Tensor:
        norm = self.norms[i]
        if isinstance(norm, nn.LayerNorm):
            return norm(x.mT).mT
        counts = [self._after(n, i + 1) for n in lengths]
        if min(counts) == x.shape[2]:
            return norm(x)
        # the published models let padding into this mean and variance; here each row has its own
        inside = _inside(counts, x)
        n = inside.sum(-1, keepdim=True)
        x32 = x.float().masked_fill(~inside, 0)
        mean = x32.sum(-1, keepdim=True) / n
        x32 = (x32 - mean).masked_fill(~inside, 0)
        x32 = x32 * (x32.square().sum(-1, keepdim=True) / n + norm.eps).rsqrt()
        return (x32 * norm.weight.float()[:, None] + norm.bias.float()[:, None]).to(x.dtype)


def zero_after(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Zeros behind each row's end along the last axis: (B, C, F) and B counts -> (B, C, F)."""
    return x if min(counts) == x.shape[-1] else x.masked_fill(~_inside(counts, x), 0)


def _inside(counts: Sequence[int], x: Tensor) -> Tensor:
    ends = torch.tensor(list(counts)).to(x.device, non_blocking=True)
    return torch.arange(x.shape[-1], device=x.device) < ends[:, None, None]


def _standardise(wave: Tensor, lengths: Sequence[int]) -> Tensor:
    """Mean 0 and variance 1 over each row's own samples, zeros behind them: (B, T) -> (B, T)."""
    if min(lengths) == wave.shape[1]:
        x = wave - wave.mean(1, keepdim=True)
        return x * (x.square().mean(1, keepdim=True) + 1e-7).rsqrt()
    inside = _inside(lengths, wave)[:, 0]
    n = torch.tensor(list(lengths)).to(wave.device, non_blocking=True)[:, None]
    x = wave.masked_fill(~inside, 0)
    x = (x - x.sum(1, keepdim=True) / n).masked_fill(~inside, 0)
    return x * (x.square().sum(1, keepdim=True) / n + 1e-7).rsqrt()
