"""Log-mel spectra, equal to the published front-ends: Whisper's, and Kaldi's fbank as AST uses it.

Both work on a batch of waves of unequal length at once, on any device, in float32. Each row's spectrum is what
the row would have had alone: a row's end is mirrored at its own last sample, and what lies behind a row's end is
never read.

On a CPU the frames are taken in blocks that stay in the cache, and the power spectrum is not formed as complex
magnitudes: squares of (real, imaginary) go through a filter bank with each row written twice, which is the sum of
squares done by the matrix product. That is most of the distance to the usual pad-stft-abs-square-matmul.

Shapes: B batch, T samples, F frames, M mel bands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 4096  # frames of 400 samples at a time and thread: about 6 MB


@dataclasses.dataclass(frozen=True)
class LogMel:
    """Whisper's log-mel spectrum (Radford et al. 2022), equal to `transformers.WhisperFeatureExtractor`.

    Hann windows of 25 ms every 10 ms, centred, the ends mirrored; Slaney's mel scale and norm; log10, no lower
    than 8 below the sound's maximum, then (x + 4) / 4.

    Args:
        rate: Hz.
        n_mels: bands from 0 Hz to half the rate; 80, or 128 for Whisper large-v3.
    """

    rate: int = 16000
    n_mels: int = 80

    blank = 0.0  # what frames after the end hold

    @property
    def hop_length(self) -> int:
        return self.rate // 100

    @property
    def n_fft(self) -> int:
        return self.rate // 80 * 2

    @property
    def least(self) -> int:
        """A shorter wave is filled with silence up to this; mirroring half a window needs one sample more."""
        return self.n_fft // 2 + 1

    def frames(self, samples: int) -> int:
        """How many frames a wave gives: one for each whole hop, and at least one."""
        return max(1, samples // self.hop_length)

    def samples(self, frames: int) -> int:
        """The longest wave that gives no more than `frames` frames and loses nothing of them."""
        return frames * self.hop_length

    def __call__(self, wave: Tensor, lengths: Sequence[int]) -> Tensor:
        """(B, T) float in [-1, 1] and B sample counts -> (B, F, M) float32; frames after a row's end are `blank`."""
        counts = [self.frames(n) for n in lengths]
        f, half = max(counts), self.n_fft // 2
        wave, lengths = _fit(wave, lengths, self.least)
        window, bank = _whisper_constants(self, wave.device)

        def frames(rows: slice) -> Tensor:
            x = _mirror(wave[rows], lengths[rows], half)
            return x.unfold(-1, self.n_fft, self.hop_length)[:, :f]  # (rows, F, n_fft), a view

        def spectrum(part: Tensor) -> Tensor:
            part = torch.view_as_real(torch.fft.rfft(part * window)).flatten(-2)
            return (part.square_() @ bank).clamp_(min=1e-10).log10_()

        x = _blocks(frames, spectrum, len(wave), f, wave.device)
        after = _after(counts, x)
        peak = x if after is None else x.masked_fill(after[..., None], -torch.inf)
        x = torch.maximum(x, peak.amax((1, 2), keepdim=True) - 8.0).add_(4.0).div_(4.0)
        return x if after is None else x.masked_fill(after[..., None], self.blank)


@dataclasses.dataclass(frozen=True)
class Fbank:
    """Kaldi's log filter bank, equal to `torchaudio.compliance.kaldi.fbank`; AST's front-end by default.

    Windows of 25 ms every 10 ms that lie wholly inside the wave; each frame loses its mean, is pre-emphasised by
    0.97, windowed, zero-filled to a power of two; HTK's mel scale from 20 Hz to half the rate; natural log. Then
    (x - mean) / (2 std), as AST (Gong et al. 2021) and `transformers.ASTFeatureExtractor` do.

    Args:
        rate: Hz.
        n_mels: bands.
        window: ``"hanning"`` (AST) or ``"povey"`` (Kaldi's own).
        scale: what samples in [-1, 1] are multiplied by; 32768 for models trained on 16-bit numbers.
        mean, std: of the log filter bank; 0 and 0.5 leave it as it is.
    """

    rate: int = 16000
    n_mels: int = 128
    window: str = "hanning"
    scale: float = 1.0
    mean: float = -4.2677393
    std: float = 4.5689974

    @property
    def blank(self) -> float:
        """What frames after the end hold: zeros before the normalisation, as AST was trained."""
        return -self.mean / (2 * self.std)

    @property
    def hop_length(self) -> int:
        return self.rate // 100

    @property
    def win_length(self) -> int:
        return self.rate // 40

    @property
    def least(self) -> int:
        """A shorter wave is filled with silence up to one window."""
        return self.win_length

    def frames(self, samples: int) -> int:
        """How many frames a wave gives: the windows wholly inside it, and at least one."""
        return 1 + max(0, samples - self.win_length) // self.hop_length

    def samples(self, frames: int) -> int:
        """The longest wave that gives no more than `frames` frames and loses nothing of them."""
        return (frames - 1) * self.hop_length + self.win_length

    def __call__(self, wave: Tensor, lengths: Sequence[int]) -> Tensor:
        """(B, T) float in [-1, 1] and B sample counts -> (B, F, M) float32; frames after a row's end are `blank`."""
        counts = [self.frames(n) for n in lengths]
        wave, lengths = _fit(wave, lengths, self.least)
        x = wave.unfold(-1, self.win_length, self.hop_length)[:, : max(counts)]  # (B, F, window), a view
        window, bank = _kaldi_constants(self, wave.device)
        fft = 1 << (self.win_length - 1).bit_length()
        floor = torch.finfo(torch.float32).eps

        def spectrum(part: Tensor) -> Tensor:
            part = part * self.scale if self.scale != 1 else part
            part = part - part.mean(-1, keepdim=True)
            part = part - 0.97 * torch.cat([part[..., :1], part[..., :-1]], -1)
            part = torch.view_as_real(torch.fft.rfft(part * window, n=fft)).flatten(-2)
            return (part.square_() @ bank).clamp_(min=floor).log_().sub_(self.mean).div_(2 * self.std)

        x = _blocks(x.__getitem__, spectrum, len(wave), max(counts), wave.device)
        after = _after(counts, x)
        return x if after is None else x.masked_fill(after[..., None], self.blank)


