"""Sounds to tokens: the published front-ends' numbers, one length formula, padding and batch mates that change nothing."""

import copy

import numpy as np
import pytest
import torch
import torchaudio
from torch import nn

import worldtokens as wt
from worldtokens.tokenizers.audio.mel import Fbank, LogMel
from worldtokens.tokenizers.audio.stems import PatchStem
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer

KINDS = {
    "whisper": {"preset": "whisper"},
    "whisper frames": {"preset": "whisper", "stem": "frames", "n_mels": 128},
    "whisper patches": {"preset": "whisper", "stem": "patches", "positions": "learned"},
    "whisper of 30 s": {"preset": "whisper", "fixed": True, "seconds": 2.0},
    "ast": {"preset": "ast", "class_tokens": 2},
    "ast without overlap": {"preset": "ast", "stride": 16, "positions": "sincos"},
    "ast of 10.24 s": {"preset": "ast", "fixed": True},
    "ast conv": {"preset": "ast", "stem": "conv", "positions": "none"},
    "wave": {"preset": "waveform", "width": 16},
    "wave with layer norms": {"preset": "waveform", "width": 16, "norm": "layer", "positions": "learned"},
    "wave of 1 s": {"preset": "waveform", "width": 16, "fixed": True, "seconds": 1.0},
}


def sound(samples, seed=0):
    """Something with a spectrum: a gliding tone in noise."""
    t = torch.arange(samples) / 16000
    noise = torch.randn(samples, generator=torch.Generator().manual_seed(seed))
    return 0.3 * torch.sin(2 * torch.pi * (200 + 50 * seed + 400 * t) * t) + 0.02 * noise


def make(kind, dim=16):
    torch.manual_seed(0)
    return AudioTokenizer(dim, **KINDS[kind]).eval()


# ---- the published numbers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf_whisper():
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor()


@pytest.mark.parametrize("samples", [201, 799, 800, 801, 75_108, 479_900, 480_000, 500_000])
def test_whisper_features_equal_the_published_ones(hf_whisper, samples):
    """Measured 4e-5 at most from its torch form and 6e-5 from its numpy form, as those two are from each other."""
    x = sound(samples)
    tok = AudioTokenizer(8, fixed=True)
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


def test_whisper_features_with_128_bands_and_of_silence(hf_whisper):
    from transformers import WhisperFeatureExtractor

    x = sound(30_000)
    tok = AudioTokenizer(8, n_mels=128, fixed=True)
    ref = WhisperFeatureExtractor(feature_size=128)(x.numpy(), sampling_rate=16000)["input_features"]
    assert np.abs(tok.features(tok.collate([x]))[0].mT.numpy() - ref).max() < 2e-5
    # log10 of the floor 1e-10 is -10, (-10 + 4) / 4 = -1.5
    got, _ = AudioTokenizer(8).features(torch.zeros(2, 1000))
    assert got.shape == (2, 6, 80) and bool((got == -1.5).all())


@pytest.mark.parametrize("samples", [400, 559, 560, 75_108, 164_080, 200_000])
def test_ast_features_equal_the_published_ones(samples):
    """Measured 2e-7 at most."""
    from transformers import ASTFeatureExtractor

    x = sound(samples)
    tok = AudioTokenizer(8, "ast", fixed=True)
    got, counts = tok.features(tok.collate([x]))
    ref = ASTFeatureExtractor()(x.numpy(), sampling_rate=16000)["input_values"][0]
    assert counts == (1024,) and np.abs(got[0].numpy() - ref).max() < 1e-5
    own = AudioTokenizer(8, "ast", seconds=None, positions="none")
    got, counts = own.features(own.collate([x]))
    ref = torchaudio.compliance.kaldi.fbank(x[None], window_type="hanning", num_mel_bins=128)
    assert counts == (len(ref),) and (got[0] - (ref + 4.2677393) / (2 * 4.5689974)).abs().max() < 1e-5


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_kaldis_own_fbank_with_16_bit_numbers(rate):
    x = sound(rate)
    front = Fbank(rate, 23, window="povey", scale=32768.0, mean=0.0, std=0.5)
    ref = torchaudio.compliance.kaldi.fbank(x[None] * 32768, sample_frequency=rate)
    got = front(x[None], [rate])[0]
    assert got.shape == ref.shape and (got - ref).abs().max() < 2e-4  # values up to 25


