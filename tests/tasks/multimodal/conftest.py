"""Fixtures of the multimodal tests: a small language model with a chat template, an image tokenizer, conversations."""

from __future__ import annotations

import pytest
import torch

import worldtokens as wt
from worldtokens.data import samples

ROWS = samples.open("emoji", split="validation")
IMAGES = [ROWS[i]["image"] for i in (0, 40, 80, 120)]  # PNG bytes
TEXTS = ROWS.texts()[:150] + ["What is this? the first or the second red apple"] * 3
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.role[0] }}: {{ m.content }} A:{% endif %}{% endfor %}"
)

DIM = 32


def build_language_model(
    positions: str = "none", context: int = 64, seed: int = 0, **options
) -> wt.ChatModel:
    torch.manual_seed(seed)
    front = wt.TextTokenizer.train(TEXTS, 400, dim=DIM, context=context, positions=positions)
    with torch.no_grad():
        front.embedding.weight.mul_(25)
        if front.pos_embed is not None:
            front.pos_embed.mul_(50)
    trunk = wt.Transformer(DIM, 2, 4, rope=1 if positions == "none" else 0, **options)
    with torch.no_grad():  # so that untrained output depends on all of the input
        for p in trunk.blocks.parameters():
            p.mul_(3 if p.ndim == 2 else 1)
    lm = wt.ChatModel(front, trunk, tied=False, chat_template=TEMPLATE)
    torch.nn.init.normal_(lm.head.weight)
    return lm


def build_image_tokenizer(**options) -> wt.ImageTokenizer:
    """Four tokens per image of 64 x 64."""
    return wt.ImageTokenizer(
        **({"dim": 16, "patch": 32, "size": 64, "preprocess": {"draft": False}} | options)
    )


def build_model(positions: str = "none", context: int = 64, **options) -> wt.MultimodalLM:
    lm = build_language_model(positions, context)
    options = {"projectors": {"image": wt.Projector(DIM, 16)}} | options
    return wt.MultimodalLM(lm, {"image": build_image_tokenizer()}, **options).eval()


def user_message(*content) -> dict:
    return {"role": "user", "content": [{"image": c} if isinstance(c, bytes) else c for c in content]}


def assistant_message(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="session")
def make_language_model():
    """Builds a ChatModel of width 32, seeded."""
    return build_language_model


@pytest.fixture(scope="session")
def make_image_tokenizer():
    """Builds an image tokenizer of width 16."""
    return build_image_tokenizer


@pytest.fixture(scope="session")
def make_model():
    """Builds a MultimodalLM of the two, with a Projector."""
    return build_model


@pytest.fixture(scope="session")
def user():
    """Builds a message of the user; bytes are images."""
    return user_message


@pytest.fixture(scope="session")
def assistant():
    """Builds a message of the assistant."""
    return assistant_message


@pytest.fixture(scope="session")
def collate():
    """Reads and collates conversations."""
    return lambda m, *conversations: m.collate([m.read({"messages": c}) for c in conversations])


@pytest.fixture(scope="session")
def images():
    return IMAGES


@pytest.fixture(scope="session")
def template():
    return TEMPLATE


@pytest.fixture(scope="session")
def conversations():
    """Four conversations of different lengths, with none to two images."""
    return [
        [user_message("What is this?", IMAGES[0]), assistant_message("red apple")],
        [user_message(IMAGES[1], "the first", IMAGES[2], "or the second?"), assistant_message("the second")],
        [user_message("happy face?"), assistant_message("face")],
        [
            user_message(IMAGES[3]),
            assistant_message("the first"),
            user_message("and", IMAGES[0], "?"),
            assistant_message("a red flag"),
        ],
    ]
