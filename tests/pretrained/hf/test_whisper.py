"""from_hf: parity of Whisper: spectrograms, encoder outputs, logits and transcriptions of real speech.

Every parameter is random. Largest absolute differences in float32: `pytest -s` prints them.
"""

from __future__ import annotations

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
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

SECONDS, MELS, TOKENS = 4, 80, 400
NAMES = ["<|startoftranscript|>", "<|en|>", "<|es|>", "<|translate|>", "<|transcribe|>"]
NAMES += ["<|startoflm|>", "<|notimestamps|>", "<|0.00|>", "<|0.02|>"]
END = 0  # then text tokens, control tokens and time stamps, as in the published vocabularies
START, EN, ES, TRANSLATE, TRANSCRIBE, _, NO_TIMES, *STAMPS = range(TOKENS, TOKENS + len(NAMES))


@pytest.fixture(scope="module")
def speech() -> tuple[list[str], list[str]]:
    """Paths and transcripts of real utterances: prompts at 8 kHz, cards at 16 kHz."""
    try:
        rows = samples.open("voice")
    except wt.InputError as e:
        pytest.skip(f"real speech cannot be fetched: {e}")
    chosen = [r for r in rows if r["class"] == "cards"][:4] + [r for r in rows if r["class"] == "phonetic"][
        :2
    ]
    return [r["audio"] for r in chosen], [r["text"] for r in chosen]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    rows = samples.open("emoji", split="validation")[:100]
    texts = [c for r in rows for c in r["text"]]
    rust = wt.TextTokenizer.train(texts, TOKENS, dim=8, end="<|endoftext|>").backend
    rust = tokenizers.Tokenizer.from_str(rust.to_str())
    added = [tokenizers.AddedToken(n, special="." not in n, normalized=False) for n in NAMES]
    rust.add_tokens(added)
    assert rust.token_to_id("<|0.02|>") == STAMPS[1]
    special = [("<|endoftext|>", END)] + [(NAMES[i - TOKENS], i) for i in (START, EN, TRANSCRIBE, NO_TIMES)]
    prefix = "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>"
    rust.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{prefix} $A <|endoftext|>", special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def make_whisper(multilingual: bool = True, **settings) -> WhisperForConditionalGeneration:
    args = {
        "vocab_size": TOKENS + len(NAMES) + 1,
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
            # small embeddings and biases, so that an output does not repeat one token
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


def spectrograms(paths: list[str]) -> torch.Tensor:
    """Spectrograms by transformers of the audio files, resampled to 16 kHz by our reader."""
    read = wt.AudioTokenizer(8, seconds=None).read
    waveforms = [read(p).numpy() for p in paths]
    extract = WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)
    return extract(waveforms, sampling_rate=16000, return_tensors="pt").input_features


def transcript(row: list[int], prefix: list[int]) -> list[int]:
    """Generated ids without prefix and end token."""
    row = row[len(prefix) :] if row[: len(prefix)] == prefix else row
    return row[: row.index(END)] if END in row else row


CASES = {
    "multilingual": {},
    "English only": {"multilingual": False},
    "untied head, QuickGELU": {"tie_word_embeddings": False, "activation_function": "quick_gelu"},
}


@pytest.mark.parametrize("what", CASES)
def test_transcriptions_match(what, speech, tokenizer, tmp_path):
    """Spectrograms, encoder, teacher-forced logits, greedy ids and text; in batches and one by one; after save and load."""
    (paths, texts), theirs = speech, make_whisper(**CASES[what])
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS).save_pretrained(folder)
    ours = wt.from_hf(folder)
    assert type(ours) is wt.Captioner and not ours.training
    prefix = [START, EN, TRANSCRIBE, NO_TIMES] if CASES[what].get("multilingual", True) else [START, NO_TIMES]
    assert ours.prefix == prefix
    if len(prefix) == 4:  # transformers' tokenizer adds the same prefix for training
        assert [[*prefix, *i] for i in ours.front.encode_batch(texts)] == tokenizer(texts)["input_ids"]
    rows = [ours.read({"audio": p, "text": t}) for p, t in zip(paths, texts, strict=True)]
    batch = ours.collate(rows)
    features = spectrograms(paths)
    with torch.no_grad():
        log_mel, _ = ours.tokenizers["audio"].features(batch["audio"])
        spectrogram = float((log_mel.mT - features).abs().max())
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
    print(f"\n{what:30} spectrogram {spectrogram:.1e}, encoder {encoder:.1e}, logits {logits:.1e}")
    assert abs(loss - want_loss) < 1e-5
    assert spectrogram < 1e-5 and encoder < 1e-4 and logits < 1e-4
    assert float(want_logits.abs().max()) > 0.5 and float((want[0] - want[1]).abs().max()) > 0.1
    found = [w[0].ids for w in ours.generate(context, max_new_tokens=30)]
    for row, mine in zip(want_ids.tolist(), found, strict=True):
        assert mine == transcript(row, prefix)
    assert len({tuple(s) for s in found}) > 1
    assert ours.caption(paths, batch_size=4, max_new_tokens=30) == tokenizer.batch_decode(
        found, skip_special_tokens=True
    )
    again = wt.load(ours.save(tmp_path / "ours"))
    assert again.caption(paths[:1], max_new_tokens=30) == ours.caption(paths[:1], max_new_tokens=30)
    assert (again.prefix, again.suppress, again.suppress_first) == (
        ours.prefix,
        ours.suppress,
        ours.suppress_first,
    )
    live = wt.from_hf(theirs, tokenizer=tokenizer)
    assert live.suppress == ours.suppress and torch.equal(live.encode(batch).x, context.x)


