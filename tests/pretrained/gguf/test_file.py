"""Damaged .gguf files, and settings that are not supported: one sentence names the file and what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

import worldtokens as wt
from worldtokens.pretrained.gguf.file import GGUFFile

TINY = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80}


def test_a_damaged_file_is_an_error_that_names_it(make_decoder, chat_vocabulary, write_gguf, tmp_path):
    """Truncated anywhere, of another kind, with a tensor missing or unknown."""
    theirs, path = make_decoder("llama", TINY), tmp_path / "m.gguf"
    with pytest.raises(wt.InputError, match="no file"):
        wt.from_hf(path)

    def refused(match: str) -> None:
        with pytest.raises(wt.InputError, match=match) as e:
            wt.from_hf(path)
        assert "m.gguf" in str(e.value)

    write_gguf(path, theirs, chat_vocabulary)
    data = path.read_bytes()
    last = list(GGUFFile(path))[-1]
    for cut in (0, 3, 9, 30, 200, 2000, 9000, len(data) // 2, len(data) - 40):
        path.write_bytes(data[:cut])
        refused("cannot be read|is not a .gguf|truncated")
    refused(f"tensor '{last}' ends at byte")
    rng = np.random.default_rng(0)
    for _ in range(200):  # damaged bytes of the header: an error, or a header with other values
        wrong = bytearray(data)
        for at in rng.integers(0, 1500, 3):
            wrong[at] = rng.integers(256)
        path.write_bytes(bytes(wrong))
        try:
            wt.from_hf(path)
        except wt.InputError as e:
            assert "m.gguf" in str(e)
    for change, match in (
        ({"general.architecture": "mamba"}, "mamba.*is not supported, llama, qwen2, qwen3 are"),
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type='yarn'"),
        ({"llama.rope.dimension_count": 6}, "rotates 6 of 12"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"llama.block_count": 3}, "has 3 layers, the weights 2"),
        ({"llama.attention.head_count": 8}, r"attn_q.weight is \(48, 48\), expected \(96, 48\)"),
        ({"llama.feed_forward_length": 2**31}, "ffn_gate.weight is"),
        ({"tokenizer.ggml.model": "t5"}, "vocabulary of type 't5'"),
        ({"tokenizer.ggml.model": "llama"}, "lacks tokenizer.ggml.scores"),
        ({"tokenizer.ggml.pre": "poro"}, "pre-tokenizer 'poro'"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
        ({"tokenizer.ggml.tokens": ["a"]}, "type for each token"),
        (
            {"tensors": lambda t: {k: v for k, v in t.items() if k != "blk.1.attn_k.weight"}},
            "missing blk.1.attn_k.weight$",
        ),
        ({"tensors": lambda t: t | {"blk.1.more.weight": np.zeros(3, np.float32)}}, "blk.1.more.weight"),
        (
            {"tensors": lambda t: t | {"blk.1.ffn_norm.weight": np.ones(9, np.float32)}},
            r"is \(9,\), expected",
        ),
        (
            {"tensors": lambda t: t | {"rope_freqs.weight": np.arange(6, dtype=np.float32) + 1}},
            "rope_freqs.weight",
        ),
    ):
        write_gguf(path, theirs, chat_vocabulary, **change)
        refused(match)
    # a chat_vocabulary of another kind can be given instead
    write_gguf(path, theirs, chat_vocabulary, **{"tokenizer.ggml.model": "t5"})
    front = wt.from_hf(path, tokenizer=chat_vocabulary).front
    assert front.read("a").tolist() == [*chat_vocabulary.encode("a").ids, 0]
