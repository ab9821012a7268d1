"""from_hf of .gguf files: parity with the model that was written, and with the real SmolLM2.

Largest absolute differences in float32: `pytest -s` prints them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.tokenizers.text.chat_template import chat_ids

TINY = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80}
# the settings that llama.cpp's factors can stand for; the longest wavelengths are scaled, as the factors' range shows
LONG = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG |= {"original_max_position_embeddings": 8192, "rope_theta": 50000.0}


GGUF = {  # case: (model_type, settings, quantization)
    "Llama, grouped heads": ("llama", {**TINY, "num_key_value_heads": 2, "rope_theta": 30000.0}, "F32"),
    "Llama, tied, float16": ("llama", {**TINY, "tie_word_embeddings": True}, "F16"),
    "Llama, biases": ("llama", {**TINY, "attention_bias": True, "mlp_bias": True}, "F32"),
    "Llama, heads of 16": ("llama", {**TINY, "num_key_value_heads": 2, "head_dim": 16}, "F32"),
    "Llama 3.1": ("llama", {**TINY, "rope_parameters": LONG}, "F32"),
    "Llama, 8-bit": ("llama", {**TINY, "hidden_size": 64, "intermediate_size": 96}, "Q8_0"),
    "Llama, 4-bit": ("llama", {**TINY, "hidden_size": 64, "intermediate_size": 96}, "Q4_1"),
    "Qwen2": ("qwen2", {**TINY, "num_key_value_heads": 2}, "F32"),
    "Qwen3": ("qwen3", {**TINY, "num_key_value_heads": 2, "head_dim": 32}, "F32"),
}


@pytest.mark.parametrize("what", GGUF)
def test_logits_match_the_model_that_was_written(
    what, prompts, make_decoder, chat_vocabulary, write_gguf, chat_template, tmp_path
):
    kind, settings, quantization = GGUF[what]
    theirs = make_decoder(kind, settings)
    write_gguf(tmp_path / "m.gguf", theirs, chat_vocabulary, quantization)
    ours = wt.from_hf(tmp_path / "m.gguf")
    assert type(ours) is wt.ChatModel and not ours.training and ours.context == 256
    texts = [*prompts, "a<|end|>b", "  two  spaces 12 345"]
    assert (
        ours.front.encode_batch(texts, end=False)[:-2] == [chat_vocabulary.encode(t).ids for t in texts][:-2]
    )
    assert 0 not in ours.front.read("a<|end|>b", end=False) and ours.front.read("a")[-1] == 0
    if what == "Llama 3.1":
        assert ours.trunk.cfg.rope_scaling == (8.0, 1.0, 4.0, 8192.0)
    raws = [ours.front.read(t) for t in prompts]
    with torch.no_grad():
        want = [theirs(r[None]).logits[0] for r in raws]
        got = ours({"text": ours.front.collate(raws)})
    worst = max(float((w - g[: len(w)]).abs().max()) for w, g in zip(want, got, strict=True))
    print(f"\n{what:30} {worst:.1e} of {max(float(w.abs().max()) for w in want):.1f}")
    assert worst < 1e-4
    again = wt.load(ours.save(tmp_path / "ours"))
    assert again.chat_template == chat_template and torch.equal(
        again({"text": ours.front.collate(raws)}), got
    )


@pytest.fixture(scope="module")
def smollm2():
    try:
        path = wt.weights("smollm2")
    except wt.InputError as e:
        pytest.skip(f"SmolLM2 cannot be fetched: {e}")
    folder = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    theirs = AutoModelForCausalLM.from_pretrained(**folder, dtype=torch.float32).eval()
    return wt.from_hf(path), theirs, transformers.AutoTokenizer.from_pretrained(**folder)


@pytest.mark.slow
def test_smollm2_matches(smollm2):
    """Ids of 6,500 texts in many languages and of verses; logits; 48 greedy tokens in a batch; the template."""
    ours, theirs, tokenizer = smollm2
    many = json.loads((Path(__file__).parents[2] / "texts" / "languages.json").read_text(encoding="utf-8"))
    texts = [t for group in many.values() for t in group]
    verses = [r["text"] for r in samples.open("verses", split="test")]
    for side in (texts, verses[:2000]):
        assert (
            ours.front.encode_batch(side, end=False) == tokenizer(side, add_special_tokens=False)["input_ids"]
        )
    # SmolLM2 was trained with every digit split off first, as the spaces before one show; transformers' .gguf reader
    # applies GPT-2's rule
    assert [ours.front.token_bytes(i) for i in ours.front.read("a  12", end=False)] == [
        b"a",
        b"  ",
        b"1",
        b"2",
    ]
    prompts = [v[: 40 + 20 * k] for k, v in enumerate(verses[:4])]
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.no_grad():
        ids = ours.front.read(" ".join(verses[:6]), end=False)[None]
        want, got = theirs(ids).logits, ours({"text": ours.front.collate(list(ids))})
        generated = theirs.generate(**batch, max_new_tokens=48, do_sample=False, eos_token_id=2)
    worst = float((want - got).abs().max())
    print(f"\nSmolLM2: logits of {ids.shape[1]} tokens {worst:.1e} of {float(want.abs().max()):.1f}")
    assert worst < 1e-4
    for row, found in zip(
        generated[:, batch["input_ids"].shape[1] :].tolist(), ours.continuations(prompts, 48), strict=True
    ):
        assert found.ids == (row[: row.index(2)] if 2 in row else row)
    talk = [{"role": "user", "content": "What is 2+2?"}]
    want = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert chat_ids(ours.front, ours.chat_template, talk).tolist() == want


@pytest.mark.slow
def test_smollm2_models_english_and_answers(smollm2, tmp_path):
    ours = smollm2[0]
    chapter = samples.open("verses", split="test", unit="chapter")[0]["text"]
    english = ours.evaluate([{"text": chapter}])
    backward = ours.evaluate([{"text": " ".join(chapter.split()[::-1])}])
    print(
        f"\nRuth 1: perplexity {english['perplexity']:.1f}, {english['bits_per_byte']:.3f} bits per byte; "
        f"its words reversed {backward['perplexity']:.0f}"
    )
    assert 3 < english["perplexity"] < 40 and backward["perplexity"] > 10 * english["perplexity"]
    answer = ours.chat("What is the capital of France?")
    print(answer)
    assert "Paris" in answer
    again = wt.load(ours.save(tmp_path / "m"))
    assert again.chat("What is the capital of France?") == answer
