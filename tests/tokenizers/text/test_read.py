"""What is not text raises, and the message names its index."""

from __future__ import annotations

import pytest

import worldtokens as wt


@pytest.mark.parametrize("bad", [b"a cat", 3, None, ["a cat"]])
def test_what_is_not_text_raises(clip, trained, bad):
    for tokenizer in (clip, trained):
        with pytest.raises(wt.InputError, match=f"text 1 of the batch is a {type(bad).__name__}"):
            tokenizer.encode_batch(["fine", bad])
    with pytest.raises(wt.InputError, match="expected a list"):
        clip.encode_batch("a cat")


def test_lone_surrogates_raise_or_are_replaced(trained, clip):
    with pytest.raises(wt.InputError, match=r"text 1 .* surrogate '.ud800' at character 1"):
        trained.encode_batch(["fine", "a\ud800"])
    assert clip.read("a\ud800").tolist() == clip.read("a\ufffd").tolist()  # ftfy replaces it