def test_whisper_stem_equals_the_published_layers():
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    ref = WhisperEncoder(
        WhisperConfig(
            d_model=24,
            encoder_layers=0,
            encoder_attention_heads=2,
            encoder_ffn_dim=24,
            max_source_positions=1500,
        )
    ).eval()
    tok = AudioTokenizer(24, fixed=True)
    tok.stem.load_state_dict({k: v for k, v in ref.state_dict().items() if k.startswith("conv")})
    batch = tok.collate([sound(20_000), sound(480_000, 1)])
    got = tok(batch)
    assert got.shape == (2, 1500, 24) and bool(got.valid.all())
    with torch.no_grad():
        features = tok.features(batch)[0].mT
        want = nn.functional.gelu(ref.conv2(nn.functional.gelu(ref.conv1(features)))).mT
    # a sine of angles up to 1,500 is worth 1e-4 in float32; measured 3e-5
    assert (got.x - (want + ref.embed_positions.weight)).abs().max() < 1e-4


def test_ast_tokens_equal_the_published_layers():
    """The published order is frequency first, ours time first."""
    from transformers import ASTConfig
    from transformers.models.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer import (
        ASTEmbeddings,
    )

    torch.manual_seed(0)
    ref = ASTEmbeddings(ASTConfig(hidden_size=24)).eval()
    for p in ref.parameters():
        nn.init.normal_(p, std=0.1)
    tok = AudioTokenizer(24, "ast", fixed=True, class_tokens=2)
    table = ref.position_embeddings.detach()[0]
    with torch.no_grad():
        tok.stem.conv.weight.copy_(ref.patch_embeddings.projection.weight.mT)
        tok.stem.conv.bias.copy_(ref.patch_embeddings.projection.bias)
        tok.pos_embed.copy_(table[2:].unflatten(0, (12, 101)).transpose(0, 1))
        tok.class_embed.copy_(torch.cat([ref.cls_token, ref.distillation_token], 1) + table[:2])
        batch = tok.collate([sound(75_108), sound(164_080, 1)])
        got, want = tok(batch), ref(tok.features(batch)[0])
    assert got.shape == (2, 1214, 24)
    turned = want[:, 2:].unflatten(1, (12, 101)).transpose(1, 2).flatten(1, 2)
    assert (got.x[:, 2:] - turned).abs().max() < 1e-5 and (got.x[:, :2] - want[:, :2]).abs().max() < 1e-6
    assert got.pos[0, 2 + 12 * 5 + 3].tolist() == [5, 3, 0]


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_wave_tokens_equal_wav2vec2(norm):
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor
    from transformers.models.wav2vec2.modeling_wav2vec2 import (
        Wav2Vec2FeatureEncoder,
        Wav2Vec2FeatureProjection,
    )

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=24,
        conv_dim=(16,) * 7,
        feat_extract_norm=norm,
        conv_bias=norm == "layer",
        feat_proj_dropout=0.0,
    )
    convs, last = Wav2Vec2FeatureEncoder(config).eval(), Wav2Vec2FeatureProjection(config).eval()
    for p in (*convs.parameters(), *last.parameters()):
        nn.init.normal_(p, std=0.3)
    tok = AudioTokenizer(24, "waveform", width=16, norm=norm, positions="none")
    with torch.no_grad():
        for mine, ref in zip(tok.stem.convs, convs.conv_layers, strict=True):
            mine.load_state_dict(ref.conv.state_dict())
        norms = [ref.layer_norm for ref in convs.conv_layers if hasattr(ref, "layer_norm")]
        for mine, ref in zip(tok.stem.norms, norms, strict=True):
            mine.load_state_dict(ref.state_dict())
        tok.stem.norm.load_state_dict(last.layer_norm.state_dict())
        tok.stem.proj.load_state_dict(last.projection.state_dict())
        sounds = [sound(n, i) + 0.1 for i, n in enumerate((16_000, 4_321, 400))]
        got = tok(tok.collate(sounds))
        extract = Wav2Vec2FeatureExtractor(do_normalize=True)
        for row, x in enumerate(
            sounds
        ):  # the published batch lets padding into the group norm, so one by one
            values = torch.tensor(np.array(extract(x.numpy(), sampling_rate=16000)["input_values"]))
            want = last(convs(values).mT)[0][0]
            mine = got.x[row][got.valid[row]]
            assert mine.shape == want.shape
            assert (mine - want).abs().max() < 2e-5 * want.abs().max()


