"""Audio to tokens: one length formula, padding and batch invariance, and the settings."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import worldtokens as wt
from worldtokens.tokenizers.audio.mel import Fbank, LogMel
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer

KINDS = {
    "whisper": {"preset": "whisper"},
    "whisper frames": {"preset": "whisper", "stem": "frames", "n_mels": 128},
    "whisper patches": {"preset": "whisper", "stem": "patches", "positions": "learned"},
    "whisper of fixed length": {"preset": "whisper", "seconds": 2.0, "config": {"fixed_length": True}},
    "ast": {"preset": "ast", "config": {"class_tokens": 2}},
    "ast without overlap": {"preset": "ast", "stride": 16, "positions": "sincos"},
    "ast of fixed length": {"preset": "ast", "config": {"fixed_length": True}},
    "ast conv": {"preset": "ast", "stem": "conv", "positions": "none"},
    "waveform": {"preset": "waveform", "config": {"conv_dim": 16}},
    "waveform with layer norms": {
        "preset": "waveform", "positions": "learned", "config": {"conv_dim": 16, "conv_norm": "layer"},
    },
    "waveform of fixed length": {
        "preset": "waveform", "seconds": 1.0, "config": {"conv_dim": 16, "fixed_length": True},
    },
}  # fmt: skip


def make(kind, dim=16):
    torch.manual_seed(0)
    return AudioTokenizer(dim, **KINDS[kind]).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_formula_gives_the_number_of_tokens(chirp, kind):
    """Every length to 1,300 samples and around one second, batch of one: mask and tensor have the same length."""
    tok = make(kind)
    step = 7 if kind == "ast of fixed length" else 1
    for n in (*range(1, 1300, step), *range(15_990, 16_410, 2 * step)):
        with torch.no_grad():
            tokens = tok(tok.collate([chirp(n)])) if n % 50 < 2 or n < 30 else None
        if tokens is not None:
            assert tokens.shape[1] == tok.length(n) == int(tokens.valid.sum()), n
        elif tok.spectrogram is not None and not tok.cfg.fixed_length:
            assert tok.features(torch.zeros(1, n))[1][0] == tok.spectrogram(torch.zeros(1, n), [n]).shape[1]
        else:
            assert tok.length(n) >= 1


def test_lengths_equal_the_published_formulas():
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    ref = Wav2Vec2Model(
        Wav2Vec2Config(hidden_size=8, num_hidden_layers=0, num_attention_heads=1, conv_dim=(4,) * 7, intermediate_size=8,
                       num_conv_pos_embedding_groups=1)
    )  # fmt: skip
    tok = AudioTokenizer(8, "waveform", config={"conv_dim": 4})
    n = torch.arange(400, 100_000)
    want = ref._get_feat_extract_output_lengths(n).tolist()
    assert [tok.length(i) for i in n.tolist()] == want
    assert tok.length(75_108) == 234
    mel, fbank = LogMel(), Fbank()
    assert [mel.frames(i) for i in (1, 7, 159, 160, 368, 799, 800, 801)] == [1, 1, 1, 1, 2, 4, 5, 5]
    assert [fbank.frames(i) for i in (1, 7, 400, 559, 560, 799, 800, 801)] == [1, 1, 1, 1, 2, 3, 3, 3]
    # the longest waveform of so many frames: one hop more is one frame more
    for front in (mel, fbank):
        for frames in (1, 2, 77):
            n = front.samples(frames)
            assert front.frames(n) == frames and front.frames(n + front.hop_length) == frames + 1


def test_positions_count_time_and_frequency(chirp):
    tok = AudioTokenizer(16, "ast", stride=16)
    tokens = tok(tok.collate([chirp(16_000)]))  # 98 frames: 7 columns of 8
    assert tokens.shape[1] == 56 and tokens.pos[0, 8 * 6 + 5].tolist() == [6, 5, 0]
    assert tok.token_seconds == 0.16
    assert AudioTokenizer(16).token_seconds == AudioTokenizer(16, "waveform").token_seconds == 0.02
    assert AudioTokenizer(16, stem="frames").token_seconds == 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_contract(chirp, kind):
    # a click in one second of silence, normalised to variance 1, exceeds the precision of bfloat16
    lengths = (
        (16_000, 9_000, 12_345)
        if kind == "waveform of fixed length"
        else (16_000, 1, 7, 368, 401, 801, 12_345)
    )
    samples = [(chirp(n, i).numpy(), 16000) for i, n in enumerate(lengths)]
    run = wt.testing.check_tokenizer(
        make(kind),
        samples,
        bad=["missing.wav", b"", (np.zeros(0), 16000), (np.full(9, np.nan), 16000)],
        tolerance=2e-5,
    )
    assert len(run) == 13


@pytest.mark.parametrize("kind", KINDS)
def test_values_in_the_padding_change_no_token(chirp, kind):
    """NaN in the padding of the waveform, and more padding, change no valid token."""
    tok = make(kind)
    batch = tok.collate([chirp(n, i) for i, n in enumerate((9_000, 100, 5_001))])
    with torch.no_grad():
        ref = tok(batch)
        padded = copy.copy(batch)
        padded["waveform"] = nn.functional.pad(batch["waveform"], (0, 777))
        for row, n in zip(padded["waveform"], batch["lengths"], strict=True):
            row[n:] = torch.nan
        got = tok(padded)
    assert torch.equal(got.valid, ref.valid)
    assert (got.x[ref.valid] - ref.x[ref.valid]).abs().max() < 1e-6


def test_half_precision_keeps_the_spectrogram_in_float32(chirp):
    """Only the layers are cast to bfloat16: waveform and filters stay float32."""
    tok = make("whisper")
    batch = tok.collate([chirp(16_000), chirp(9_000, 1)])
    ref, _ = tok.features(batch)
    half = copy.deepcopy(tok).to(torch.bfloat16)
    got, _ = half.features(
        batch.to(torch.bfloat16).pin_memory() if torch.cuda.is_available() else batch.to(torch.bfloat16)
    )
    assert torch.equal(got, ref)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tok.features(batch)[0], ref)


def test_silence_and_a_constant_are_finite_with_gradients(chirp):
    for kind in KINDS:
        tok = make(kind)
        tokens = tok(tok.collate([torch.zeros(5_000), torch.full((700,), 0.25), chirp(2_000)]))
        assert bool(tokens.x[tokens.valid].isfinite().all()), kind
        tokens.x[tokens.valid].square().mean().backward()
        assert all(bool(p.grad.isfinite().all()) for p in tok.parameters()), kind


def test_a_longer_waveform_starts_with_the_same_tokens(chirp):
    """Later samples do not change the first tokens where no statistics are taken over the whole waveform."""
    tok = make("ast conv")
    x = chirp(16_000)
    with torch.no_grad():
        a, b = tok(tok.collate([x])), tok(tok.collate([x[:8_000]]))
    assert (a.x[:, :20] - b.x[:, :20]).abs().max() < 1e-6


def test_plain_waveforms_and_batches_of_another_sampling_rate(chirp):
    tok = make("whisper")
    waveforms = torch.stack([chirp(4_000, i) for i in range(3)])
    with torch.no_grad():
        assert torch.equal(tok(waveforms).x, tok(tok.collate(list(waveforms))).x)
    other = AudioTokenizer(16, sample_rate=8000)
    with pytest.raises(wt.InputError, match="8000 Hz"):
        tok(other.collate(list(waveforms)))


def test_waveforms_are_cut_to_the_maximum_duration(chirp):
    tok = AudioTokenizer(16, seconds=1.0, positions="learned")
    assert tok.pos_embed.shape == (50, 1, 16)
    x = chirp(40_000)
    assert len(tok.read((x, 16000))) == 16_000
    with torch.no_grad():
        a, b = tok(tok.collate([x])), tok(tok.collate([x[:16_000]]))
        assert a.shape[1] == 50 and torch.equal(a.x, b.x) and torch.equal(tok(x[None]).x, b.x)


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "mel"}, {"sample_rate": 0}, {"sample_rate": 44.1}, {"sample_rate": True}, {"seconds": 0}, {"seconds": "all"},
        {"seconds": None, "config": {"fixed_length": True}}, {"seconds": None, "positions": "learned"}, {"positions": "cosine"},
        {"stem": "wave"}, {"preset": "waveform", "stem": "conv"}, {"stem": "patches", "patch": 24},
        {"stem": "patches", "patch": 16, "stride": 20}, {"stem": "patches", "patch": (16, 200)}, {"n_mels": 0},
        {"preset": "waveform", "config": {"conv_norm": "batch"}}, {"dim": 0}, {"dim": 1}, {"seconds": float("nan")},
        {"config": {"class_tokens": -1}}, {"config": {"width": 16}}, {"config": 16},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_settings_raise(settings):
    with pytest.raises(wt.InputError):
        AudioTokenizer(**{"dim": 16, **settings})


def test_errors_name_the_row_that_is_no_waveform(chirp):
    tok = make("whisper")
    for bad, message in (
        (torch.zeros(0), "has no samples"),
        (torch.zeros(2, 5), r"\(2, 5\)"),
        (torch.zeros(5, dtype=torch.int16), "int16"),
        (np.zeros(5), "ndarray"),
    ):
        with pytest.raises(wt.InputError, match=f"waveform 1 .*{message}"):
            tok.collate([chirp(100), bad])
    with pytest.raises(wt.InputError, match="no waveform"):
        tok.collate([])
    with pytest.raises(wt.InputError, match="no spectrogram"):
        make("waveform").features(torch.zeros(1, 500))


def test_settings_are_saved_with_the_model(tmp_path):
    config = wt.AudioConfig(class_tokens=2, fixed_length=True)
    tok = AudioTokenizer(16, "ast", sample_rate=8000, seconds=1.0, config=config)
    assert tok.config()["args"]["config"] == dataclasses.asdict(config)
    tok.save(tmp_path)
    loaded = wt.load(tmp_path)
    assert loaded.cfg == config and loaded.sample_rate == 8000
    waveform = torch.randn(1, 5000)
    assert torch.equal(loaded(waveform).x, tok.eval()(waveform).x)
