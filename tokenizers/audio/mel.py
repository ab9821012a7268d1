"""Log-mel spectrograms, equal to the published front-ends: Whisper's, and Kaldi's fbank as AST uses it.

Both take a batch of waveforms of unequal length, on any device, and compute in float32. A row's spectrogram does not
depend on the rest of the batch: each row is reflected at its own last sample, and samples after its end are ignored.

On a CPU the frames are processed in blocks that fit the cache, and the power spectrum is not formed as complex
magnitudes: squares of (real, imaginary) are multiplied by a filter bank in which each row occurs twice, so that the
matrix product does the sum. These two account for most of the speed over the usual pad-stft-abs-square-matmul.

Shapes: B batch, T samples, F frames, M mel bands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 4096  # frames of 400 samples per block and thread: about 6 MB


@dataclasses.dataclass(frozen=True)
class LogMel:
    """Whisper's log-mel spectrogram (Radford et al. 2022), equal to `transformers.WhisperFeatureExtractor`.

    Hann windows of 25 ms every 10 ms, centred, the ends reflected; Slaney's mel scale and norm; log10, clamped to
    the waveform's maximum minus 8, then (x + 4) / 4.

    Args:
        sample_rate: Hz.
        n_mels: bands from 0 Hz to half the sampling rate; 80, or 128 for Whisper large-v3.
    """

    sample_rate: int = 16000
    n_mels: int = 80

    pad_value = 0.0  # value of frames after the end

    @property
    def hop_length(self) -> int:
        return self.sample_rate // 100

    @property
    def n_fft(self) -> int:
        return self.sample_rate // 80 * 2

    @property
    def min_samples(self) -> int:
        """Shorter waveforms are zero-padded to this length; reflecting half a window needs one sample more."""
        return self.n_fft // 2 + 1

    def frames(self, samples: int) -> int:
        """Number of frames of a waveform: one per whole hop, at least one."""
        return max(1, samples // self.hop_length)

    def samples(self, frames: int) -> int:
        """Length of the longest waveform that is fully covered by `frames` frames."""
        return frames * self.hop_length

    def __call__(self, waveform: Tensor, lengths: Sequence[int]) -> Tensor:
        """(B, T) float in [-1, 1] and B sample counts -> (B, F, M) float32; frames after a row's end are `pad_value`."""
        counts = [self.frames(n) for n in lengths]
        f, half = max(counts), self.n_fft // 2
        waveform, lengths = _fit(waveform, lengths, self.min_samples)
        window, bank = _whisper_constants(self, waveform.device)

        def frames(rows: slice) -> Tensor:
            x = _mirror(waveform[rows], lengths[rows], half)
            return x.unfold(-1, self.n_fft, self.hop_length)[:, :f]  # (rows, F, n_fft), a view

        def power_mel(block: Tensor) -> Tensor:
            block = torch.view_as_real(torch.fft.rfft(block * window)).flatten(-2)
            return (block.square_() @ bank).clamp_(min=1e-10).log10_()

        x = _blocks(frames, power_mel, len(waveform), f, waveform.device)
        after = _after(counts, x)
        peak = x if after is None else x.masked_fill(after[..., None], -torch.inf)
        x = torch.maximum(x, peak.amax((1, 2), keepdim=True) - 8.0).add_(4.0).div_(4.0)
        return x if after is None else x.masked_fill(after[..., None], self.pad_value)


@dataclasses.dataclass(frozen=True)
class Fbank:
    """Kaldi's log filter bank, equal to `torchaudio.compliance.kaldi.fbank`; AST's front-end by default.

    Windows of 25 ms every 10 ms that lie wholly inside the waveform. Each frame: mean removed, pre-emphasis 0.97,
    window, zero-padding to a power of two; HTK's mel scale from 20 Hz to half the sampling rate; natural log. Then
    (x - mean) / (2 std), as AST (Gong et al. 2021) and `transformers.ASTFeatureExtractor` do.

    Args:
        sample_rate: Hz.
        n_mels: bands.
        window: ``"hanning"`` (AST) or ``"povey"`` (Kaldi's own).
        scale: factor on samples in [-1, 1]; 32768 for models trained on 16-bit integers.
        mean, std: of the log filter bank; 0 and 0.5 do not change it.
    """

    sample_rate: int = 16000
    n_mels: int = 128
    window: str = "hanning"
    scale: float = 1.0
    mean: float = -4.2677393
    std: float = 4.5689974

    @property
    def pad_value(self) -> float:
        """Value of frames after the end: zero before the normalisation, as AST was trained."""
        return -self.mean / (2 * self.std)

    @property
    def hop_length(self) -> int:
        return self.sample_rate // 100

    @property
    def win_length(self) -> int:
        return self.sample_rate // 40

    @property
    def min_samples(self) -> int:
        """Shorter waveforms are zero-padded to one window."""
        return self.win_length

    def frames(self, samples: int) -> int:
        """Number of frames of a waveform: the windows wholly inside it, at least one."""
        return 1 + max(0, samples - self.win_length) // self.hop_length

    def samples(self, frames: int) -> int:
        """Length of the longest waveform that is fully covered by `frames` frames."""
        return (frames - 1) * self.hop_length + self.win_length

    def __call__(self, waveform: Tensor, lengths: Sequence[int]) -> Tensor:
        """(B, T) float in [-1, 1] and B sample counts -> (B, F, M) float32; frames after a row's end are `pad_value`."""
        counts = [self.frames(n) for n in lengths]
        waveform, lengths = _fit(waveform, lengths, self.min_samples)
        x = waveform.unfold(-1, self.win_length, self.hop_length)[:, : max(counts)]  # (B, F, window), a view
        window, bank = _kaldi_constants(self, waveform.device)
        fft = 1 << (self.win_length - 1).bit_length()
        floor = torch.finfo(torch.float32).eps

        def power_mel(block: Tensor) -> Tensor:
            block = block * self.scale if self.scale != 1 else block
            block = block - block.mean(-1, keepdim=True)
            block = block - 0.97 * torch.cat([block[..., :1], block[..., :-1]], -1)
            block = torch.view_as_real(torch.fft.rfft(block * window, n=fft)).flatten(-2)
            return (block.square_() @ bank).clamp_(min=floor).log_().sub_(self.mean).div_(2 * self.std)

        x = _blocks(x.__getitem__, power_mel, len(waveform), max(counts), waveform.device)
        after = _after(counts, x)
        return x if after is None else x.masked_fill(after[..., None], self.pad_value)