# ---- lengths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_length_has_as_many_tokens_as_its_formula_says(kind):
    """Every length to 1,300 samples and each around a second, alone: the mask and the tensor are of one length."""
    tok = make(kind)
    step = 7 if kind == "ast of 10.24 s" else 1
    for n in (*range(1, 1300, step), *range(15_990, 16_410, 2 * step)):
        with torch.no_grad():
            tokens = tok(tok.collate([sound(n)])) if n % 50 < 2 or n < 30 else None
        if tokens is not None:
            assert tokens.shape[1] == tok.length(n) == int(tokens.valid.sum()), n
        elif tok.front is not None and not tok.fixed:
            assert tok.features(torch.zeros(1, n))[1][0] == tok.front(torch.zeros(1, n), [n]).shape[1]
        else:
            assert tok.length(n) >= 1


def test_lengths_equal_the_published_formulas():
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    ref = Wav2Vec2Model(
        Wav2Vec2Config(hidden_size=8, num_hidden_layers=0, num_attention_heads=1, conv_dim=(4,) * 7, intermediate_size=8,
                       num_conv_pos_embedding_groups=1)
    )  # fmt: skip
    tok = AudioTokenizer(8, "waveform", width=4)
    n = torch.arange(400, 100_000)
    want = ref._get_feat_extract_output_lengths(n).tolist()
    assert [tok.length(i) for i in n.tolist()] == want
    assert tok.length(75_108) == 234
    mel, fbank = LogMel(), Fbank()
    assert [mel.frames(i) for i in (1, 7, 159, 160, 368, 799, 800, 801)] == [1, 1, 1, 1, 2, 4, 5, 5]
    assert [fbank.frames(i) for i in (1, 7, 400, 559, 560, 799, 800, 801)] == [1, 1, 1, 1, 2, 3, 3, 3]
    # the longest sound of so many frames: one sample more is a frame more
    for front in (mel, fbank):
        for frames in (1, 2, 77):
            n = front.samples(frames)
            assert front.frames(n) == frames and front.frames(n + front.hop_length) == frames + 1


def test_patches_cover_every_frame():
    stem = PatchStem(80, 8, (16, 16), (16, 16), whole=False, blank=0.0)
    assert [stem.grid(n)[0] for n in (1, 15, 16, 17, 32, 33)] == [1, 1, 1, 2, 2, 3]
    stem = PatchStem(128, 8, (16, 16), (10, 10), whole=True, blank=0.0)
    assert stem.grid(1024) == (101, 12)  # AST's published grid
    # the last frame reaches a token
    tok = make("whisper patches")
    x = sound(17 * 160)
    y = x.clone()
    y[-100:] += 0.5
    a, b = tok(tok.collate([x])), tok(tok.collate([y]))
    assert a.shape[1] == 2 * 5 and (a.x - b.x)[0, 5:].abs().max() > 1e-3


def test_positions_count_time_and_frequency():
    tok = AudioTokenizer(16, "ast", stride=16)
    tokens = tok(tok.collate([sound(16_000)]))  # 98 frames: 7 columns of 8
    assert tokens.shape[1] == 56 and tokens.pos[0, 8 * 6 + 5].tolist() == [6, 5, 0]
    assert tok.token_seconds == 0.16
    assert AudioTokenizer(16).token_seconds == AudioTokenizer(16, "waveform").token_seconds == 0.02
    assert AudioTokenizer(16, stem="frames").token_seconds == 0.01


# ---- invariances -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_of_front_ends(kind):
    # a click in a second of silence, brought to variance 1, is beyond bfloat16
    lengths = (16_000, 9_000, 12_345) if kind == "wave of 1 s" else (16_000, 1, 7, 368, 401, 801, 12_345)
    sounds = [(sound(n, i).numpy(), 16000) for i, n in enumerate(lengths)]
    run = wt.testing.check_tokenizer(
        make(kind),
        sounds,
        bad=["missing.wav", b"", (np.zeros(0), 16000), (np.full(9, np.nan), 16000)],
        tolerance=2e-5,
    )
    assert len(run) == 13


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_behind_a_sound_changes_nothing(kind):
    """NaN in the padding of the wave, and more of it, move no real token."""
    tok = make(kind)
    batch = tok.collate([sound(n, i) for i, n in enumerate((9_000, 100, 5_001))])
    with torch.no_grad():
        ref = tok(batch)
        spoiled = copy.copy(batch)
        spoiled["wave"] = nn.functional.pad(batch["wave"], (0, 777))
        for row, n in zip(spoiled["wave"], batch["lengths"], strict=True):
            row[n:] = torch.nan
        got = tok(spoiled)
    assert torch.equal(got.valid, ref.valid)
    assert (got.x[ref.valid] - ref.x[ref.valid]).abs().max() < 1e-6


