"""Fixtures of the contrastive tests: small CLIP models, rows of emoji and of three columns."""

import pytest
import torch

import worldtokens as wt
from worldtokens.data import samples

EMOJI_ROWS = samples.open("emoji", split="validation")[:24]


def build_clip(shared=True, loss="clip", context=None, **options):
    torch.manual_seed(0)
    dim = 32
    tokenizers = {
        "image": wt.ImageTokenizer(dim=dim, patch=16, size=32),
        "text": wt.TextTokenizer.clip(dim=dim, **({"context": context} if context else {})),
    }
    trunk = lambda: wt.Transformer(dim, 2, 2)  # noqa: E731
    return wt.CLIP(
        tokenizers, trunk() if shared else {k: trunk() for k in tokenizers}, 16, loss=loss, **options
    )


def build_trimodal_clip(**options):
    torch.manual_seed(0)
    dim = 16
    tokenizers = {
        "image": wt.ImageTokenizer(dim=dim, patch=16, size=32),
        "text": wt.TextTokenizer.clip(dim=dim, context=16),
        "audio": wt.AudioTokenizer(
            dim=dim, stem="patches", n_mels=16, patch=(8, 16), seconds=1.0, positions="sincos"
        ),
    }
    return wt.CLIP(tokenizers, wt.Transformer(dim, 1, 2), dim=8, **options)


def build_trimodal_rows(n):
    beep = lambda i: (torch.sin(torch.arange(4000) * 0.02 * (i + 1)), 16000)  # noqa: E731
    return [
        {"image": r["image"], "text": r["text"][0], "audio": beep(i)} for i, r in enumerate(EMOJI_ROWS[:n])
    ]


def collate_rows(model, rows):
    return model.collate([model.read(r) for r in rows])


@pytest.fixture(scope="session")
def emoji_rows():
    return EMOJI_ROWS


@pytest.fixture(scope="session")
def image_text_rows():
    """Builds n rows of an image and its first caption."""
    return lambda n: [{"image": r["image"], "text": r["text"][0]} for r in EMOJI_ROWS[:n]]


@pytest.fixture(scope="session")
def make_clip():
    """Builds an image-text CLIP: one shared trunk or one each, seeded."""
    return build_clip


@pytest.fixture(scope="session")
def make_trimodal_clip():
    """Builds a CLIP of image, text and audio, seeded."""
    return build_trimodal_clip


@pytest.fixture(scope="session")
def trimodal_rows():
    """Builds n rows of image, text and audio."""
    return build_trimodal_rows


@pytest.fixture(scope="session")
def collate():
    """Reads and collates rows."""
    return collate_rows


@pytest.fixture(scope="module")
def model():
    return build_clip().eval()
