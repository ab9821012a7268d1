"""Settings of `AudioTokenizer`: the presets, and what only published models need."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Preset(NamedTuple):
    """Defaults of a preset for the arguments that the caller leaves at None."""

    stem: str
    n_mels: int
    stride: tuple[int, int] | None
    seconds: float
    positions: str


PRESETS = {
    "whisper": Preset("conv", 80, None, 30.0, "sincos"),
    "ast": Preset("patches", 128, (10, 10), 10.24, "learned"),
    "waveform": Preset("wave", 0, None, 30.0, "sincos"),
}


@dataclasses.dataclass(frozen=True)
class AudioConfig:
    """Settings of `AudioTokenizer` that exist for the exact numbers of published models.

    Args:
        class_tokens: learned tokens before the audio; AST has two.
        fixed_length: pad every waveform with silence to exactly `seconds`, all tokens valid, as Whisper and AST were
            trained.
        conv_dim: channels of the waveform preset's convolutions.
        conv_norm: their norm: ``"group"`` (wav2vec 2.0 base) or ``"layer"`` (large).
    """

    class_tokens: int = 0
    fixed_length: bool = False
    conv_dim: int = 512
    conv_norm: str = "group"
