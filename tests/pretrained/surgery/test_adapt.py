"""Image weights for audio and video front-ends: outputs equal those of the image model on the same pixels."""

from __future__ import annotations

import math

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from torch import nn

import worldtokens as wt
from worldtokens.testing import randomised


class FixedSpectrogram(nn.Module):
    """Replaces the mel filter bank: returns a given spectrogram."""

    hop_length, pad_value = 160, 0.0

    def __init__(self, spectrogram: torch.Tensor) -> None:
        super().__init__()
        self.spectrogram = spectrogram

    def forward(self, waveform, lengths):
        return self.spectrogram

    def frames(self, samples: int) -> int:
        return self.spectrogram.shape[1]


@pytest.mark.parametrize("channels", ["sum", "mean"])
def test_a_spectrogram_gives_the_tokens_of_a_grey_image(channels):
    """A grey image through the three-channel kernel and the same values as a spectrogram give equal logits. Frequency runs
    down the image, time to the right; AST sums the three channels."""
    front = wt.ImageTokenizer(24, patch=8, size=(32, 48), class_token=True)
    vit = randomised(wt.Classifier(front, wt.Transformer(24, 2, 4), 5))
    audio = wt.AudioTokenizer(
        24, preset="ast", n_mels=32, patch=8, stride=8, seconds=0.48, config={"class_tokens": 1}
    )
    assert wt.adapt_tokenizer(front, audio, channels) is audio
    model = wt.Classifier(audio, vit.trunk, 5, pool="first").eval()
    model.head.load_state_dict(vit.head.state_dict())
    grey = torch.randn(2, 1, 32, 48, generator=torch.Generator().manual_seed(4))
    audio.spectrogram, audio.max_samples = FixedSpectrogram(grey[:, 0].mT), None
    x = grey.expand(-1, 3, -1, -1) / (1 if channels == "sum" else 3)
    with torch.no_grad():
        want = vit({"image": x})
        found = model({"audio": torch.zeros(2, 7680)})
    assert audio.pos_embed.shape[:2] == (6, 4)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)


def test_audio_through_an_image_trunk_trains():
    """A ViT at AST's settings: the 14 x 14 positions are interpolated to 12 x 101, and gradients flow."""
    front = wt.ImageTokenizer(24, patch=16, size=224, class_token=True)
    vit = randomised(wt.Classifier(front, wt.Transformer(24, 1, 4), 5))
    audio = wt.adapt_tokenizer(
        front, wt.AudioTokenizer(24, preset="ast", config={"class_tokens": 2, "fixed_length": True})
    )
    want = resample_abs_pos_embed(front.pos_embed.detach().flatten(0, 1)[None], [12, 101], [14, 14], 0)
    torch.testing.assert_close(
        audio.pos_embed.transpose(0, 1).flatten(0, 1)[None].detach(), want, atol=1e-5, rtol=0
    )
    assert torch.equal(audio.class_embed[0, 0], front.class_token[0, 0])
    assert not torch.equal(audio.class_embed[0, 1], front.class_token[0, 0])
    model = wt.Classifier(audio, vit.trunk, 3)
    t = torch.arange(16000) / 16000
    batch = {"audio": audio.collate([torch.sin(2 * math.pi * 440 * t)]), "label": torch.tensor([1])}
    loss = model.loss(batch)["loss"]
    loss.backward()
    assert torch.isfinite(loss) and model.trunk.blocks[0].attn.qkv.weight.grad.abs().sum() > 0


def test_a_still_video_gives_the_tokens_of_its_image():
    front = wt.ImageTokenizer(24, patch=8, size=32, positions="learned", preprocess={"draft": False})
    video = wt.VideoTokenizer(24, tubelet=(2, 8, 8), frames=4, size=32, mean=front.mean, std=front.std)
    wt.adapt_tokenizer(randomised(front), video)
    raw = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        still = video(video.collate([raw.expand(4, -1, -1, -1)]))
        image = front(front.collate([raw]))
    torch.testing.assert_close(still.x[0, :16], image.x[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(still.x[0, 16:], image.x[0], atol=1e-4, rtol=0)


def test_front_ends_that_cannot_be_adapted():
    front = wt.ImageTokenizer(24, patch=8, size=32)
    with pytest.raises(wt.InputError, match="of dim 24, the new ones of dim 32"):
        wt.adapt_tokenizer(front, wt.AudioTokenizer(32, preset="ast"))
    with pytest.raises(wt.InputError, match="AudioTokenizer without patches"):
        wt.adapt_tokenizer(front, wt.AudioTokenizer(24, preset="whisper"))
    with pytest.raises(wt.InputError, match="a SeriesTokenizer cannot"):
        wt.adapt_tokenizer(front, wt.SeriesTokenizer(24))
