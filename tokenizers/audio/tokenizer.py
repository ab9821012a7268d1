"""Sound -> Tokens: log-mel spectra (Whisper's, AST's) or the wave itself (wav2vec 2.0).

Notable:

- a raw sound is mono at the front-end's own rate: `read` resamples, so a 48 kHz file cannot pass for a 16 kHz one;
- only as much of a file is decoded as the front-end takes, so an hour-long file costs no more than a short one;
- spectra are computed in `forward`, for the whole batch on the model's device, always in float32;
- one length formula (`grid`) from samples to tokens, used for masks, positions and layers alike.

Shapes: B sounds, T samples, F frames, M mel bands, N tokens, D width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worldtokens.errors import InputError
from worldtokens.tokenizers.audio.mel import Fbank, LogMel, silence_after
from worldtokens.tokenizers.audio.read import MAX_RATE, MAX_SAMPLES, MIN_RATE, read_audio, resample
from worldtokens.tokenizers.audio.stems import ConvStem, FrameStem, PatchStem, WaveStem
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.patches import grid_coords, sides, sincos_positions
from worldtokens.tokens import Tokens

# what a preset says where the caller does not: stem, mel bands, stride of patches, seconds, positions
PRESETS: dict[str, tuple] = {
    "whisper": ("conv", 80, None, 30.0, "sincos"),
    "ast": ("patches", 128, (10, 10), 10.24, "learned"),
    "waveform": ("wave", None, None, 30.0, "sincos"),
}


class AudioBatch(Batch):
    """A batch whose wave stays float32 when the rest goes to half precision: bfloat16 would make it 8-bit sound."""

    def to(self, *args, **kwargs) -> AudioBatch:
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return AudioBatch(super().to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> AudioBatch:
        return AudioBatch(super().pin_memory())


class AudioTokenizer(Tokenizer):
    """Sounds -> tokens in reading order of time, all of a sound reading each other (block 0).

    Presets, each equal to its published front-end in the settings it fills in:

    - ``"whisper"``: log-mel, 80 bands, two convolutions, a token every 20 ms (Radford et al. 2022);
    - ``"ast"``: Kaldi's filter bank, 128 bands, patches of 16 x 16 every 10 x 10 (Gong et al. 2021);
    - ``"waveform"``: seven strided convolutions on the wave, a token every 20 ms (Baevski et al. 2020).

    Every sound has its own number of tokens, what batches add is padding; with `fixed` each is filled with silence
    to exactly `seconds` and all tokens are valid, which is how Whisper and AST were trained. A sound shorter than a
    window is one token. A token's `pos` is (t, y, 0): its place in time and, for patches, in frequency from low to
    high; `token_seconds` is the step of t. Class tokens come first, at (0, 0, 0), (0, 0, 1), ...

    Args:
        dim: width D of the tokens.
        preset: ``"whisper"``, ``"ast"`` or ``"waveform"``.
        rate: Hz that sounds are brought to; published weights want 16,000. Spectra keep windows of 25 ms every
            10 ms at any rate.
        n_mels: mel bands; None takes the preset's.
        stem: from spectrum to tokens: ``"frames"`` (a linear layer, a token every 10 ms), ``"conv"`` (Whisper's) or
            ``"patches"`` (AST's); None takes the preset's.
        patch: (frames, bands) of a patch, or one number.
        stride: (frames, bands) between patches; None: 10 x 10 for ``"ast"``, else the patch.
        seconds: the longest sound, the rest is cut off; None: no limit, ``"preset"``: 30, or 10.24 for AST.
        fixed: fill up every sound to `seconds`.
        positions: ``"learned"`` (a table up to `seconds`), ``"sincos"`` (fixed: Whisper's over time, 2-D over
            patches) or ``"none"``; None takes the preset's.
        class_tokens: learned tokens before the sound; AST has two.
        width, norm: waveform only, channels and ``"group"`` / ``"layer"`` norm of the convolutions.

    Raises:
        InputError: a setting is out of its range or does not go with the others.
    """

    modality = "audio"

    def __init__(
        self,
        dim: int,
        preset: str = "whisper",
        rate: int = 16000,
        n_mels: int | None = None,
        stem: str | None = None,
        patch: int | tuple[int, int] = 16,
        stride: int | tuple[int, int] | None = None,
        seconds: float | str | None = "preset",
        fixed: bool = False,
        positions: str | None = None,
        class_tokens: int = 0,
        width: int = 512,
        norm: str = "group",
    ) -> None:
        super().__init__()
        (self.dim,) = sides(dim, 1, "dim")
        self.preset = _one_of("preset", preset, tuple(PRESETS))
        own_stem, own_mels, own_stride, own_seconds, own_positions = PRESETS[preset]
        if type(rate) is not int or not MIN_RATE <= rate <= MAX_RATE:
            raise InputError(f"rate is {rate!r}, expected whole Hz between {MIN_RATE:,} and {MAX_RATE:,}")
        self.rate, self.fixed = rate, fixed
        self.positions = _one_of("positions", positions or own_positions, ("learned", "sincos", "none"))
        stems = ("wave",) if preset == "waveform" else ("frames", "conv", "patches")
        stem = _one_of(f"stem for the preset {preset!r}", stem or own_stem, stems)
        seconds = own_seconds if seconds == "preset" else seconds
        if seconds is not None and (
            isinstance(seconds, str | bool) or not 0.01 <= seconds <= MAX_SAMPLES / rate
        ):
            raise InputError(
                f"seconds is {seconds!r}, expected 0.01 to {MAX_SAMPLES // rate:,}, or None for no limit"
            )
        if seconds is None and (fixed or self.positions == "learned"):
            raise InputError("fixed=True and positions='learned' need a longest sound: give `seconds`")

        if preset == "waveform":
            self.front = None
            self.stem = WaveStem(dim, width, norm)
            self.step, self.max_frames = WaveStem.step, None
            # samples kept of a sound
            self.limit = None if seconds is None else round(seconds * rate)
        else:
            n_mels = own_mels if n_mels is None else sides(n_mels, 1, "n_mels")[0]
            self.front = (LogMel if preset == "whisper" else Fbank)(rate, n_mels)
            hop = self.front.hop_length
            self.max_frames = None if seconds is None else max(1, round(seconds * rate / hop))
            self.limit = None if seconds is None else self.front.samples(self.max_frames)
            if stem == "patches":
                patch = sides(patch, 2, "patch")
                stride = sides(stride or own_stride or patch, 2, "stride")
                self.stem = PatchStem(n_mels, dim, patch, stride, whole=fixed, blank=self.front.blank)
                self.step = hop * stride[0]
            else:
                self.stem = (FrameStem if stem == "frames" else ConvStem)(n_mels, dim)
                self.step = hop * (1 if stem == "frames" else 2)

        self.pos_embed = self.class_embed = None
        if self.positions == "learned":
            self.pos_embed = nn.Parameter(torch.empty(*self.grid(self.limit), dim))
        elif self.positions == "sincos":
            self._sincos(torch.zeros(1, 2), 2)  # says so now if dim is too small
        if class_tokens:
            (class_tokens,) = sides(class_tokens, 1, "class_tokens")
            self.class_embed = nn.Parameter(torch.empty(1, class_tokens, dim))
        self.init_weights()

    def init_weights(self) -> None:
        """Convolutions and linear layers: normal with variance 1 / inputs, cut at two sigma (LeCun), bias 0; the wave's
        own convolutions keep theirs (He); positions and class tokens: normal with deviation 0.02."""
        for module in self.stem.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
                if not (self.front is None and isinstance(module, nn.Conv1d)):
                    std = module.weight[0].numel() ** -0.5
                    nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for table in (self.pos_embed, self.class_embed):
            if table is not None:
                nn.init.normal_(table, std=0.02)

    # ---- lengths -----------------------------------------------------------------------------------------------

    def grid(self, samples: int) -> tuple[int, int]:
        """(columns in time, rows in frequency) of a sound's tokens, class tokens not counted.

        Args:
            samples: of the sound at this front-end's rate, 1 or more.
        """
        samples = samples if self.limit is None else min(samples, self.limit)
        if self.front is None:
            return self.stem.grid(self.limit if self.fixed else samples)
        return self.stem.grid(self.max_frames if self.fixed else self.front.frames(samples))

    def length(self, samples: int) -> int:
        """How many tokens a sound of so many samples gives, class tokens counted."""
        columns, rows = self.grid(samples)
        return columns * rows + (0 if self.class_embed is None else self.class_embed.shape[1])

    @property
    def token_seconds(self) -> float:
        """Seconds from one column of tokens to the next: the unit of `pos`'s t."""
        return self.step / self.rate

    # ---- the three verbs ---------------------------------------------------------------------------------------

    def read(self, source: Any, rate: int | None = None) -> Tensor:
        """One sound -> mono float32 (T,) in [-1, 1] at this front-end's rate, cut to `seconds`.

        Args:
            source: a path, bytes or binary file of any kind that FFmpeg knows, clips with sound too; or an array of
                (time,) or (channels, time) with its `rate`; or the pair (array, rate). See `sound.read_audio`.
            rate: Hz of a bare array.

        Raises:
            InputError: it cannot be read; names the file.
        """
        # a tenth of a second more than is kept, for the resampler's filter
        most = None if self.limit is None else self.limit / self.rate + 0.1
        wave, found = read_audio(source, rate, mono=True, seconds=most)
        if self.limit is None and wave.shape[1] * self.rate > MAX_SAMPLES * found:
            name = os.fspath(source) if isinstance(source, str | os.PathLike) else "a sound"
            raise InputError(
                f"{name}: {wave.shape[1] / found:.0f} s at {self.rate} Hz is too long to hold; give `seconds`"
            )
        wave = resample(wave, found, self.rate)[0]
        # a copy, so that what was cut off is not kept alive nor sent between processes
        return wave[: self.limit].clone()

    def collate(self, raws: Sequence[Tensor]) -> Batch:
        """Sounds from `read` -> one batch: `wave` (B, T) float32 with silence behind the shorter ones, `lengths` (B
        sample counts) and `rate`.

        Raises:
            InputError: a sound is not a float tensor (T,) with at least one sample, or there is none.
        """
        if not len(raws):
            raise InputError("no sound to collate: expected at least one")
        for i, raw in enumerate(raws):
            if not isinstance(raw, Tensor) or not raw.is_floating_point() or raw.ndim != 1:
                found = f"{tuple(raw.shape)} {raw.dtype}" if isinstance(raw, Tensor) else type(raw).__name__
                raise InputError(f"sound {i} of the batch is {found}, expected float (T,) as read() gives")
            if not raw.numel():
                raise InputError(f"sound {i} of the batch holds no sample; leave the row out")
        lengths = tuple(len(raw[: self.limit]) for raw in raws)
        wave = torch.zeros(len(raws), max(lengths))
        for row, raw, n in zip(wave, raws, lengths, strict=True):
            row[:n] = raw[:n]
        return AudioBatch(wave=wave, lengths=lengths, rate=self.rate)

    def forward(self, batch: Batch | Tensor) -> Tokens:
        """A batch from `collate`, or waves of one length (B, T) at this front-end's rate -> tokens (B, N, dim)."""
        x, counts = self._prepared(batch)
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
            pos[:extra, 2] = torch.arange(extra, device=x.device)  # sounds leave x free: no two share a place
        lengths = [columns * rows + extra for columns, rows in grids]
        return self.wrap(x, lengths, "bidirectional", pos=pos.expand(len(x), -1, -1))

    # ---- inside ------------------------------------------------------------------------------------------------

    def features(self, batch: Batch | Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The spectra that the stem sees: (B, F, M) float32 and the B frame counts.

        Raises:
            InputError: the preset is ``"waveform"``, which has none.
        """
        if self.front is None:
            raise InputError("the preset 'waveform' has no spectrum; its layers read the wave itself")
        return self._prepared(batch)

    def _prepared(self, batch: Batch | Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """What goes into the stem, and how much of each row of it is real."""
        if isinstance(batch, Tensor):
            batch = Batch(wave=batch, lengths=(batch.shape[-1],) * len(batch), rate=self.rate)
        wave, lengths = batch["wave"], batch["lengths"]
        if batch["rate"] != self.rate:
            raise InputError(f"the batch is at {batch['rate']} Hz, this front-end at {self.rate} Hz")
        if (
            wave.ndim != 2
            or len(lengths) != len(wave)
            or not 1 <= min(lengths) <= max(lengths) <= wave.shape[1]
        ):
            raise InputError(
                f"wave is {tuple(wave.shape)} and lengths {lengths}, expected (B, T) and B counts up to T"
            )
        if self.limit is not None:
            lengths = tuple(min(n, self.limit) for n in lengths)
        wave = wave[:, : max(lengths)]
        if self.fixed and not isinstance(self.front, Fbank):
            wave = functional.pad(silence_after(wave, lengths), (0, self.limit - wave.shape[1]))
            lengths = (self.limit,) * len(wave)
        if self.front is None:
            return wave, lengths
        x, counts = self.front(wave, lengths), tuple(self.front.frames(n) for n in lengths)
        if self.fixed and isinstance(self.front, Fbank):  # AST fills up the spectrum, not the wave
            x = functional.pad(x, (0, 0, 0, self.max_frames - x.shape[1]), value=self.front.blank)
            counts = (self.max_frames,) * len(wave)
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