def test_half_precision_keeps_the_spectrum():
    """Only the layers go to bfloat16: the wave and the filters stay as they are."""
    tok = make("whisper")
    batch = tok.collate([sound(16_000), sound(9_000, 1)])
    ref, _ = tok.features(batch)
    half = copy.deepcopy(tok).to(torch.bfloat16)
    got, _ = half.features(
        batch.to(torch.bfloat16).pin_memory() if torch.cuda.is_available() else batch.to(torch.bfloat16)
    )
    assert torch.equal(got, ref)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tok.features(batch)[0], ref)


def test_silence_and_a_constant_are_finite_with_gradients():
    for kind in KINDS:
        tok = make(kind)
        tokens = tok(tok.collate([torch.zeros(5_000), torch.full((700,), 0.25), sound(2_000)]))
        assert bool(tokens.x[tokens.valid].isfinite().all()), kind
        tokens.x[tokens.valid].square().mean().backward()
        assert all(bool(p.grad.isfinite().all()) for p in tok.parameters()), kind


def test_a_longer_sound_starts_with_the_same_tokens():
    """What comes much later does not reach the first tokens, where nothing is normalised over the whole."""
    tok = make("ast conv")
    x = sound(16_000)
    with torch.no_grad():
        a, b = tok(tok.collate([x])), tok(tok.collate([x[:8_000]]))
    assert (a.x[:, :20] - b.x[:, :20]).abs().max() < 1e-6


def test_plain_waves_and_batches_of_another_rate():
    tok = make("whisper")
    waves = torch.stack([sound(4_000, i) for i in range(3)])
    with torch.no_grad():
        assert torch.equal(tok(waves).x, tok(tok.collate(list(waves))).x)
    other = AudioTokenizer(16, rate=8000)
    with pytest.raises(wt.InputError, match="8000 Hz"):
        tok(other.collate(list(waves)))


def test_cut_to_the_longest_sound():
    tok = AudioTokenizer(16, seconds=1.0, positions="learned")
    assert tok.pos_embed.shape == (50, 1, 16)
    x = sound(40_000)
    assert len(tok.read((x, 16000))) == 16_000
    with torch.no_grad():
        a, b = tok(tok.collate([x])), tok(tok.collate([x[:16_000]]))
        assert a.shape[1] == 50 and torch.equal(a.x, b.x) and torch.equal(tok(x[None]).x, b.x)


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "mel"}, {"rate": 0}, {"rate": 44.1}, {"rate": True}, {"seconds": 0}, {"seconds": "all"},
        {"seconds": None, "fixed": True}, {"seconds": None, "positions": "learned"}, {"positions": "cosine"},
        {"stem": "wave"}, {"preset": "waveform", "stem": "conv"}, {"stem": "patches", "patch": 24},
        {"stem": "patches", "patch": 16, "stride": 20}, {"stem": "patches", "patch": (16, 200)}, {"n_mels": 0},
        {"preset": "waveform", "norm": "batch"}, {"dim": 0}, {"dim": 1}, {"class_tokens": -1}, {"seconds": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(wt.InputError):
        AudioTokenizer(**{"dim": 16, **settings})


def test_rows_that_are_no_sound_are_named():
    tok = make("whisper")
    for bad, words in (
        (torch.zeros(0), "holds no sample"),
        (torch.zeros(2, 5), r"\(2, 5\)"),
        (torch.zeros(5, dtype=torch.int16), "int16"),
        (np.zeros(5), "ndarray"),
    ):
        with pytest.raises(wt.InputError, match=f"sound 1 .*{words}"):
            tok.collate([sound(100), bad])
    with pytest.raises(wt.InputError, match="no sound"):
        tok.collate([])
    with pytest.raises(wt.InputError, match="no spectrum"):
        make("wave").features(torch.zeros(1, 500))


@pytest.mark.parametrize("patch", [(6, 40), (4, 20), (16, 16), (6, 32)])
def test_patches_in_bfloat16_are_near_those_in_float32(patch):
    """As a convolution of one channel they were wrong by 1e37 for some widths on a CPU."""
    torch.manual_seed(0)
    n_mels = 40 if patch[1] != 16 else 32
    front = wt.AudioTokenizer(
        128, stem="patches", patch=patch, stride=patch, n_mels=n_mels if patch[1] != 32 else 32
    )
    for k in range(6):
        wave = torch.randn(8, 16000 + 2000 * k) * 0.1
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            half = front(wave).x.float()
        with torch.no_grad():
            assert (half - front(wave).x).abs().max() < 0.05