def test_language_and_task_by_prefix_or_by_config(speech, tokenizer):
    theirs, paths = make_whisper(), speech[0][:2]
    features = spectrograms(paths)
    ours = wt.from_hf(theirs, tokenizer=tokenizer)
    with torch.no_grad():
        want = theirs.generate(features, do_sample=False, max_new_tokens=12, language="es", task="translate")
    prefix = ["<|startoftranscript|>", "<|es|>", "<|translate|>", "<|notimestamps|>"]
    context = ours.encode(ours.collate_sources(paths))
    found = [w[0].ids for w in ours.generate(context, max_new_tokens=12, prefix=prefix)]
    for row, mine in zip(want.tolist(), found, strict=True):
        assert mine == transcript(row, [START, ES, TRANSLATE, NO_TIMES])
    assert ours.caption(paths, max_new_tokens=12, prefix=prefix) == tokenizer.batch_decode(
        found, skip_special_tokens=True
    )
    theirs.generation_config.language, theirs.generation_config.task = "spanish", "translate"
    assert wt.from_hf(theirs, tokenizer=tokenizer).prefix == [START, ES, TRANSLATE, NO_TIMES]


def test_time_stamps_and_control_tokens_are_not_text(tokenizer):
    """A control token spelled in a text stays text, and decoding drops time stamps."""
    front = wt.from_hf(make_whisper(), tokenizer=tokenizer).front
    ids = front.read("a<|0.02|>b<|es|>").tolist()
    assert not set(ids[:-1]) & {END, *range(TOKENS, TOKENS + len(NAMES))} and ids[-1] == END
    assert front.decode([STAMPS[0], *front.read("a").tolist(), STAMPS[1]]) == "a"


def test_longer_audio_is_truncated_to_the_window(speech, tokenizer):
    ours = wt.from_hf(make_whisper(), tokenizer=tokenizer)
    read = ours.tokenizers["audio"].read
    waveform = torch.cat([read(p) for p in speech[0]])
    assert len(waveform) > SECONDS * 16000
    a, b = ours.caption(
        [(waveform.numpy(), 16000), (waveform[: SECONDS * 16000].numpy(), 16000)], max_new_tokens=8
    )
    assert a == b


def test_what_cannot_be_converted_is_an_error_that_names_it(tokenizer, tmp_path):
    def refused(match: str, theirs=None, **more) -> None:
        with pytest.raises(wt.InputError, match=match):
            wt.from_hf(theirs or make_whisper(), **({"tokenizer": tokenizer} | more))

    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS).to_dict()
    refused("sampling_rate=8000", processor=extractor | {"sampling_rate": 8000})
    refused("feature_size=40", processor=extractor | {"feature_size": 40})
    refused("dither=0.1", processor=extractor | {"dither": 0.1})
    refused("activation 'relu'", make_whisper(activation_function="relu"))
    theirs = make_whisper()
    theirs.generation_config.language = "<|fr|>"
    refused("language '<|fr|>'", theirs)
    theirs = make_whisper()
    theirs.model.encoder.layers[1].adapter = nn.Linear(2, 2)
    refused("encoder.layers.1.adapter.weight", theirs)
    theirs = make_whisper()
    state = theirs.state_dict()
    del state["model.decoder.layers.1.encoder_attn.k_proj.weight"], state["proj_out.weight"]
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    save_file({k: v.clone() for k, v in state.items()}, tmp_path / "model.safetensors")
    refused(r"missing decoder.layers.1.encoder_attn.k_proj.weight", tmp_path)
    refused("no '<|endoftext|>'", tokenizer=wt.TextTokenizer.train(["a b"], 300, dim=8, end="<|e|>").backend)


@pytest.mark.slow
def test_whisper_tinys_size_within_1e_4(speech):
    """4 + 4 layers, dim 384, 30 s, 51,865 tokens."""
    theirs = WhisperForConditionalGeneration(WhisperConfig()).eval()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            wide = 0.1 if p.ndim == 1 else p[0].numel() ** -0.5
            p.copy_(wide * torch.randn(p.shape, generator=g) + (1.0 if "norm.weight" in name else 0.0))
    ours = wt.from_hf(theirs)
    paths = speech[0][:2]
    waveforms = [ours.tokenizers["audio"].read(p) for p in paths]
    features = WhisperFeatureExtractor()(
        [w.numpy() for w in waveforms], sampling_rate=16000, return_tensors="pt"
    )
    ids = torch.randint(0, 50000, (2, 20), generator=g)
    with torch.no_grad():
        want = theirs(**features, decoder_input_ids=ids).logits
        context, given = ours.encode(ours.collate_sources(paths)), ours.front.collate(list(ids))
        got = nn.functional.linear(ours.decoder(ours.front(given), context=context).x, ours.head_weight)
    worst = float((want - got).abs().max())
    print(f"\nWhisper tiny's size: {worst:.1e} of {float(want.abs().max()):.1f}")
    assert worst < 1e-4 and context.shape == (2, 1500, 384)
