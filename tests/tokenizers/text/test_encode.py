"""Special tokens come only from special=True; anything but text raises."""

from __future__ import annotations

import copy
import pickle

import pytest

import worldtokens as wt


def test_text_that_spells_a_special_token_is_plain_text(clip, trained):
    for tokenizer, names in ((clip, ["<|endoftext|>", "<|startoftext|>"]), (trained, ["<image>", "<s>"])):
        for name in names:
            special_id = tokenizer.backend.token_to_id(name)
            inside = tokenizer.read(f"a{name}b", end=False)[1:].tolist()
            assert special_id not in inside and len(inside) > 3
            parsed = tokenizer.read(f"a{name}b", special=True, end=False)[1:].tolist()
            assert parsed.count(special_id) == 1
            assert tokenizer.decode(parsed, special=True).replace(" ", "") == f"a{name}b"
    # open_clip's spelling of its special tokens is plain text here (there it is a special token)
    assert clip.read("<end_of_text>").tolist().count(49407) == 1


def test_word_level_vocabulary_raises_for_text_that_spells_a_special_token():
    import tokenizers

    vocab = {"[UNK]": 0, "[SEP]": 1, "cat": 2}
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    rust.add_special_tokens(["[UNK]", "[SEP]"])
    tokenizer = wt.TextTokenizer(rust, dim=2, end="[SEP]")
    assert tokenizer.read("cat dog").tolist() == [2, 0, 1]
    assert tokenizer.decode([2, 2, 1]) == "cat cat" == "".join(tokenizer.stream([2, 2, 1]))
    with pytest.raises(wt.InputError, match=r"text 0 .* spells a special token"):
        tokenizer.read("cat [SEP] cat")
    assert tokenizer.read("cat [SEP]", special=True).tolist() == [2, 1, 1]


def test_copies_and_pickles_keep_special_tokens_out_of_text(clip, trained):
    for tokenizer, name in ((clip, "<|endoftext|>"), (trained, "<image>")):
        for loaded in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
            assert loaded.encode_batch([f"a{name}b"]) == tokenizer.encode_batch([f"a{name}b"])
            assert loaded.decode(loaded.read("a cat")) == "a cat"
