"""Fixtures of the classification tests: a small image classifier, labelled emoji, sources of other modalities."""

import numpy as np
import pytest
import torch

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.data.sets import motion

ROWS = samples.open("emoji", split="validation")[:24]
NAMES = ["face", "animal", "food"]


@pytest.fixture(scope="session")
def emoji_rows():
    return ROWS


@pytest.fixture(scope="session")
def class_names():
    return NAMES


@pytest.fixture(scope="session")
def make_classifier():
    """Builds a seeded image classifier of three classes."""

    def make(classes=NAMES, column=None, **options):
        torch.manual_seed(0)
        front = wt.ImageTokenizer(
            dim=32, patch=8, size=32, class_token=True, registers=2, preprocess={"draft": False}
        )
        return wt.Classifier(
            front if column is None else {column: front}, wt.Transformer(32, 2, 2), classes, **options
        )

    return make


@pytest.fixture(scope="session")
def labelled_rows():
    """Builds n emoji rows whose classes repeat in order."""

    def rows(n=8):
        return [{"image": r["image"], "label": NAMES[i % 3]} for i, r in enumerate(ROWS[:n])]

    return rows


@pytest.fixture(scope="session")
def collate():
    """Reads and collates rows."""
    return lambda model, rows: model.collate([model.read(r) for r in rows])


@pytest.fixture(scope="session")
def make_sources():
    """Builds a tokenizer of audio, video or points, and sources of different lengths for it."""

    def sources(modality):
        if modality == "audio":
            tokenizer = wt.AudioTokenizer(32, sample_rate=8000, n_mels=20, seconds=1.0)
            lengths = [(4000, 0.1), (900, 0.4), (7, 0.2), (8000, 0.9)]
            return tokenizer, [(np.sin(np.arange(n) * f).astype("float32"), 8000) for n, f in lengths]
        if modality == "video":
            videos = motion.open_motion("test", "emoji")
            tokenizer = wt.VideoTokenizer(32, tubelet=(2, 8, 8), frames=8, size=None)
            return tokenizer, [videos[i]["video"][:t] for i, t in enumerate((16, 5, 2))]
        torch.manual_seed(3)
        clouds = [torch.randn(n, 3).double() for n in (100, 5, 40)]
        return wt.PointTokenizer(32, points=64, patches=8, neighbours=4, hidden=(8, 8, 8)), clouds

    return sources
