"""Spectrograms equal those of transformers and torchaudio."""

import numpy as np
import pytest
import torch
import torchaudio

from worldtokens.tokenizers.audio.mel import Fbank
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer


@pytest.fixture(scope="module")
def hf_whisper():
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor()


@pytest.mark.parametrize("samples", [201, 799, 800, 801, 75_108, 479_900, 480_000, 500_000])
def test_whisper_features_equal_the_published_ones(chirp, hf_whisper, samples):
    """Measured 4e-5 at most from its torch form and 6e-5 from its numpy form, as those two are from each other."""
    x = chirp(samples)
    tok = AudioTokenizer(8, config={"fixed_length": True})
    got, counts = tok.features(tok.collate([x]))
    ref = hf_whisper(x.numpy(), sampling_rate=16000)["input_features"]
    assert counts == (3000,) and np.abs(got.mT.numpy() - ref).max() < 1e-4
    padded = np.zeros((1, 480_000), np.float32)
    padded[0, :samples] = x[:480_000]
    exact = hf_whisper._np_extract_fbank_features(padded, "cpu")  # float64
    assert np.abs(got.mT.numpy() - exact).max() < 1e-4
    if samples <= 480_000:
        tok = AudioTokenizer(8)
        got, counts = tok.features(tok.collate([x]))
        ref = hf_whisper(x.numpy(), sampling_rate=16000, padding="do_not_pad")["input_features"]
        assert counts == (ref.shape[2],) and np.abs(got.mT.numpy() - ref).max() < 1e-4


def test_whisper_features_with_128_bands_and_of_silence(chirp, hf_whisper):
    from transformers import WhisperFeatureExtractor

    x = chirp(30_000)
    tok = AudioTokenizer(8, n_mels=128, config={"fixed_length": True})
    ref = WhisperFeatureExtractor(feature_size=128)(x.numpy(), sampling_rate=16000)["input_features"]
    assert np.abs(tok.features(tok.collate([x]))[0].mT.numpy() - ref).max() < 2e-5
    # log10 of the floor 1e-10 is -10, (-10 + 4) / 4 = -1.5
    got, _ = AudioTokenizer(8).features(torch.zeros(2, 1000))
    assert got.shape == (2, 6, 80) and bool((got == -1.5).all())


@pytest.mark.parametrize("samples", [400, 559, 560, 75_108, 164_080, 200_000])
def test_ast_features_equal_the_published_ones(chirp, samples):
    """Measured 2e-7 at most."""
    from transformers import ASTFeatureExtractor

    x = chirp(samples)
    tok = AudioTokenizer(8, "ast", config={"fixed_length": True})
    got, counts = tok.features(tok.collate([x]))
    ref = ASTFeatureExtractor()(x.numpy(), sampling_rate=16000)["input_values"][0]
    assert counts == (1024,) and np.abs(got[0].numpy() - ref).max() < 1e-5
    own = AudioTokenizer(8, "ast", seconds=None, positions="none")
    got, counts = own.features(own.collate([x]))
    ref = torchaudio.compliance.kaldi.fbank(x[None], window_type="hanning", num_mel_bins=128)
    assert counts == (len(ref),) and (got[0] - (ref + 4.2677393) / (2 * 4.5689974)).abs().max() < 1e-5


@pytest.mark.parametrize("sample_rate", [8000, 16000, 44100])
def test_kaldi_fbank_with_16_bit_integers(chirp, sample_rate):
    x = chirp(sample_rate)
    front = Fbank(sample_rate, 23, window="povey", scale=32768.0, mean=0.0, std=0.5)
    ref = torchaudio.compliance.kaldi.fbank(x[None] * 32768, sample_frequency=sample_rate)
    got = front(x[None], [sample_rate])[0]
    assert got.shape == ref.shape and (got - ref).abs().max() < 2e-4  # values up to 25
