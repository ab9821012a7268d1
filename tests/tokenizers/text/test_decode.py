"""Ids back to text and bytes."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt


@functools.cache
def _byte_level() -> wt.TextTokenizer:
    return wt.TextTokenizer.train(["a cat 猫"], 257, dim=1, context=None, positions="none")


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_byte_level_ids_decode_to_the_exact_text(text):
    tokenizer = _byte_level()
    ids = tokenizer.read(text)
    assert tokenizer.decode(ids) == text
    pieces = list(tokenizer.stream(iter(ids.tolist())))
    assert "".join(pieces) == text
    assert all(pieces) and ("\ufffd" in text or not any("\ufffd" in p for p in pieces))


def test_stream_ends_with_the_replacement_of_an_incomplete_character():
    tokenizer = _byte_level()
    ids = tokenizer.read("a猫", end=False).tolist()[:-1]  # the last of three bytes is missing
    assert list(tokenizer.stream(ids)) == ["a", "\ufffd"] and tokenizer.decode(ids) == "a\ufffd"
    with pytest.raises(wt.InputError, match="id 9999 is outside"):
        tokenizer.decode([9999])


def test_clip_decodes_to_normalised_text(clip):
    assert clip.decode(clip.read("  A  Photo of\n猫 &amp; 👩🏽‍🚀!")) == "a photo of 猫 & 👩🏽‍🚀!"
    assert clip.decode(clip.read("a cat"), special=True) == "<|startoftext|>a cat <|endoftext|>"


def test_the_bytes_of_all_tokens_are_the_bytes_of_the_text(clip):
    """Also where a token is half a character."""
    text = "naïve 🎉 猫"
    ids = clip.read(text).tolist()
    assert clip.token_bytes(ids[0]) == b"<|startoftext|>"
    assert b"".join(map(clip.token_bytes, ids[1:-1])) == text.replace(" ", "").encode()
    with pytest.raises(wt.InputError, match="outside"):
        clip.token_bytes(clip.vocab_size)
