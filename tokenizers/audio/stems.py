"""Stems: the layers from a spectrogram or a waveform to tokens.

Each stem has one length formula, `grid`: the number of tokens (in time, in frequency) for a number of frames. `forward`
uses the same formula, so masks always fit the tokens. Activations after a row's end are zeroed in every hidden layer,
so padding does not change a row's tokens.

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
    """One token per frame: a linear layer over its mel bands."""

    def __init__(self, n_mels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(n_mels, dim)

    def grid(self, frames: int) -> tuple[int, int]:
        return frames, 1

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """(B, F, M) -> (B, F, D)."""
        return self.proj(x.to(self.proj.weight.dtype))


class ConvStem(nn.Module):
    """Whisper's stem: two convolutions of kernel 3 with GELU, the second with stride 2: two frames per token."""

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
    """AST's patches of the spectrogram, possibly overlapping: a convolution over (time, frequency).

    Tokens are ordered by time (all bands of the first patch column, then the next column), so that padding is at the
    end of a row. AST itself orders by frequency.

    Args:
        n_mels: mel bands of the spectrogram.
        patch: frames and bands of a patch.
        stride: frames and bands between patches, no larger than the patch. Where patches overlap, top bands that do
            not fill a last patch are dropped, as in AST (128 bands, 16 by 10: the top 2).
        drop_last: drop frames at the end that do not fill a patch, as AST does with its fixed 1,024. False pads the
            last patch with `pad_value`, so that every frame is in a token.
        pad_value: value of frames after the end.
    """

    def __init__(
        self,
        n_mels: int,
        dim: int,
        patch: tuple[int, ...],
        stride: tuple[int, ...],
        drop_last: bool,
        pad_value: float,
    ) -> None:
        super().__init__()
        if any(s > p for s, p in zip(stride, patch, strict=True)):
            raise InputError(
                f"stride {stride} is larger than the patch {patch}: frames or bands between patches would be lost"
            )
        if n_mels < patch[1] or (stride[1] == patch[1] and n_mels % patch[1]):
            raise InputError(
                f"{n_mels} mel bands do not divide into patches of {patch[1]}; change n_mels or patch"
            )
        self.patch, self.stride, self.drop_last, self.pad_value = patch, stride, drop_last, pad_value
        self.rows = (n_mels - patch[1]) // stride[1] + 1
        self.conv = nn.Conv2d(1, dim, patch, stride)

    def grid(self, frames: int) -> tuple[int, int]:
        over = max(0, frames - self.patch[0])
        return (over // self.stride[0] if self.drop_last else -(-over // self.stride[0])) + 1, self.rows

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """(B, F, M) -> (B, columns x rows, D)."""
        columns, _ = self.grid(x.shape[1])
        need = (columns - 1) * self.stride[0] + self.patch[0]
        x = functional.pad(x, (0, 0, 0, max(0, need - x.shape[1])), value=self.pad_value)
        # as a linear layer: oneDNN's bfloat16 convolution of one channel with kernels 24, 32 or 40 wide gives wrong
        # values, NaN among them (torch 2.14.1 on a CPU with AMX)
        x = x.to(self.conv.weight.dtype).unfold(1, self.patch[0], self.stride[0])
        x = x.unfold(2, self.patch[1], self.stride[1])  # (B, columns, rows, frames, bands)
        return functional.linear(x.flatten(3), self.conv.weight.flatten(1), self.conv.bias).flatten(1, 2)


class WaveStem(nn.Module):
    """wav2vec 2.0's seven strided convolutions over the waveform (Baevski et al. 2020), then norm and projection.

    Each waveform is first normalised to mean 0 and variance 1 over its own samples. The receptive field is 400 samples,
    the stride 320: 25 ms every 20 ms at 16 kHz.

    Args:
        dim: width of the tokens.
        width: channels of the convolutions.
        norm: ``"group"`` (base models: one norm over time after the first convolution, no biases) or
            ``"layer"`` (large models: after every convolution, with biases).
    """

    kernels = (10, 3, 3, 3, 3, 2, 2)
    strides = (5, 2, 2, 2, 2, 2, 2)
    min_samples = 400
    step = math.prod(strides)

    def __init__(self, dim: int, width: int = 512, norm: str = "group") -> None:
        super().__init__()
        if norm not in ("group", "layer"):
            raise InputError(f"conv_norm is {norm!r}, expected 'group' or 'layer'")
        ins = (1, *[width] * 6)
        convs = [
            nn.Conv1d(i, width, k, s, bias=norm == "layer")
            for i, k, s in zip(ins, self.kernels, self.strides, strict=True)
        ]
        for conv in convs:  # as in wav2vec 2.0: keeps the variance through the layers
            nn.init.kaiming_normal_(conv.weight)
        self.convs = nn.ModuleList(convs)
        if norm == "group":
            self.norms = nn.ModuleList([nn.GroupNorm(width, width)])
        else:
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in self.kernels)
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(width, dim)

    def grid(self, samples: int) -> tuple[int, int]:
        return self._after(samples, len(self.kernels)), 1

    def _after(self, samples: int, layers: int) -> int:
        """Length after the first `layers` convolutions; a waveform shorter than a window counts as one window."""
        n = max(samples, self.min_samples)
        for k, s in list(zip(self.kernels, self.strides, strict=True))[:layers]:
            n = (n - k) // s + 1
        return n

    def forward(self, waveform: Tensor, lengths: Sequence[int]) -> Tensor:
        """(B, T) float in [-1, 1] and B sample counts -> (B, N, D)."""
        x = _standardise(waveform.float(), lengths)
        x = functional.pad(x, (0, max(0, self.min_samples - x.shape[1])))[:, None]
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
        # the published models include padding in this mean and variance; here each row has its own
        valid = _valid(counts, x)
        n = valid.sum(-1, keepdim=True)
        x32 = x.float().masked_fill(~valid, 0)
        mean = x32.sum(-1, keepdim=True) / n
        x32 = (x32 - mean).masked_fill(~valid, 0)
        x32 = x32 * (x32.square().sum(-1, keepdim=True) / n + norm.eps).rsqrt()
        weight, bias = (p.float()[:, None] for p in (norm.weight, norm.bias))
        return (x32 * weight + bias).to(x.dtype)


def zero_after(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Zero the values after each row's end on the last axis: (B, C, F) and B counts -> (B, C, F)."""
    return x if min(counts) == x.shape[-1] else x.masked_fill(~_valid(counts, x), 0)


def _valid(counts: Sequence[int], x: Tensor) -> Tensor:
    ends = torch.tensor(list(counts)).to(x.device, non_blocking=True)
    return torch.arange(x.shape[-1], device=x.device) < ends[:, None, None]


def _standardise(waveform: Tensor, lengths: Sequence[int]) -> Tensor:
    """Normalise each row to mean 0 and variance 1 over its own samples, zeros after them: (B, T) -> (B, T)."""
    if min(lengths) == waveform.shape[1]:
        x = waveform - waveform.mean(1, keepdim=True)
        return x * (x.square().mean(1, keepdim=True) + 1e-7).rsqrt()
    valid = _valid(lengths, waveform)[:, 0]
    n = torch.tensor(list(lengths)).to(waveform.device, non_blocking=True)[:, None]
    x = waveform.masked_fill(~valid, 0)
    x = (x - x.sum(1, keepdim=True) / n).masked_fill(~valid, 0)
    return x * (x.square().sum(1, keepdim=True) / n + 1e-7).rsqrt()
