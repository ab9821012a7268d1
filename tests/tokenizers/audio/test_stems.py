"""Stems equal the published layers, and patches cover every frame."""

import numpy as np
import pytest
import torch
from torch import nn

from worldtokens.tokenizers.audio.stems import PatchStem
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer


def test_whisper_stem_equals_the_published_layers(chirp):
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
    tok = AudioTokenizer(24, config={"fixed_length": True})
    tok.stem.load_state_dict({k: v for k, v in ref.state_dict().items() if k.startswith("conv")})
    batch = tok.collate([chirp(20_000), chirp(480_000, 1)])
    got = tok(batch)
    assert got.shape == (2, 1500, 24) and bool(got.valid.all())
    with torch.no_grad():
        features = tok.features(batch)[0].mT
        want = nn.functional.gelu(ref.conv2(nn.functional.gelu(ref.conv1(features)))).mT
    # a sine of angles up to 1,500 is worth 1e-4 in float32; measured 3e-5
    assert (got.x - (want + ref.embed_positions.weight)).abs().max() < 1e-4


def test_ast_tokens_equal_the_published_layers(chirp):
    """The published order is frequency first, ours time first."""
    from transformers import ASTConfig
    from transformers.models.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer import (
        ASTEmbeddings,
    )

    torch.manual_seed(0)
    ref = ASTEmbeddings(ASTConfig(hidden_size=24)).eval()
    for p in ref.parameters():
        nn.init.normal_(p, std=0.1)
    tok = AudioTokenizer(24, "ast", config={"fixed_length": True, "class_tokens": 2})
    table = ref.position_embeddings.detach()[0]
    with torch.no_grad():
        tok.stem.conv.weight.copy_(ref.patch_embeddings.projection.weight.mT)
        tok.stem.conv.bias.copy_(ref.patch_embeddings.projection.bias)
        tok.pos_embed.copy_(table[2:].unflatten(0, (12, 101)).transpose(0, 1))
        tok.class_embed.copy_(torch.cat([ref.cls_token, ref.distillation_token], 1) + table[:2])
        batch = tok.collate([chirp(75_108), chirp(164_080, 1)])
        got, want = tok(batch), ref(tok.features(batch)[0])
    assert got.shape == (2, 1214, 24)
    by_time = want[:, 2:].unflatten(1, (12, 101)).transpose(1, 2).flatten(1, 2)
    assert (got.x[:, 2:] - by_time).abs().max() < 1e-5 and (got.x[:, :2] - want[:, :2]).abs().max() < 1e-6
    assert got.pos[0, 2 + 12 * 5 + 3].tolist() == [5, 3, 0]


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_waveform_tokens_equal_wav2vec2(chirp, norm):
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
    tok = AudioTokenizer(24, "waveform", positions="none", config={"conv_dim": 16, "conv_norm": norm})
    with torch.no_grad():
        for ours, ref in zip(tok.stem.convs, convs.conv_layers, strict=True):
            ours.load_state_dict(ref.conv.state_dict())
        norms = [ref.layer_norm for ref in convs.conv_layers if hasattr(ref, "layer_norm")]
        for ours, ref in zip(tok.stem.norms, norms, strict=True):
            ours.load_state_dict(ref.state_dict())
        tok.stem.norm.load_state_dict(last.layer_norm.state_dict())
        tok.stem.proj.load_state_dict(last.projection.state_dict())
        waveforms = [chirp(n, i) + 0.1 for i, n in enumerate((16_000, 4_321, 400))]
        got = tok(tok.collate(waveforms))
        extract = Wav2Vec2FeatureExtractor(do_normalize=True)
        for row, x in enumerate(
            waveforms
        ):  # the published batch includes padding in the group norm, so one by one
            values = torch.tensor(np.array(extract(x.numpy(), sampling_rate=16000)["input_values"]))
            want = last(convs(values).mT)[0][0]
            ours = got.x[row][got.valid[row]]
            assert ours.shape == want.shape
            assert (ours - want).abs().max() < 2e-5 * want.abs().max()


def test_patches_cover_every_frame(chirp):
    stem = PatchStem(80, 8, (16, 16), (16, 16), drop_last=False, pad_value=0.0)
    assert [stem.grid(n)[0] for n in (1, 15, 16, 17, 32, 33)] == [1, 1, 1, 2, 2, 3]
    stem = PatchStem(128, 8, (16, 16), (10, 10), drop_last=True, pad_value=0.0)
    assert stem.grid(1024) == (101, 12)  # AST's published grid
    # the last frame reaches a token
    torch.manual_seed(0)
    tok = AudioTokenizer(16, stem="patches", positions="learned")
    x = chirp(17 * 160)
    y = x.clone()
    y[-100:] += 0.5
    a, b = tok(tok.collate([x])), tok(tok.collate([y]))
    assert a.shape[1] == 2 * 5 and (a.x - b.x)[0, 5:].abs().max() > 1e-3


@pytest.mark.parametrize("patch", [(6, 40), (4, 20), (16, 16), (6, 32)])
def test_patches_in_bfloat16_are_close_to_those_in_float32(patch):
    """As a one-channel convolution they were wrong by 1e37 for some widths on a CPU."""
    torch.manual_seed(0)
    n_mels = 40 if patch[1] != 16 else 32
    front = AudioTokenizer(
        128, stem="patches", patch=patch, stride=patch, n_mels=n_mels if patch[1] != 32 else 32
    )
    for k in range(6):
        waveform = torch.randn(8, 16000 + 2000 * k) * 0.1
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            half = front(waveform).x.float()
        with torch.no_grad():
            assert (half - front(waveform).x).abs().max() < 0.05
