"""Audio -> Tokens: log-mel spectrograms (Whisper's, AST's) or the waveform itself (wav2vec 2.0).

Notable:

- `read` resamples to mono at the tokenizer's own sampling rate, so a 48 kHz file cannot pass for a 16 kHz one;
- only the first `seconds` of a file are decoded, so an hour-long file costs no more than a short one;
- `forward` computes spectrograms for the whole batch on the model's device, always in float32;
- one length formula (`grid`) from samples to tokens serves masks, positions and layers.

Shapes: B waveforms, T samples, F frames, M mel bands, N tokens, D width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worldtokens.errors import InputError
from worldtokens.parts import settings
from worldtokens.tokenizers.audio.config import PRESETS, AudioConfig
from worldtokens.tokenizers.audio.mel import Fbank, LogMel, silence_after
from worldtokens.tokenizers.audio.read import MAX_SAMPLES, read_audio
from worldtokens.tokenizers.audio.resample import MAX_RATE, MIN_RATE, resample
from worldtokens.tokenizers.audio.stems import ConvStem, FrameStem, PatchStem, WaveStem
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.patches import grid_coords, sides, sincos_positions
from worldtokens.tokens import Tokens


class AudioBatch(Batch):
    """A batch whose waveforms stay float32 when the model is in half precision: bfloat16 has 8 bits of mantissa."""

    def to(self, *args, **kwargs) -> AudioBatch:
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return AudioBatch(super().to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> AudioBatch:
        return AudioBatch(super().pin_memory())


class AudioTokenizer(Tokenizer):
    """Audio -> tokens in order of time, with bidirectional attention within a waveform (block 0).

    Presets, each equal to its published front-end in the settings it fills in:

    - ``"whisper"``: log-mel, 80 bands, two convolutions, a token every 20 ms (Radford et al. 2022);
    - ``"ast"``: Kaldi's filter bank, 128 bands, patches of 16 x 16 every 10 x 10 (Gong et al. 2021);
    - ``"waveform"``: seven strided convolutions on the waveform, a token every 20 ms (Baevski et al. 2020).

    The number of tokens depends on the duration; a batch is padded. A waveform shorter than one window gives one
    token. A token's `pos` is (t, y, 0): its index in time and, for patches, in frequency from low to high;
    `token_seconds` is the step of t. Class tokens come first, at (0, 0, 0), (0, 0, 1), ...

    Args:
        dim: width D of the tokens.
        preset: ``"whisper"``, ``"ast"`` or ``"waveform"``.
        sample_rate: Hz to which audio is resampled; published weights expect 16,000. Windows of 25 ms every 10 ms at
            any sampling rate.
        n_mels: mel bands; None takes the preset's.
        stem: from spectrogram to tokens: ``"frames"`` (a linear layer, a token every 10 ms), ``"conv"`` (Whisper's) or
            ``"patches"`` (AST's); None takes the preset's.
        patch: (frames, bands) of a patch, or one number for both.
        stride: (frames, bands) between patches; None: 10 x 10 for ``"ast"``, otherwise `patch`.
        seconds: maximum duration, the rest is cut off; None: no limit, ``"preset"``: 30, or 10.24 for AST.
        positions: ``"learned"`` (a table up to `seconds`), ``"sincos"`` (fixed: Whisper's over time, 2-D over
            patches) or ``"none"``; None takes the preset's.
        config: `AudioConfig` or a dict of its fields: class tokens, fixed length, convolutions of the waveform preset.

    Raises:
        InputError: a setting is out of range or does not go with the others.
    """

    modality = "audio"
    settings_types = {"config": AudioConfig}

    def __init__(
        self,
        dim: int,
        preset: str = "whisper",
        sample_rate: int = 16000,
        n_mels: int | None = None,
        stem: str | None = None,
        patch: int | tuple[int, int] = 16,
        stride: int | tuple[int, int] | None = None,
        seconds: float | str | None = "preset",
        positions: str | None = None,
        config: AudioConfig | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        (self.dim,) = sides(dim, 1, "dim")
        self.preset = _one_of("preset", preset, tuple(PRESETS))
        default, self.cfg = PRESETS[preset], settings(AudioConfig, config, "config")
        if type(sample_rate) is not int or not MIN_RATE <= sample_rate <= MAX_RATE:
            raise InputError(
                f"sample_rate is {sample_rate!r}, expected whole Hz between {MIN_RATE:,} and {MAX_RATE:,}"
            )
        self.sample_rate = sample_rate
        self.positions = _one_of("positions", positions or default.positions, ("learned", "sincos", "none"))
        stems = ("wave",) if preset == "waveform" else ("frames", "conv", "patches")
        stem = _one_of(f"stem for the preset {preset!r}", stem or default.stem, stems)
        seconds = default.seconds if seconds == "preset" else seconds
        if seconds is not None and (
            isinstance(seconds, str | bool) or not 0.01 <= seconds <= MAX_SAMPLES / sample_rate
        ):
            raise InputError(
                f"seconds is {seconds!r}, expected 0.01 to {MAX_SAMPLES // sample_rate:,}, or None for no limit"
            )
        if seconds is None and (self.cfg.fixed_length or self.positions == "learned"):
            raise InputError(
                "fixed_length=True and positions='learned' need a maximum duration: give `seconds`"
            )

        self.stem: WaveStem | PatchStem | FrameStem | ConvStem
        self.spectrogram: LogMel | Fbank | None = None
        self.max_samples = None if seconds is None else round(seconds * sample_rate)
        if preset == "waveform":
            self.stem = WaveStem(dim, self.cfg.conv_dim, self.cfg.conv_norm)
            self.samples_per_token = WaveStem.step
        else:
            bands = default.n_mels if n_mels is None else sides(n_mels, 1, "n_mels")[0]
            self.spectrogram = (LogMel if preset == "whisper" else Fbank)(sample_rate, bands)
            hop = self.spectrogram.hop_length
            if seconds is not None:  # whole frames
                self.max_samples = self.spectrogram.samples(max(1, round(seconds * sample_rate / hop)))
            if stem == "patches":
                kernel = sides(patch, 2, "patch")
                steps = sides(stride or default.stride or patch, 2, "stride")
                drop_last, pad_value = self.cfg.fixed_length, self.spectrogram.pad_value
                self.stem = PatchStem(bands, dim, kernel, steps, drop_last, pad_value)
                self.samples_per_token = hop * steps[0]
            else:
                self.stem = (FrameStem if stem == "frames" else ConvStem)(bands, dim)
                self.samples_per_token = hop * (1 if stem == "frames" else 2)

        self.pos_embed = self.class_embed = None
        if self.positions == "learned" and self.max_samples is not None:
            self.pos_embed = nn.Parameter(torch.empty(*self.grid(self.max_samples), dim))
        elif self.positions == "sincos":
            self._sincos(torch.zeros(1, 2), 2)  # raises now if dim is too small
        if self.cfg.class_tokens:
            (class_tokens,) = sides(self.cfg.class_tokens, 1, "class_tokens")
            self.class_embed = nn.Parameter(torch.empty(1, class_tokens, dim))
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise all weights.

        Convolutions and linear layers: normal with variance 1 / fan-in, truncated at two sigma (LeCun), bias 0; the
        waveform convolutions keep He's; positions and class tokens: normal with std 0.02.
        """
        for module in self.stem.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
                if not (self.spectrogram is None and isinstance(module, nn.Conv1d)):
                    std = module.weight[0].numel() ** -0.5
                    nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for table in (self.pos_embed, self.class_embed):
            if table is not None:
                nn.init.normal_(table, std=0.02)

    # ---- lengths -----------------------------------------------------------------------------------------------

    def grid(self, samples: int) -> tuple[int, int]:
        """(columns in time, rows in frequency) of the tokens of a waveform, without class tokens.

        Args:
            samples: length at this tokenizer's sampling rate, 1 or more.
        """
        if self.max_samples is not None:
            samples = self.max_samples if self.cfg.fixed_length else min(samples, self.max_samples)
        return self.stem.grid(samples if self.spectrogram is None else self.spectrogram.frames(samples))

    def length(self, samples: int) -> int:
        """Number of tokens of a waveform of `samples` samples, class tokens included."""
        columns, rows = self.grid(samples)
        return columns * rows + (0 if self.class_embed is None else self.class_embed.shape[1])

    @property
    def token_seconds(self) -> float:
        """Seconds from one column of tokens to the next: the unit of `pos`'s t."""
        return self.samples_per_token / self.sample_rate

    # ---- read, collate, forward --------------------------------------------------------------------------------

    def read(self, source: Any, sample_rate: int | None = None) -> Tensor:
        """One recording -> mono float32 (T,) in [-1, 1] at this tokenizer's sampling rate, cut to `seconds`.

        Args:
            source: a path, bytes or binary file of any format that FFmpeg decodes, videos with audio included; or an
                array (time,) or (channels, time) with its `sample_rate`; or the pair (array, sample_rate). See
                `read_audio`.
            sample_rate: Hz of a bare array.

        Raises:
            InputError: it cannot be read; names the file.
        """
        # a tenth of a second more than is kept, for the resampler's filter
        most = None if self.max_samples is None else self.max_samples / self.sample_rate + 0.1
        waveform, found = read_audio(source, sample_rate, mono=True, seconds=most)
        if self.max_samples is None and waveform.shape[1] * self.sample_rate > MAX_SAMPLES * found:
            name = os.fspath(source) if isinstance(source, str | os.PathLike) else "the waveform"
            raise InputError(
                f"{name}: {waveform.shape[1] / found:.0f} s at {self.sample_rate} Hz do not fit into "
                f"{MAX_SAMPLES:,} samples; give `seconds`"
            )
        waveform = resample(waveform, found, self.sample_rate)[0]
        # a copy, so that what was cut off is not kept in memory nor sent between processes
        return waveform[: self.max_samples].clone()

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Waveforms from `read` -> one batch: `waveform` (B, T) float32, zero-padded on the right, `lengths` (B sample
        counts) and `sample_rate`.

        Raises:
            InputError: a waveform is not a float tensor (T,) with at least one sample, or there is none.
        """
        if not len(raws):
            raise InputError("no waveform to collate: expected at least one")
        for i, raw in enumerate(raws):
            if not isinstance(raw, Tensor) or not raw.is_floating_point() or raw.ndim != 1:
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(
                    f"waveform {i} of the batch is {found}, expected float (T,) as read() returns"
                )
            if not raw.numel():
                raise InputError(f"waveform {i} of the batch has no samples; drop the row")
        lengths = tuple(len(raw[: self.max_samples]) for raw in raws)
        waveform = torch.zeros(len(raws), max(lengths))
        for row, raw, n in zip(waveform, raws, lengths, strict=True):
            row[:n] = raw[:n]
        return AudioBatch(waveform=waveform, lengths=lengths, sample_rate=self.sample_rate)

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """A batch from `collate`, or waveforms of one length (B, T) at this sampling rate -> tokens (B, N, dim)."""
        x, counts = self._stem_input(batch)
        grids = [self.stem.grid(n) for n in counts]
        x = self.stem(x, counts)
        columns, rows = max(grids)
        coords = grid_coords((columns, rows), x.device)  # (N, 2): t, y
        if self.pos_embed is not None:
            x = x + self.pos_embed[:columns].flatten(0, 1).to(x.dtype)
        elif self.positions == "sincos":
            x = x + self._sincos(coords, rows).to(x.dtype)
        pos = functional.pad(coords.float(), (0, 1))  # (N, 3): t, y, x
        extra = 0
        if self.class_embed is not None:
            extra = self.class_embed.shape[1]
            x = torch.cat([self.class_embed.to(x.dtype).expand(len(x), -1, -1), x], 1)
            pos = functional.pad(pos, (0, 0, extra, 0))
            pos[:extra, 2] = torch.arange(
                extra, device=x.device
            )  # audio has no x axis: positions stay distinct
        lengths = [columns * rows + extra for columns, rows in grids]
        return self.wrap(x, lengths, "bidirectional", pos=pos.expand(len(x), -1, -1))

    def features(self, batch: Batch | Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Input of the stem: spectrograms (B, F, M) float32 and the B frame counts.

        Raises:
            InputError: the preset is ``"waveform"``, which computes no spectrogram.
        """
        if self.spectrogram is None:
            raise InputError("the preset 'waveform' has no spectrogram; its stem takes the waveform itself")
        return self._stem_input(batch)

    def _stem_input(self, batch: Batch | Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Spectrograms or waveforms, and the number of valid frames or samples of each row."""
        if isinstance(batch, Tensor):
            batch = Batch(
                waveform=batch, lengths=(batch.shape[-1],) * len(batch), sample_rate=self.sample_rate
            )
        waveform, lengths = batch["waveform"], batch["lengths"]
        if batch["sample_rate"] != self.sample_rate:
            raise InputError(
                f"the batch is at {batch['sample_rate']} Hz, this tokenizer at {self.sample_rate} Hz"
            )
        if (
            waveform.ndim != 2
            or len(lengths) != len(waveform)
            or not 1 <= min(lengths) <= max(lengths) <= waveform.shape[1]
        ):
            raise InputError(
                f"waveform is {tuple(waveform.shape)} and lengths {lengths}, expected (B, T) and B counts up to T"
            )
        limit, fixed = self.max_samples, self.cfg.fixed_length
        if limit is not None:
            lengths = tuple(min(n, limit) for n in lengths)
        waveform = waveform[:, : max(lengths)]
        if fixed and limit is not None and not isinstance(self.spectrogram, Fbank):
            waveform = functional.pad(silence_after(waveform, lengths), (0, limit - waveform.shape[1]))
            lengths = (limit,) * len(waveform)
        if self.spectrogram is None:
            return waveform, lengths
        x = self.spectrogram(waveform, lengths)
        counts = tuple(self.spectrogram.frames(n) for n in lengths)
        if fixed and limit is not None and isinstance(self.spectrogram, Fbank):  # AST pads the spectrogram
            frames = self.spectrogram.frames(limit)
            x = functional.pad(x, (0, 0, 0, frames - x.shape[1]), value=self.spectrogram.pad_value)
            counts = (frames,) * len(waveform)
        return x, counts

    def _sincos(self, coords: Tensor, rows: int) -> Tensor:
        if rows > 1:
            return sincos_positions(coords, self.dim)
        # Whisper's own sinusoids end at a wavelength of exactly 10,000 steps
        bands = self.dim // 2
        return sincos_positions(coords[:, :1], self.dim, 10000.0 ** (bands / max(1, bands - 1)))


def _one_of(name: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(repr, known))}")
    return value