def silence_after(waveform: Tensor, lengths: Sequence[int]) -> Tensor:
    """Zero the samples after each row's end: (B, T) and B sample counts -> (B, T)."""
    if all(n >= waveform.shape[1] for n in lengths):
        return waveform
    index = torch.arange(waveform.shape[1], device=waveform.device)
    return waveform.masked_fill(index >= _ints(lengths, waveform)[:, None], 0)


def _fit(waveform: Tensor, lengths: Sequence[int], least: int) -> tuple[Tensor, list[int]]:
    """Float32 waveforms, short rows zero-padded to `least` samples, and the lengths that follow."""
    waveform = waveform.float()
    if min(lengths) < least:
        waveform = silence_after(waveform, lengths)
        waveform = functional.pad(waveform, (0, max(0, least - waveform.shape[1])))
    return waveform, [max(n, least) for n in lengths]


def _mirror(waveform: Tensor, lengths: Sequence[int], half: int) -> Tensor:
    """Reflect-pad by `half` samples before each row's start and after each row's own end."""
    t = waveform.shape[1]
    if all(n == t for n in lengths):
        return functional.pad(waveform, (half, half), mode="reflect")
    x = functional.pad(waveform, (half, half))
    x[:, :half] = waveform[:, 1 : half + 1].flip(1)
    step = torch.arange(half, device=waveform.device)
    ends = _ints(lengths, waveform)[:, None]
    return x.scatter_(1, half + ends + step, waveform.gather(1, ends - 2 - step))


def _after(counts: Sequence[int], x: Tensor) -> Tensor | None:
    """(B, F) True after each row's last frame; None when all rows have the same length."""
    if min(counts) == x.shape[1]:
        return None
    return torch.arange(x.shape[1], device=x.device) >= _ints(counts, x)[:, None]


def _ints(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(values)).to(like.device, non_blocking=True)


def _blocks(
    frames: Callable[[slice], Tensor],
    fn: Callable[[Tensor], Tensor],
    rows: int,
    count: int,
    device: torch.device,
) -> Tensor:
    """Apply `fn` to the frames of all rows, (B, F, window) -> (B, F, M); on a CPU in blocks that fit the cache.

    Allocating a copy of the whole batch would cost more time than the spectrograms.
    """
    with torch.autocast(device.type, enabled=False):
        if device.type != "cpu":
            return fn(frames(slice(0, rows)))
        size = BLOCK * torch.get_num_threads()  # each core has its own cache
        step = max(1, size // count)
        blocks = (frames(slice(i, i + step)) for i in range(0, rows, step))
        if count > size:
            return torch.cat([torch.cat([fn(p) for p in block.split(size, 1)], 1) for block in blocks])
        return torch.cat([fn(block) for block in blocks])


# Constants are computed once per device and are not module buffers: module.to(bfloat16) would round them, and a
# window in bfloat16 ruins the spectrogram.
@functools.lru_cache(maxsize=32)
def _whisper_constants(mel: LogMel, device: torch.device) -> tuple[Tensor, Tensor]:
    import torchaudio

    with torch.inference_mode(False), torch.no_grad():
        bank = torchaudio.functional.melscale_fbanks(
            mel.n_fft // 2 + 1,
            0.0,
            mel.sample_rate / 2,
            mel.n_mels,
            mel.sample_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        return torch.hann_window(mel.n_fft).to(device), bank.repeat_interleave(2, 0).to(device)


@functools.lru_cache(maxsize=32)
def _kaldi_constants(mel: Fbank, device: torch.device) -> tuple[Tensor, Tensor]:
    from torchaudio.compliance.kaldi import get_mel_banks

    with torch.inference_mode(False), torch.no_grad():
        window = torch.hann_window(mel.win_length, periodic=False)
        if mel.window == "povey":
            window = window.pow(0.85)
        fft = 1 << (mel.win_length - 1).bit_length()
        bank, _ = get_mel_banks(mel.n_mels, fft, float(mel.sample_rate), 20.0, 0.0, 100.0, -500.0, 1.0)
        bank = functional.pad(bank, (0, 1)).T  # Kaldi's bank has no bin at half the sampling rate
        return window.to(device), bank.repeat_interleave(2, 0).contiguous().to(device)
