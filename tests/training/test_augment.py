"""Augmentation of waveforms and point clouds: off it changes nothing, on it stays in its ranges."""

import pytest
import torch

import worldtokens as wt
from worldtokens.training.augment import AudioJitter, PointJitter

OFF = {"speed": 0.0, "shift": 0.0, "gain_db": 0.0, "eq_db": 0.0, "noise_db": None}


def tone(hertz=440.0, n=8000, sample_rate=8000):
    return torch.sin(torch.arange(n) * 2 * torch.pi * hertz / sample_rate)


def test_audio_jitter_with_all_ranges_zero_changes_nothing():
    assert torch.equal(AudioJitter(8000, **OFF)(tone()), tone())


def test_speed_moves_pitch_and_length_together():
    seen = []
    for seed in range(30):
        torch.manual_seed(seed)
        out = AudioJitter(8000, **{**OFF, "speed": 0.25})(tone())
        peak = float(torch.fft.rfft(out).abs().argmax()) * 8000 / len(out)
        assert abs(peak * len(out) / 8000 - 440) < 1.5, "the number of periods stays"
        seen.append(8000 / len(out))
    assert 1 / 1.26 < min(seen) < 0.9 and 1.1 < max(seen) < 1.26


def test_shift_gain_noise_and_equaliser_stay_in_their_ranges():
    waveform = tone()
    for seed in range(20):
        torch.manual_seed(seed)
        shifted = AudioJitter(8000, **{**OFF, "shift": 0.1})(waveform)
        assert 8000 <= len(shifted) <= 8800 and torch.equal(shifted[-8000:], waveform)
        louder = AudioJitter(8000, **{**OFF, "gain_db": 6.0})(waveform)
        assert 0.501 <= float(louder.norm() / waveform.norm()) <= 1.996
        noisy = AudioJitter(8000, **{**OFF, "noise_db": -20.0})(waveform)
        assert float((noisy - waveform).norm() / waveform.norm()) < 0.11
        equalised = AudioJitter(8000, **{**OFF, "eq_db": 12.0})(waveform)
        assert 0.25 <= float(equalised.norm() / waveform.norm()) <= 4 and len(equalised) == 8000
    assert AudioJitter(8000)(torch.ones(1)).isfinite().all()
    assert AudioJitter(8000)(torch.zeros(100)).abs().max() == 0
    with pytest.raises(wt.InputError, match="speed"):
        AudioJitter(8000, speed=-1)


def test_augmentation_draws_from_the_global_generator():
    for jitter, raw in ((AudioJitter(8000), tone()), (PointJitter(), torch.randn(50, 3).double())):
        torch.manual_seed(1)
        first = jitter(raw.clone())
        torch.manual_seed(1)
        assert torch.equal(first, jitter(raw.clone())) and not torch.equal(first, jitter(raw.clone()))


def test_normals_stay_perpendicular_to_their_surface():
    torch.manual_seed(0)
    normal = torch.nn.functional.normalize(torch.tensor([0.3, 0.8, -0.5]).double(), dim=0)
    flat = torch.randn(200, 3).double()
    flat = flat - (flat @ normal)[:, None] * normal
    cloud = torch.cat([flat, normal.expand(200, 3)], 1)
    for _ in range(10):
        out = PointJitter(scale=0.5, jitter=0.0, normals=True)(cloud)
        assert 120 <= len(out) <= 200
        assert (out[:, :3] * out[:, 3:]).sum(1).abs().max() < 1e-9
        assert (out[:, 3:].norm(dim=1) - 1).abs().max() < 1e-9


def test_rotation_keeps_the_upright_axis_and_distances():
    cloud = torch.randn(40, 3).double()
    out = PointJitter(scale=0.0, jitter=0.0, min_keep=1.0, axis=1)(cloud)
    assert torch.allclose(out[:, 1].sort().values, cloud[:, 1].sort().values)
    lengths = [torch.pdist(c).sort().values for c in (out, cloud)]
    assert torch.allclose(*lengths) and not torch.allclose(out.sort(0).values, cloud.sort(0).values)
    with pytest.raises(wt.InputError, match="axis=3"):
        PointJitter(axis=3)
