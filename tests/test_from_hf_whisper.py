"""from_hf's Whisper: transformers' spectra, encoder outputs, logits and transcriptions of real speech from our parts.

Weights are random, every parameter away from its start. Largest absolute differences in float32: `pytest -s` prints them.
"""

from __future__ import annotations

import pytest
import tokenizers
import torch
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import worldtokens as wt
from worldtokens.data import samples

SECONDS, MELS, WORDS = 4, 80, 400
NAMES = ["<|startoftranscript|>", "<|en|>", "<|es|>", "<|translate|>", "<|transcribe|>"]
NAMES += ["<|startoflm|>", "<|notimestamps|>", "<|0.00|>", "<|0.02|>"]
END = 0  # words follow, then control tokens, time stamps last, as in the published vocabularies
START, EN, ES, TRANSLATE, TRANSCRIBE, _, NO_TIMES, *STAMPS = range(WORDS, WORDS + len(NAMES))


@pytest.fixture(scope="module")
def speech() -> tuple[list[str], list[str]]:
    """Paths and words of real utterances: prompts at 8 kHz, cards at 16 kHz."""
    try:
        rows = samples.open("voice")
    except wt.InputError as e:
        pytest.skip(f"real speech can't be fetched: {e}")
    chosen = [r for r in rows if r["class"] == "cards"][:4] + [r for r in rows if r["class"] == "phonetic"][
        :2
    ]
    return [r["audio"] for r in chosen], [r["text"] for r in chosen]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    rows = samples.open("emoji", split="validation")[:100]
    texts = [c for r in rows for c in r["text"]]
    rust = wt.TextTokenizer.train(texts, WORDS, dim=8, end="<|endoftext|>")._rust
    rust = tokenizers.Tokenizer.from_str(rust.to_str())
    added = [tokenizers.AddedToken(n, special="." not in n, normalized=False) for n in NAMES]
    rust.add_tokens(added)
    assert rust.token_to_id("<|0.02|>") == STAMPS[1]
    around = [("<|endoftext|>", END)] + [(NAMES[i - WORDS], i) for i in (START, EN, TRANSCRIBE, NO_TIMES)]
    prefix = "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>"
    rust.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{prefix} $A <|endoftext|>", special_tokens=around
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def made(multilingual: bool = True, **settings) -> WhisperForConditionalGeneration:
    args = {
        "vocab_size": WORDS + len(NAMES) + 1,
        "num_mel_bins": MELS,
        "d_model": 48,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 80,
        "max_source_positions": SECONDS * 50,
        "max_target_positions": 60,
        "decoder_start_token_id": START,
        "eos_token_id": END,
        "pad_token_id": END,
        "bos_token_id": END,
        "begin_suppress_tokens": None,
    } | settings
    g = torch.Generator().manual_seed(1)
    theirs = WhisperForConditionalGeneration(WhisperConfig(**args)).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            # small words and biases, so that an answer says more than one word for ever
            wide = 0.05 if "embed_tokens" in name else 0.2 if p.ndim == 1 else 2 * p[0].numel() ** -0.5
            p.copy_(wide * torch.randn(p.shape, generator=g))
            p += 1.0 if "norm.weight" in name else 0.0
    more = {"is_multilingual": False}
    if multilingual:
        more = {
            "is_multilingual": True,
            "lang_to_id": {"<|en|>": EN, "<|es|>": ES},
            "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
        }
    theirs.generation_config = GenerationConfig(
        decoder_start_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
        max_length=60,
        no_timestamps_token_id=NO_TIMES,
        suppress_tokens=[17, 40, 41, *range(START, NO_TIMES)],
        begin_suppress_tokens=[END, 220],
        **more,
    )
    return theirs


def heard(paths: list[str]) -> torch.Tensor:
    """transformers' spectra of the sounds, brought to 16 kHz by our reader."""
    read = wt.AudioTokenizer(8, seconds=None).read
    waves = [read(p).numpy() for p in paths]
    extract = WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)
    return extract(waves, sampling_rate=16000, return_tensors="pt").input_features


CASES = {
    "many languages": {},
    "English alone": {"multilingual": False},
    "head of its own, QuickGELU": {"tie_word_embeddings": False, "activation_function": "quick_gelu"},
}


@pytest.mark.parametrize("what", CASES)
def test_transcriptions_equal_transformers(what, speech, words, tmp_path):
    """Spectra, encoder, teacher-forced logits, greedy ids and text; in batches and one by one; after save and load."""
    (paths, texts), theirs = speech, made(**CASES[what])
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder)
    words.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS).save_pretrained(folder)
    ours = wt.from_hf(folder)
    assert type(ours) is wt.Captioner and not ours.training
    prefix = [START, EN, TRANSCRIBE, NO_TIMES] if CASES[what].get("multilingual", True) else [START, NO_TIMES]
    assert ours.prefix == prefix
    rows = [ours.read({"audio": p, "text": t}) for p, t in zip(paths, texts, strict=True)]
    batch = ours.collate(rows)
    features = heard(paths)
    with torch.no_grad():
        seen, _ = ours.tokenizers["audio"].features(batch["audio"])
        spectrum = float((seen.mT - features).abs().max())
        want = theirs.model.encoder(features).last_hidden_state
        context = ours.encode(batch)
        encoder = float((want - context.x).abs().max())
        given, labels = batch["text"]["ids"], batch["text"]["labels"]
        want_logits = theirs(features, decoder_input_ids=given).logits
        real = torch.arange(given.shape[1]) < torch.tensor(batch["text"]["lengths"])[:, None]
        logits = float(
            (want_logits - nn.functional.linear(ours(batch).x, ours.head_weight))[real].abs().max()
        )
        want_loss = nn.functional.cross_entropy(
            want_logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        )
        how = {"language": "en", "task": "transcribe"} if CASES[what].get("multilingual", True) else {}
        loss = ours.loss(batch)["loss"]
        want_ids = theirs.generate(features, do_sample=False, max_new_tokens=30, **how)
    print(f"\n{what:30} spectrum {spectrum:.1e}, encoder {encoder:.1e}, logits {logits:.1e}")
    assert abs(loss - want_loss) < 1e-5
    assert spectrum < 1e-5 and encoder < 1e-4 and logits < 1e-4
    assert float(want_logits.abs().max()) > 0.5 and float((want[0] - want[1]).abs().max()) > 0.1
    said = [w[0].ids for w in ours.write(context, max_new_tokens=30)]
    for row, mine in zip(want_ids.tolist(), said, strict=True):
        row = row[len(prefix) :] if row[: len(prefix)] == prefix else row
        assert mine == (row[: row.index(END)] if END in row else row)
    assert len({tuple(s) for s in said}) > 1
    assert ours.caption(paths, batch_size=4, max_new_tokens=30) == words.batch_decode(
        said, skip_special_tokens=True
    )
    again = wt.load(ours.save(tmp_path / "ours"))
    assert again.caption(paths[:1], max_new_tokens=30) == ours.caption(paths[:1], max_new_tokens=30)
    assert (again.prefix, again.suppress, again.suppress_first) == (
        ours.prefix,
        ours.suppress,
        ours.suppress_first,
    )
    live = wt.from_hf(theirs, tokenizer=words)
    assert live.suppress == ours.suppress and torch.equal(live.encode(batch).x, context.x)
