"""from_hf's decoders: transformers' logits and greedy continuations from our parts, every parameter away from its start.

Largest absolute differences in float32: `pytest -s` prints them.
"""

from __future__ import annotations

import pytest
import tokenizers
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.tasks.decoding import Sampling

ROWS = samples.open("emoji", split="validation")
TEXTS = [c for r in ROWS[:200] for c in r["text"]]
PROMPTS = ["a", TEXTS[3], TEXTS[7] + ", " + TEXTS[11], TEXTS[20]]
TINY = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
    "rope_theta": 500.0,
}

FAMILIES = {  # what it shows: (model_type, settings)
    "GPT-2": ("gpt2", {"n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 64}),
    "GPT-2, head of its own, other sizes": (
        "gpt2",
        {
            "n_layer": 2,
            "n_embd": 48,
            "n_head": 3,
            "n_positions": 64,
            "n_inner": 100,
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-2,
            "tie_word_embeddings": False,
        },
    ),
    "Llama": ("llama", {**TINY, "rms_norm_eps": 1e-2}),
    "Llama, grouped heads, tied": (
        "llama",
        {**TINY, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 100000.0},
    ),
    "Llama, all biases": ("llama", {**TINY, "attention_bias": True, "mlp_bias": True}),
    "Llama, biases of attention": ("llama", {**TINY, "attention_bias": True}),
    "Llama, biases of the feed-forward": ("llama", {**TINY, "mlp_bias": True}),
    "Llama 3.1, stretched waves": ("llama", {**TINY, "num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "Mistral, window of 6, heads of 16": (
        "mistral",
        {**TINY, "num_key_value_heads": 2, "sliding_window": 6, "head_dim": 16},
    ),
    "Qwen2": ("qwen2", {**TINY, "num_key_value_heads": 2}),
    "Qwen2, window in all layers": (
        "qwen2",
        {
            **TINY,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
    ),
    "Qwen3, heads of 32": ("qwen3", {**TINY, "num_key_value_heads": 2, "head_dim": 32}),
    "Qwen3, tied, biases": (
        "qwen3",
        {
            **TINY,
            "num_key_value_heads": 4,
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter away from its start: gains and biases too."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=g) + (0.5 if p.ndim == 1 else 0.0))
    return model.eval()


@pytest.fixture(scope="module")
def vocabulary() -> tokenizers.Tokenizer:
    front = wt.TextTokenizer.train(TEXTS, 500, dim=8, end="<|end|>", specials=["<|user|>", "<|model|>"])
    rust = tokenizers.Tokenizer.from_str(front._rust.to_str())
    rust.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    return rust


@pytest.fixture(scope="module")
def theirs_words(vocabulary) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, eos_token="<|end|>", pad_token="<|end|>", padding_side="left"
    )


def made(kind: str, settings: dict, rows: int = 508) -> nn.Module:
    """A live model with random weights, its vocabulary a little wider than what is named."""
    args = {"vocab_size": rows, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0} | settings
    config = transformers.AutoConfig.for_model(kind, **args)
    return randomised(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float())


def padded(words: PreTrainedTokenizerFast, side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, mask and places of the prompts, (B, N) each."""
    batch = words(PROMPTS, return_tensors="pt", padding=True, padding_side=side)
    mask = batch["attention_mask"]
    return batch["input_ids"], mask, (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("what", FAMILIES)
def test_logits_and_continuations_equal_transformers(what, theirs_words, tmp_path):
    """Padded on either side, packed, cached; from a folder and live; after save and load."""
    theirs = made(*FAMILIES[what])
    theirs.save_pretrained(tmp_path / "theirs")
    theirs_words.save_pretrained(tmp_path / "theirs")
    ours = wt.from_hf(tmp_path / "theirs")
    assert type(ours) is wt.LanguageModel and not ours.training
    front = ours.front
    assert front.encode_batch(PROMPTS, end=False) == [theirs_words(p)["input_ids"] for p in PROMPTS]
    worst, largest = 0.0, 0.0
    with torch.no_grad():
        raws = [front.read(p, end=False) for p in PROMPTS]
        ids, mask, places = padded(theirs_words, "right")
        want = theirs(ids, attention_mask=mask, position_ids=places).logits
        got = ours({"text": front.collate(raws)})
        worst = max(worst, float((want - got)[mask.bool()].abs().max()))
        largest = float(want[mask.bool()].abs().max())
        # padding on the left: places count from each row's first word
        ids, mask, places = padded(theirs_words, "left")
        left = wt.Tokens(
            front.embed(ids, places),
            mask.bool(),
            nn.functional.pad(places[..., None].float(), (0, 2)),
            block=places,
            ids=ids,
        )
        want_left = theirs(ids, attention_mask=mask, position_ids=places).logits
        worst = max(worst, float((want_left - ours.logits(ours.hidden(left).x))[mask.bool()].abs().max()))
        packed = front(front.collate(raws)).pack(max(map(len, raws)) + 9)
        assert len(packed) < len(PROMPTS)
        alone = ours.logits(ours.hidden(packed).unpack().x)
        worst = max(
            worst,
            float((got - alone)[:, : alone.shape[1]][padded(theirs_words, "right")[1].bool()].abs().max()),
        )
        want_ids = theirs.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0
        )
    print(f"\n{what:45} {worst:.1e} of {largest:.1f}")
    assert worst < 1e-4 and largest > 0.5
    said = ours.continuations(PROMPTS, 24, Sampling())
    for row, continuation in zip(want_ids[:, ids.shape[1] :].tolist(), said, strict=True):
        ended = row.index(0) if 0 in row else len(row)
        assert continuation.ids == row[:ended]
    batch = {"text": front.collate(raws)}
    live = wt.from_hf(theirs, tokenizer=theirs_words)
    again = wt.load(ours.save(tmp_path / "ours"))
    assert torch.equal(live(batch), ours(batch)) and torch.equal(again(batch), ours(batch))
