"""Text to tokens: batches, truncation, ids padded elsewhere, settings, saved folders."""

from __future__ import annotations

import warnings

import pytest
import torch

import worldtokens as wt


def test_truncated_text_keeps_its_end_token_and_warns_once():
    clip = wt.TextTokenizer.clip(dim=1, context=8)
    with pytest.warns(UserWarning, match=r"102 ids was cut to context=8.*context=102"):
        ids = clip.read("cat " * 100)
    assert ids.tolist() == [49406, *[2368] * 6, 49407]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clip.encode_batch(["cat " * 100, "cat"], context=4) == [
            [49406, 2368, 2368, 49407],
            [49406, 2368, 49407],
        ]
        assert clip.read("cat " * 100, end=False).tolist() == [49406, *[2368] * 7]
    assert clip.read("a cat", end=False).tolist() == [49406, 320, 2368]


def test_batch_is_padded_to_its_longest_and_causal(clip):
    batch = clip.collate([clip.read("a cat"), clip.read(""), clip.read("a black cat")])
    assert batch["ids"].shape == (3, 5) and batch["lengths"] == (4, 2, 5)
    assert batch["ids"].dtype == torch.int64
    same = clip.batch(["a cat", "", "a black cat"])
    assert torch.equal(same["ids"], batch["ids"]) and same["lengths"] == batch["lengths"]
    tokens = clip(batch)
    assert tokens.valid.sum(1).tolist() == [4, 2, 5]
    assert tokens.block[0].tolist() == tokens.pos[0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(tokens.ids, batch["ids"])
    expected = clip.embedding.weight[batch["ids"]] + clip.pos_embed[:5]
    assert torch.equal(tokens.x, expected)
    assert tokens.layout == wt.Layout.simple([4, 2, 5], "causal")
    assert torch.equal(clip.tokens(["a cat", "", "a black cat"]).x, tokens.x)


def test_ids_padded_by_open_clip_give_the_same_tokens(clip, peer):
    ids = peer(["a cat", "", "a photo of a dog"])
    tokens, own = clip(ids), clip.tokens(["a cat", "", "a photo of a dog"])
    assert tokens.layout.lengths == own.layout.lengths
    assert torch.equal(tokens.x[own.valid.nonzero(as_tuple=True)], own.x[own.valid])
    assert torch.equal(clip(ids.int()).x, tokens.x)
    with pytest.raises(wt.InputError, match=r"row 1 .* no end token"):
        clip(torch.tensor([[49406, 49407], [49406, 320]]))
    with pytest.raises(wt.InputError, match="ids run from 0 to 49408"):
        clip(torch.tensor([[49408, 0, 49407]]))
    with pytest.raises(wt.InputError, match="expected integers"):
        clip(torch.rand(1, 5))
    with pytest.raises(wt.InputError, match="78 ids in a row, but context=77"):
        clip(torch.full((1, 78), 49407))


def test_end_token_is_found_although_other_ids_are_larger(trained):
    assert trained.end_id == 0 and trained.backend.token_to_id("<image>") > 0
    ids = torch.tensor([[1, 2, 60, 0, 0, 0], [1, 60, 61, 62, 63, 0]])
    assert trained(ids).valid.sum(1).tolist() == [4, 6]


def test_settings_out_of_range_raise(trained):
    for kwargs, message in [
        ({"positions": "sincos"}, "positions is 'sincos'"),
        ({"normalize": "lower"}, "normalize is 'lower'"),
        ({"context": None}, "learned positions need"),
        ({"context": 1, "end": "<|endoftext|>"}, "no room for text"),
        ({"end": "</s>"}, r"end='</s>' is not in the vocabulary.*<\|endoftext\|>"),
        ({"vocabulary": "nowhere.json"}, "no vocabulary at 'nowhere.json'"),
        ({"vocabulary": 3}, "vocabulary is a int"),
    ]:
        with pytest.raises(wt.InputError, match=message):
            wt.TextTokenizer(**{"vocabulary": "clip", "dim": 1} | kwargs)
    with pytest.raises(wt.InputError, match="give 257 or more"):
        wt.TextTokenizer.train(["a"], vocab_size=256)
    with pytest.raises(wt.InputError, match="text 1 is a NoneType"):
        wt.TextTokenizer.train(["a", None])
    with pytest.raises(wt.InputError, match="at least one"):
        trained.collate([])


def test_train_on_the_class_trains_a_vocabulary_and_on_an_instance_sets_the_mode(trained):
    assert trained.training and trained.train(False) is trained and not trained.training
    assert torch.nn.Sequential(trained).train()[0].training


def test_saved_folder_restores_everything(tmp_path, trained, clip):
    text = "The  CAT &amp; the dog<image>"
    for name, tokenizer in (("own", trained), ("clip", clip)):
        tokenizer.save(tmp_path / name)
        assert (tmp_path / name / "tokenizer.json").is_file()
        loaded = wt.load(tmp_path / name)
        assert loaded.encode_batch([text]) == tokenizer.encode_batch([text])
        assert loaded.encode_batch([text], special=True) == tokenizer.encode_batch([text], special=True)
        for what in ("dim", "context", "causal", "normalize", "start_id", "end_id", "pad_id", "vocab_size"):
            assert getattr(loaded, what) == getattr(tokenizer, what), what
        assert torch.equal(loaded.tokens([text]).x, tokenizer.tokens([text]).x)
        loaded.save(tmp_path / name)  # over itself
        assert wt.load(tmp_path / name).encode_batch([text]) == tokenizer.encode_batch([text])


def test_tokenizer_contract(trained):
    from worldtokens.testing import check_tokenizer

    check_tokenizer(trained, ["the cat", "a", "the dog sat on the log", "猫"], bad=[b"bytes", 3, "\ud800"])
