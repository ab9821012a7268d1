"""from_hf: parity of decoders: logits, losses, gradients and greedy continuations of transformers, parameters randomised.

Largest absolute differences in float32: `pytest -s` prints them.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import worldtokens as wt
from worldtokens.backbone.positions import scale_frequencies
from worldtokens.tasks.language.decoding import Sampling

TINY = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
    "rope_theta": 500.0,
}


FAMILIES = {  # case: (model_type, settings)
    "GPT-2": ("gpt2", {"n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 64}),
    "GPT-2, untied head, other sizes": (
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
    "Llama, attention biases": ("llama", {**TINY, "attention_bias": True}),
    "Llama, MLP biases": ("llama", {**TINY, "mlp_bias": True}),
    "Llama 3.1, scaled RoPE": ("llama", {**TINY, "num_key_value_heads": 1, "rope_parameters": LLAMA3}),
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


@pytest.fixture(scope="module")
def tokenizer(chat_vocabulary) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=chat_vocabulary, eos_token="<|end|>", pad_token="<|end|>", padding_side="left"
    )


def padded(
    tokenizer: PreTrainedTokenizerFast, prompts: list[str], side: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and positions of the prompts, (B, N) each."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side=side)
    mask = batch["attention_mask"]
    return batch["input_ids"], mask, (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("what", FAMILIES)
def test_logits_and_continuations_match(what, prompts, make_decoder, tokenizer, tmp_path):
    """Padded on either side, packed, cached; from a folder and live; after save and load."""
    theirs = make_decoder(*FAMILIES[what])
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    ours = wt.from_hf(tmp_path / "theirs")
    assert type(ours) is wt.LanguageModel and not ours.training
    front = ours.front
    assert front.encode_batch(prompts, end=False) == [tokenizer(p)["input_ids"] for p in prompts]
    worst, largest = 0.0, 0.0
    with torch.no_grad():
        raws = [front.read(p, end=False) for p in prompts]
        ids, mask, positions = padded(tokenizer, prompts, "right")
        want = theirs(ids, attention_mask=mask, position_ids=positions).logits
        got = ours({"text": front.collate(raws)})
        worst = max(worst, float((want - got)[mask.bool()].abs().max()))
        largest = float(want[mask.bool()].abs().max())
        # padding on the left: positions count from each row's first token
        ids, mask, positions = padded(tokenizer, prompts, "left")
        left = wt.Tokens(
            front.embed(ids, positions),
            mask.bool(),
            nn.functional.pad(positions[..., None].float(), (0, 2)),
            block=positions,
            ids=ids,
        )
        want_left = theirs(ids, attention_mask=mask, position_ids=positions).logits
        worst = max(worst, float((want_left - ours.logits(ours.hidden(left).x))[mask.bool()].abs().max()))
        packed = front(front.collate(raws)).pack(max(map(len, raws)) + 9)
        assert len(packed) < len(prompts)
        alone = ours.logits(ours.hidden(packed).unpack().x)
        worst = max(
            worst,
            float(
                (got - alone)[:, : alone.shape[1]][padded(tokenizer, prompts, "right")[1].bool()].abs().max()
            ),
        )
        want_ids = theirs.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0
        )
    print(f"\n{what:45} {worst:.1e} of {largest:.1f}")
    assert worst < 1e-4 and largest > 0.5
    found = ours.continuations(prompts, 24, Sampling())
    for row, continuation in zip(want_ids[:, ids.shape[1] :].tolist(), found, strict=True):
        ended = row.index(0) if 0 in row else len(row)
        assert continuation.ids == row[:ended]
    batch = {"text": front.collate(raws)}
    live = wt.from_hf(theirs, tokenizer=tokenizer)
    again = wt.load(ours.save(tmp_path / "ours"))
    assert torch.equal(live(batch), ours(batch)) and torch.equal(again(batch), ours(batch))


def test_a_model_with_several_end_tokens_stops_at_each(emoji_texts, make_decoder, tokenizer, tmp_path):
    theirs = make_decoder("llama", TINY)
    ids = torch.tensor([tokenizer(emoji_texts[3])["input_ids"]])
    unstopped = theirs.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
    other = next(i for k, i in enumerate(unstopped) if k > 4 and i not in unstopped[:k])
    theirs.generation_config.eos_token_id = [0, other]
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for ours in (wt.from_hf(tmp_path), wt.from_hf(theirs, tokenizer=tokenizer)):
        assert ours.stop_ids == (other,)
        (found,) = ours.continuations([emoji_texts[3]], 20)
        assert found.ids == unstopped[: unstopped.index(other)] and found.finish == "end"


def test_a_live_model_without_vocabulary_takes_ids_as_text(make_decoder):
    """A text is then ids written as numbers; the end token is that of the config."""
    ours = wt.from_hf(make_decoder("llama", {**TINY, "eos_token_id": 3}))
    assert ours.front.read("5 17 507").tolist() == [5, 17, 507, 3]


@pytest.mark.parametrize("what", ["GPT-2", "Llama 3.1, scaled RoPE", "Qwen2", "Qwen3, tied, biases"])
def test_loss_and_gradients_match(what, emoji_texts, make_decoder, tokenizer):
    """So fine-tuning gives the same model."""
    theirs = make_decoder(*FAMILIES[what])
    ours = wt.from_hf(theirs, tokenizer=tokenizer)
    rows = [ours.read({"text": t}) for t in emoji_texts[30:34]]
    batch = ours.collate(rows)
    ids = nn.utils.rnn.pad_sequence([r["text"] for r in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([r["text"] for r in rows], batch_first=True, padding_value=-100)
    mask = labels != -100
    want = theirs(ids, attention_mask=mask.long(), labels=labels).loss
    got = ours.loss(batch)["loss"]
    assert abs(float(want.detach()) - float(got.detach())) < 1e-5
    want.backward()
    got.backward()
    first = ours.trunk.blocks[0]
    if theirs.config.model_type == "gpt2":
        layer = theirs.transformer.h[0]
        pairs = [
            (layer.attn.c_attn.weight.grad.T, first.attn.qkv.weight.grad),
            (layer.mlp.c_proj.bias.grad, first.mlp.fc2.bias.grad),
            (theirs.transformer.wte.weight.grad, ours.front.embedding.weight.grad),
            (theirs.transformer.wpe.weight.grad, ours.front.pos_embed.grad),
        ]
    else:
        layer, attention = theirs.model.layers[0], theirs.model.layers[0].self_attn
        projections = [getattr(attention, f"{p}_proj") for p in "qkv"]
        pairs = [
            (torch.cat([m.weight.grad for m in projections]), first.attn.qkv.weight.grad),
            (
                torch.cat([layer.mlp.gate_proj.weight.grad, layer.mlp.up_proj.weight.grad]),
                first.mlp.fc1.weight.grad,
            ),
            (layer.input_layernorm.weight.grad, first.norm1.weight.grad),
            (theirs.model.embed_tokens.weight.grad, ours.front.embedding.weight.grad),
        ]
        if first.attn.qkv.bias is not None:
            pairs.append((torch.cat([m.bias.grad for m in projections]), first.attn.qkv.bias.grad))
    for a, b in pairs:
        assert float(a.abs().max()) > 1e-4 and float((a - b).abs().max()) < 1e-5 * max(
            1.0, float(a.abs().max())
        )


def test_rope_scaling_head_dim_and_qkv_bias_of_the_trunk():
    """Llama 3.1's scaling worked out by hand; invalid settings are errors; configs without them still load."""
    factor, low, high, _ = scaling = (8.0, 1.0, 4.0, 64.0)
    freq = torch.tensor([2 * math.pi / n for n in (10.0, 16.0, 32.0, 64.0, 640.0)])
    turns = (6.4, 4.0, 2.0, 1.0, 0.1)  # periods of each wave in 64 positions
    third = (2.0 - low) / (high - low)
    want = [1.0, 1.0, third + (1 - third) / factor, 1 / factor, 1 / factor]
    assert torch.allclose(scale_frequencies(freq, scaling) / freq, torch.tensor(want), atol=1e-6), turns
    for wrong in ((8.0, 4.0, 1.0, 64.0), (8.0, 1.0, 4.0), (0.0, 1.0, 4.0, 64.0), ("8", 1.0, 4.0, 64.0)):
        with pytest.raises(ValueError, match="rope_scaling"):
            wt.Transformer(48, 1, 4, rope=1, config={"rope_scaling": wrong})
    with pytest.raises(ValueError, match="head_dim=9 is odd"):
        wt.Transformer(48, 1, 4, rope=1, config={"head_dim": 9})
    trunk = wt.Transformer(48, 1, 5, config={"head_dim": 10, "bias": False, "qkv_bias": True})
    block = trunk.blocks[0]
    assert block.attn.qkv.weight.shape == (150, 48) and block.attn.proj.weight.shape == (48, 50)
    assert block.attn.qkv.bias is not None and block.attn.proj.bias is None and block.mlp.fc1.bias is None
    old = {k: v for k, v in trunk.config()["args"].items() if k != "config"}
    assert wt.build({"class": "worldtokens.Transformer", "args": old | {"heads": 4}}).cfg.head_dim == 12


