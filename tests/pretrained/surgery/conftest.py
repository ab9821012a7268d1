"""Fixtures of the surgery tests: small models with random weights, and saving and loading."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import worldtokens as wt
from worldtokens.testing import randomised

TEXTS = ["a cat sat on the mat", "the quick brown fox jumps over the lazy dog", "cats and dogs"]


def text_tokenizer(**settings) -> wt.TextTokenizer:
    return wt.TextTokenizer.train(TEXTS * 3, 330, dim=24, context=16, start="<s>", **settings)


@pytest.fixture(scope="session")
def make_text() -> Callable[..., wt.TextTokenizer]:
    """Builds a text front-end of 330 tokens and 16 positions."""
    return text_tokenizer


@pytest.fixture(scope="session")
def make_classifier() -> Callable[..., wt.Classifier]:
    """Builds an image classifier with class token, registers and drop path."""

    def make(patch=8, size=(32, 24), **settings) -> wt.Classifier:
        front = wt.ImageTokenizer(24, patch=patch, size=size, class_token=True, registers=2, **settings)
        return randomised(wt.Classifier(front, wt.Transformer(24, 2, 4, drop_path=0.5), 5))

    return make


@pytest.fixture(scope="session")
def make_clip() -> Callable[..., wt.CLIP]:
    """Builds a CLIP of images and text."""

    def make() -> wt.CLIP:
        fronts = {"image": wt.ImageTokenizer(24, patch=8, size=32), "text": text_tokenizer()}
        return randomised(wt.CLIP(fronts, wt.Transformer(24, 1, 4), dim=16))

    return make


@pytest.fixture(scope="session")
def reload() -> Callable[..., wt.Part]:
    """Saves a model and loads it."""
    return lambda model, folder: wt.load(model.save(folder))
