"""Fixtures that the tests of several sources share: images as PIL, a chat vocabulary, tiny decoders with random weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tokenizers
import transformers
from PIL import Image
from torch import nn
from transformers import AutoModelForCausalLM

import worldtokens as wt
from worldtokens import testing
from worldtokens.data import samples


@pytest.fixture(scope="session")
def to_pil() -> Callable[..., Image.Image]:
    """An image file as PIL, decoded by our reader: emoji on white. ``convert("RGB")`` would uncover transparent pixels."""
    front = wt.ImageTokenizer(dim=8, preprocess={"draft": False})

    def convert(source) -> Image.Image:
        return Image.fromarray(np.ascontiguousarray(front.read(source).permute(1, 2, 0).numpy()))

    return convert


@pytest.fixture(scope="session")
def emoji_texts() -> list[str]:
    """Names and keywords of 200 emoji."""
    return [c for r in samples.open("emoji", split="validation")[:200] for c in r["text"]]


@pytest.fixture(scope="session")
def prompts(emoji_texts) -> list[str]:
    """Four prompts of different lengths."""
    return ["a", emoji_texts[3], emoji_texts[7] + ", " + emoji_texts[11], emoji_texts[20]]


@pytest.fixture(scope="session")
def chat_vocabulary(emoji_texts) -> tokenizers.Tokenizer:
    """Byte-level BPE of 500 tokens with an end token and two roles."""
    specials = ["<|user|>", "<|model|>"]
    front = wt.TextTokenizer.train(emoji_texts, 500, dim=8, end="<|end|>", specials=specials)
    rust = tokenizers.Tokenizer.from_str(front.backend.to_str())
    rust.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    return rust


@pytest.fixture(scope="session")
def make_decoder() -> Callable[..., nn.Module]:
    """Builds a decoder of transformers with random weights; its embedding has a few more rows than the vocabulary."""

    def make(kind: str, settings: dict, rows: int = 508) -> nn.Module:
        args = {"vocab_size": rows, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0} | settings
        config = transformers.AutoConfig.for_model(kind, **args)
        theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
        return testing.randomised(theirs, std=0.2)

    return make