def silence_after(wave: Tensor, lengths: Sequence[int]) -> Tensor:
    """Zeros behind each row's end, whatever was there: (B, T) and B sample counts -> (B, T)."""
    if all(n >= wave.shape[1] for n in lengths):
        return wave
    places = torch.arange(wave.shape[1], device=wave.device)
    return wave.masked_fill(places >= _ints(lengths, wave)[:, None], 0)


def _fit(wave: Tensor, lengths: Sequence[int], least: int) -> tuple[Tensor, list[int]]:
    """The wave in float32, short rows filled with silence up to `least` samples, which becomes their length."""
    wave = wave.float()
    if min(lengths) < least:
        wave = silence_after(wave, lengths)
        wave = functional.pad(wave, (0, max(0, least - wave.shape[1])))
    return wave, [max(n, least) for n in lengths]


def _mirror(wave: Tensor, lengths: Sequence[int], half: int) -> Tensor:
    """Reflect `half` samples before each row's start and behind each row's own end, the end sample not repeated."""
    t = wave.shape[1]
    if all(n == t for n in lengths):
        return functional.pad(wave, (half, half), mode="reflect")
    x = functional.pad(wave, (half, half))
    x[:, :half] = wave[:, 1 : half + 1].flip(1)
    step = torch.arange(half, device=wave.device)
    ends = _ints(lengths, wave)[:, None]
    return x.scatter_(1, half + ends + step, wave.gather(1, ends - 2 - step))


def _after(counts: Sequence[int], x: Tensor) -> Tensor | None:
    """(B, F) True behind each row's last frame; None when no row is shorter than the others."""
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
    """`fn` over the frames of all rows, (B, F, window) -> (B, F, M); on a CPU a cache-full at a time.

    A copy of the whole batch would cost more in fresh memory than the spectra cost to compute.
    """
    with torch.autocast(device.type, enabled=False):
        if device.type != "cpu":
            return fn(frames(slice(0, rows)))
        block = BLOCK * torch.get_num_threads()  # each core has a cache of its own
        step = max(1, block // count)
        parts = (frames(slice(i, i + step)) for i in range(0, rows, step))
        if count > block:
            return torch.cat([torch.cat([fn(p) for p in part.split(block, 1)], 1) for part in parts])
        return torch.cat([fn(part) for part in parts])


# Constants are made once per device and kept out of the modules: as buffers they would be rounded by
# module.to(bfloat16), and a window in bfloat16 ruins the spectrum.
@functools.lru_cache(maxsize=32)
def _whisper_constants(mel: LogMel, device: torch.device) -> tuple[Tensor, Tensor]:
    import torchaudio

    with torch.inference_mode(False), torch.no_grad():
        bank = torchaudio.functional.melscale_fbanks(
            mel.n_fft // 2 + 1, 0.0, mel.rate / 2, mel.n_mels, mel.rate, norm="slaney", mel_scale="slaney"
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
        bank, _ = get_mel_banks(mel.n_mels, fft, float(mel.rate), 20.0, 0.0, 100.0, -500.0, 1.0)
        bank = functional.pad(bank, (0, 1)).T  # Kaldi's bank has no bin for half the rate
        return window.to(device), bank.repeat_interleave(2, 0).contiguous().to(device)
