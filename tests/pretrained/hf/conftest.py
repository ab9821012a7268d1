"""Fixtures of the Hugging Face tests: vocabularies, texts and images, tiny models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
import tokenizers
import torch
import transformers as hf
from tokenizers import processors
from torch import nn

from worldtokens.data import samples
from worldtokens.testing import randomised

POSITIONS = 40
BERT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
DISTILBERT = {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4}


@pytest.fixture(scope="session")
def captions() -> list[str]:
    """Emoji names and keywords in four languages."""
    rows = samples.open("emoji", split="validation", languages=("en", "fr", "ru", "ja"))[:40]
    return [c for r in rows for c in r["text"]]


@pytest.fixture(scope="session")
def texts(captions) -> list[str]:
    """Captions, an empty text, odd characters, and a text longer than the context."""
    return [*captions[:9], "", "It's  a CAT, né? 1,234.5 <SEP>", "word " * 60]


@pytest.fixture(scope="session")
def images() -> list[Path]:
    """A photo and four emoji."""
    photo = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    return [photo, *(r["image"] for r in samples.open("emoji", split="validation")[:4])]


@pytest.fixture(scope="session")
def at_sizes() -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Images of 32 x 32 as they are, smaller, larger and not square, of one row of patches, and of an equal count."""

    def cut(pixels: torch.Tensor) -> list[torch.Tensor]:
        return [
            pixels,
            pixels[:3, :, :16, :],
            pixels.repeat(1, 1, 2, 3)[:2, :, :48, :88],
            pixels[:2, :, :8],
            pixels.repeat(1, 1, 1, 2)[:2, :, :16],
        ]

    return cut


@pytest.fixture(scope="session")
def wordpiece(captions) -> hf.PreTrainedTokenizerFast:
    learnt = tokenizers.BertWordPieceTokenizer(lowercase=True)
    learnt.train_from_iterator(captions, vocab_size=400, min_frequency=1, show_progress=False)
    ids = {t: learnt.token_to_id(t) for t in ("[SEP]", "[CLS]")}
    learnt._tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=list(ids.items())
    )
    names = {f"{k}_token": f"[{k.upper()}]" for k in ("unk", "sep", "cls", "pad", "mask")}
    return hf.PreTrainedTokenizerFast(tokenizer_object=learnt._tokenizer, model_max_length=POSITIONS, **names)


@pytest.fixture(scope="session")
def bytepairs(captions) -> hf.PreTrainedTokenizerFast:
    learnt = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    learnt.train_from_iterator(captions, 500, 1, show_progress=False, special_tokens=specials)
    learnt._tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=learnt._tokenizer,
        model_max_length=POSITIONS,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
    )


@pytest.fixture(scope="session")
def make_bert() -> Callable[..., nn.Module]:
    """Builds a BERT, RoBERTa, XLM-R or DistilBERT of 40 positions with random weights."""

    def make(vocabulary: hf.PreTrainedTokenizerFast, cls: type = hf.BertModel, **options) -> nn.Module:
        inner = {k: options.pop(k) for k in ("add_pooling_layer",) if k in options}
        size = BERT
        if cls is hf.DistilBertModel:
            size = DISTILBERT
        more = 0 if cls in (hf.BertModel, hf.DistilBertModel) else 2  # RoBERTa counts from its padding id + 1
        size = size | {"max_position_embeddings": POSITIONS + more}
        pad = vocabulary.pad_token_id
        config = cls.config_class(**{**size, "vocab_size": len(vocabulary), "pad_token_id": pad, **options})
        return randomised(cls(config, **inner))

    return make