def test_older_files_with_masks_and_without_prefix(emoji_texts, make_decoder, tokenizer, tmp_path):
    """As in openai-community/gpt2: no prefix, causal masks among the weights."""
    theirs = make_decoder("gpt2", {"n_layer": 1, "n_embd": 48, "n_head": 4, "n_positions": 64})
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    want = wt.from_hf(tmp_path)
    state = {
        k.removeprefix("transformer."): v for k, v in theirs.state_dict().items() if k != "lm_head.weight"
    }
    state["h.0.attn.bias"] = torch.ones(64, 64).tril()[None, None]
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "model.safetensors")
    batch = {"text": want.front.collate([want.front.read(emoji_texts[3])])}
    assert torch.equal(wt.from_hf(tmp_path)(batch), want(batch))


def test_half_precision_files_become_float32(make_decoder, tokenizer, tmp_path):
    theirs = make_decoder("llama", {**TINY, "num_key_value_heads": 2})
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ours = wt.from_hf(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    q = theirs.state_dict()["model.layers.1.self_attn.q_proj.weight"].float()
    assert torch.equal(ours.trunk.blocks[1].attn.qkv.weight[:48], q)


def test_what_cannot_be_converted_is_an_error_that_names_it(make_decoder, tokenizer, tmp_path):
    def refused(match: str, kind: str = "llama", weights=None, **settings) -> None:
        theirs = make_decoder(kind, {**TINY, **settings} if kind != "gpt2" else settings)
        if weights is not None:
            weights(theirs)
        with pytest.raises(wt.InputError, match=match):
            wt.from_hf(theirs, tokenizer=tokenizer)

    refused("rope_type='linear'", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    refused("hidden_act='gelu'", hidden_act="gelu")
    small = {"n_layer": 1, "n_embd": 48, "n_head": 4, "n_positions": 64}
    refused("scale_attn_by_inverse_layer_idx=True", "gpt2", scale_attn_by_inverse_layer_idx=True, **small)
    refused("add_cross_attention=True", "gpt2", add_cross_attention=True, **small)
    mixed = {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "num_key_value_heads": 2,
    }
    refused("layers of several kinds", "qwen2", **mixed)
    refused("508 tokens|500 embeddings|vocabulary has", vocab_size=100)
    refused(
        "layers.1.mlp.adapter.weight",
        weights=lambda m: m.model.layers[1].mlp.add_module("adapter", nn.Linear(2, 2, bias=False)),
    )
    refused(
        "q_proj.bias",
        weights=lambda m: m.model.layers[0].self_attn.q_proj.register_parameter(
            "bias", nn.Parameter(torch.zeros(48))
        ),
    )
    theirs = make_decoder("llama", TINY)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(wt.InputError, match=r"vocab.json, without a tokenizer.json"):
        wt.from_hf(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    state = theirs.state_dict()
    for change, match in (
        (
            lambda s: s.pop("model.layers.1.self_attn.k_proj.weight"),
            "missing layers.1.self_attn.k_proj.weight$",
        ),
        (lambda s: s.pop("lm_head.weight"), "missing lm_head.weight$"),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(47)}),
            r"norm.weight is \(47,\), expected \(48,\)",
        ),
    ):
        wrong = dict(state)
        change(wrong)
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(wt.InputError, match=match):
            wt.from_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(wt.InputError, match=r"lm_head.weight is not the embedding"):
        wt.from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 5, "head_dim": None}))
    with pytest.raises(wt.InputError, match="cannot be built"):
        wt.from_hf(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_published_sizes_within_1e_4(kind):
    """GPT-2 small, and 6 layers of Qwen2-0.5B's width."""
    size = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 6, "num_attention_heads": 14}
    size |= {
        "num_key_value_heads": 2,
        "vocab_size": 20000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = transformers.AutoConfig.for_model(kind, **(size if kind == "qwen2" else {}))
    theirs, g = AutoModelForCausalLM.from_config(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():  # the usual scale, so that no layer saturates
        for name, p in theirs.named_parameters():
            wide = 0.1 if p.ndim == 1 else 0.02 if "embed" in name or "wte" in name else p.shape[0] ** -0.5
            p.copy_(
                wide * torch.randn(p.shape, generator=g) + (1.0 if p.ndim == 1 and "weight" in name else 0.0)
            )
    ours = wt.from_hf(theirs)
    ids = torch.randint(0, 20000, (1, 200), generator=g)
    with torch.no_grad():
        want, got = theirs(ids).logits, ours({"text": ours.front.collate(list(ids))})
    worst = float((want - got).abs().max())
    print(f"\n{kind:6} {worst:.1e} of {float(want.abs().max()):.1f}")
    assert worst < 1e-4 and float(want.std()) > 0.1
