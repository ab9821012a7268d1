"""Resampling keeps pitch and duration."""

import numpy as np
import pytest
import torch

from worldtokens.tokenizers.audio.resample import resample
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer


@pytest.mark.parametrize("sample_rate", [8000, 11025, 22050, 44100, 48000, 96000, 44101])
def test_a_tone_keeps_its_pitch_at_any_sampling_rate(sample_rate):
    """The waveform comes with its sampling rate: 440 Hz stays 440 Hz, a second stays a second."""
    tok = AudioTokenizer(8)
    raw = tok.read((np.sin(2 * np.pi * 440 * np.arange(sample_rate) / sample_rate) * 0.5, sample_rate))
    want = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(16000) / 16000)
    assert raw.shape == (16000,)
    assert (raw - want)[200:-200].abs().max() < (5e-3 if sample_rate == 44101 else 2e-3)


def test_an_odd_ratio_needs_no_filter_of_gigabytes():
    waveform = torch.sin(torch.arange(767_999 * 2) * 0.001)[None]
    got = resample(waveform, 767_999, 16_001)
    assert abs(got.shape[1] / 32_002 - 1) < 1e-3
