"""Fixtures of the text tests: tokenizers, open_clip's as reference, and real text."""

from __future__ import annotations

import html
import json
import unicodedata
from pathlib import Path

import pytest
import torch

import worldtokens as wt
from worldtokens.data import samples

LANGUAGES = Path(__file__).parents[2] / "texts" / "languages.json"  # licences in NOTICE.md beside it


@pytest.fixture(scope="module")
def clip() -> wt.TextTokenizer:
    torch.manual_seed(0)
    return wt.TextTokenizer.clip(dim=4)


@pytest.fixture(scope="module")
def peer():
    import open_clip

    return open_clip.get_tokenizer("ViT-B-32")


@pytest.fixture(scope="module")
def real() -> list[str]:
    """Real strings in 26 languages, and the same strings wrongly encoded, escaped and decomposed."""
    texts = {t for rows in json.loads(LANGUAGES.read_text(encoding="utf-8")).values() for t in rows}
    for row in list(samples.open("emoji", languages=("en", "fr", "de", "es", "ru", "ja")))[::6]:
        texts |= {row["char"] + " " + row["text"][0], *row["labels"].values()}
    texts = sorted(texts)
    texts += [html.escape(html.escape(t)) for t in texts[::29]]
    texts += [t.encode("ascii", "xmlcharrefreplace").decode() for t in texts[::23]]
    texts += [t.encode().decode("latin-1") for t in texts[::17]]
    texts += [t.encode().decode("cp1252", "ignore") for t in texts[::19]]
    texts += [t.upper() for t in texts[::5]]
    texts += [unicodedata.normalize("NFD", t) for t in texts[::7]]
    texts += [t.replace("'", "’").replace(" ", "\xa0", 1) for t in texts[::11]]
    return texts


@pytest.fixture
def trained() -> wt.TextTokenizer:
    torch.manual_seed(0)
    texts = ["the cat sat on the mat", "the dog sat on the log"] * 4
    return wt.TextTokenizer.train(texts, vocab_size=300, dim=8, start="<s>", specials=["<image>"], context=32)


@pytest.fixture(scope="session")
def languages() -> dict[str, list[str]]:
    """Texts by language."""
    return json.loads(LANGUAGES.read_text(encoding="utf-8"))
