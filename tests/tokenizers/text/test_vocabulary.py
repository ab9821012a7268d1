"""Vocabularies: training, files, copies and forks."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys

import pytest

import worldtokens as wt
from worldtokens.tokenizers.text.vocabulary import train_bpe


class Pair(wt.Part):
    def __init__(self, a: wt.TextTokenizer, b: wt.TextTokenizer) -> None:
        super().__init__()
        self.a, self.b = a, b


def test_training_is_deterministic_in_every_process(languages):
    texts = [t for rows in languages.values() for t in rows[:60]]
    here = train_bpe(texts, 900, None, "<|endoftext|>", (), 2).to_str()
    assert train_bpe(texts, 900, None, "<|endoftext|>", (), 2).to_str() == here
    code = (
        "import json, sys; from worldtokens.tokenizers.text.vocabulary import train_bpe;"
        "sys.stdout.write(train_bpe(json.load(sys.stdin), 900, None, '<|endoftext|>', (), 2).to_str())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(texts),
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONUTF8": "1"},
    )
    assert run.stdout == here, run.stderr


def test_two_vocabularies_in_one_model_have_separate_files(tmp_path, trained, monkeypatch):
    other = wt.TextTokenizer.train(["entirely other words, another text"] * 3, vocab_size=280, dim=8)
    # a test's class is not importable by name from a saved config
    monkeypatch.setattr(
        "worldtokens.parts._find_class", lambda n: Pair if n.endswith("Pair") else wt.TextTokenizer
    )
    Pair(trained, other).save(tmp_path)
    loaded = wt.load(tmp_path)
    for part, original in ((loaded.a, trained), (loaded.b, other)):
        assert part.backend.to_str() == original.backend.to_str()
    assert len(list(tmp_path.glob("tokenizer*.json"))) == 2


def test_vocabulary_file_defines_start_and_end(tmp_path, trained, clip):
    for tokenizer in (trained, clip):
        path = tokenizer.save_vocabulary(tmp_path / "v" / "tokenizer.json")
        loaded = wt.TextTokenizer.from_file(path, dim=2, context=32)
        assert (loaded.start_id, loaded.end_id) == (tokenizer.start_id, tokenizer.end_id)
        assert loaded.read("the cat sat").tolist() == tokenizer.read("the cat sat").tolist()


def test_vocabulary_file_works_in_hugging_face_tokenizers(tmp_path, clip):
    import tokenizers

    there = tokenizers.Tokenizer.from_file(str(clip.save_vocabulary(tmp_path / "tokenizer.json")))
    text = "a photo of two cats, it's 2026!"
    assert there.encode(text).ids == clip.read(text).tolist()


def test_vocabulary_object_is_copied():
    import tokenizers

    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    rust.enable_truncation(2)
    rust.enable_padding(length=7)
    tokenizer = wt.TextTokenizer(rust, dim=1)
    rust.enable_truncation(1)
    assert tokenizer.read("a b a b").tolist() == [0, 1, 0, 1]


FORK = """
import os, torch, worldtokens as wt
texts = [f"a photo of {i} cats and the word w{i}" for i in range(600)]
own = wt.TextTokenizer.train(texts, 400, dim=1)
for setting in (None, "true"):
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    if setting:
        os.environ["TOKENIZERS_PARALLELISM"] = setting
    for tokenizer in (wt.TextTokenizer.clip(dim=1), own):
        want = tokenizer.encode_batch(texts)                   # starts Rust's threads
        loader = torch.utils.data.DataLoader(
            texts, batch_size=150, num_workers=2, multiprocessing_context="fork", collate_fn=tokenizer.encode_batch)
        assert [row for rows in loader for row in rows] == want
    assert os.environ.get("TOKENIZERS_PARALLELISM") == setting
print("done")
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_forked_workers_do_not_warn_or_hang():
    run = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=240)
    assert run.stdout == "done\n", run.stderr[-2000:]
    assert "parallelism" not in run.stderr and "forked" not in run.stderr, run.stderr
