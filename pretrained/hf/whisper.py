"""Hugging Face's Whisper as a `Captioner`: an encoder of log-mel spectrograms and a text decoder.

Every transcript begins with the control tokens for language, task and no time stamps. Tokens that the generation config
suppresses are suppressed here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken
from torch import Tensor

from worldtokens.backbone.transformer import Transformer
from worldtokens.pretrained.hf.decoders import pad_vocabulary
from worldtokens.pretrained.hf.source import Source, numeric_vocabulary
from worldtokens.pretrained.streaming import stream_weights
from worldtokens.tasks.seq2seq.captioner import Captioner
from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer
from worldtokens.tokenizers.text.tokenizer import TextTokenizer

LAYERS = {
    "{0}.layers.*.self_attn_layer_norm.*": "{0}.blocks.*.norm1.*",
    "{0}.layers.*.self_attn.q_proj.*": "{0}.blocks.*.attn.qkv.*[q]",
    "{0}.layers.*.self_attn.k_proj.*": "{0}.blocks.*.attn.qkv.*[k]",
    "{0}.layers.*.self_attn.v_proj.*": "{0}.blocks.*.attn.qkv.*[v]",
    "{0}.layers.*.self_attn.out_proj.*": "{0}.blocks.*.attn.proj.*",
    "{0}.layers.*.final_layer_norm.*": "{0}.blocks.*.norm2.*",
    "{0}.layers.*.fc1.*": "{0}.blocks.*.mlp.fc1.*",
    "{0}.layers.*.fc2.*": "{0}.blocks.*.mlp.fc2.*",
    "{0}.layer_norm.*": "{0}.norm.*",
}
WHISPER = {
    "encoder.conv1.*": "tokenizers.audio.stem.conv1.*",
    "encoder.conv2.*": "tokenizers.audio.stem.conv2.*",
    "encoder.embed_positions.weight": "tokenizers.audio.pos_embed",
    "decoder.embed_tokens.weight": "tokenizers.text.embedding.weight",
    "decoder.embed_positions.weight": "tokenizers.text.pos_embed",
    "decoder.layers.*.encoder_attn_layer_norm.*": "decoder.blocks.*.norm_cross.*",
    "decoder.layers.*.encoder_attn.q_proj.*": "decoder.blocks.*.cross.q.*",
    "decoder.layers.*.encoder_attn.k_proj.*": "decoder.blocks.*.cross.kv.*[ck]",
    "decoder.layers.*.encoder_attn.v_proj.*": "decoder.blocks.*.cross.kv.*[cv]",
    "decoder.layers.*.encoder_attn.out_proj.*": "decoder.blocks.*.cross.proj.*",
    "proj_out.weight": "head.weight",
}
WHISPER |= {k.format(tower): v.format(tower) for tower in ("encoder", "decoder") for k, v in LAYERS.items()}
# keys have no bias: it would add the same to every score of a query, and the softmax cancels it
NO_KEY_BIAS = ("encoder.blocks.*.attn.qkv.bias[k]", "decoder.blocks.*.attn.qkv.bias[k]")
NO_KEY_BIAS += ("decoder.blocks.*.cross.kv.bias[ck]",)
SAMPLE_RATE, HOP, END = 16000, 160, "<|endoftext|>"
FEATURE_EXTRACTOR = {  # preprocessor_config.json
    "sampling_rate": SAMPLE_RATE,
    "hop_length": HOP,
    "n_fft": 400,
    "padding_value": 0.0,
    "dither": 0.0,
    "do_normalize": False,
}


def convert(config: Mapping[str, Any], weights: dict[str, Tensor], source: Source) -> Captioner:
    """Convert Whisper with its head. Columns ``"audio"`` and ``"text"``; longer audio is truncated to 30 s."""
    c = dict(config)
    dim, mels = c.get("d_model", 384), c.get("num_mel_bins", 80)
    source.expect(source.preprocessing or {}, FEATURE_EXTRACTOR | {"feature_size": mels})
    positions = c.get("max_source_positions", 1500)
    audio = AudioTokenizer(
        dim,
        "whisper",
        SAMPLE_RATE,
        mels,
        seconds=positions * 2 * HOP / SAMPLE_RATE,
        positions="learned",
        config={"fixed_length": True},
    )
    act = source.activation(c.get("activation_function", "gelu"))

    def tower(name: str, **settings: Any) -> Transformer:
        depth, heads = c.get(f"{name}_layers", 4), c.get(f"{name}_attention_heads", 6)
        try:
            return Transformer(
                dim,
                depth,
                heads,
                activation=act,
                config={"mlp_dim": c.get(f"{name}_ffn_dim", 1536)},
                **settings,
            )
        except ValueError as e:
            raise source.error(f"its config cannot be built: {e}") from e

    tied, generation = c.get("tie_word_embeddings", True), source.generation_settings
    text = _text_tokenizer(c, dim, source)
    model = Captioner(
        {"audio": audio, "text": text},
        decoder=tower("decoder", cross=True),
        encoder=tower("encoder"),
        tied=tied,
        prefix=_prefix(c, generation, text.backend, source),
        suppress=_ids(generation.get("suppress_tokens", c.get("suppress_tokens")), text),
        suppress_first=_ids(generation.get("begin_suppress_tokens", c.get("begin_suppress_tokens")), text),
        max_new_tokens=text.context,
    )
    weights = {k.removeprefix("model."): v for k, v in weights.items()}
    head = weights.get("proj_out.weight")
    if tied and head is not None:
        if not torch.equal(head, weights.get("decoder.embed_tokens.weight", head[:0])):
            raise source.error("tie_word_embeddings is true, but proj_out.weight is not the embedding")
        del weights["proj_out.weight"]
    stream_weights(
        model,
        weights,
        WHISPER,
        source.name,
        rows={"q": (0, dim), "k": (dim, dim), "v": (2 * dim, dim), "ck": (0, dim), "cv": (dim, dim)},
        transforms={"encoder.embed_positions.weight": lambda w: w[:, None]},
        zero=NO_KEY_BIAS,
    )
    return model


def _text_tokenizer(c: Mapping[str, Any], dim: int, source: Source) -> TextTokenizer:
    rows, backend, end = c.get("vocab_size", 51865), source.vocabulary, END
    if backend is None:
        backend, end = numeric_vocabulary(rows), str(c.get("eos_token_id", 50256))
    else:
        # time stamps are control tokens, not text
        stamps = [t.content for t in backend.get_added_tokens_decoder().values() if _is_time_stamp(t.content)]
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in stamps])
        backend = pad_vocabulary(backend, rows, source)
        if backend.token_to_id(end) is None:
            raise source.error(f"its vocabulary has no {END!r}")
    return TextTokenizer(backend, dim, c.get("max_target_positions", 448), end=end)


def _is_time_stamp(token: str) -> bool:
    return token.startswith("<|") and token.endswith("|>") and token[2:-2].replace(".", "", 1).isdecimal()


def _prefix(
    c: Mapping[str, Any], generation: Mapping[str, Any], backend: tokenizers.Tokenizer, source: Source
) -> list[int]:
    """Ids that every transcript begins with: start, and in multilingual models language, task and no time stamps."""
    ids = [generation.get("decoder_start_token_id", c.get("decoder_start_token_id", 50257))]
    languages, requested = generation.get("lang_to_id") or {}, generation.get("language")
    if generation.get("is_multilingual", bool(languages) or c.get("vocab_size", 51865) >= 51865):
        name = _language(requested or "en")
        ids += [languages.get(name, backend.token_to_id(name))]
        if ids[-1] is None and requested:
            raise source.error(f"language {requested!r} is not in its vocabulary")
        task = generation.get("task") or "transcribe"
        ids += [(generation.get("task_to_id") or {}).get(task, backend.token_to_id(f"<|{task}|>"))]
    ids += [generation.get("no_timestamps_token_id", backend.token_to_id("<|notimestamps|>"))]
    return [i for i in ids if i is not None]


def _language(name: str) -> str:
    """``"en"``, ``"english"`` or ``"<|en|>"`` -> its token."""
    if name.startswith("<|"):
        return name
    if len(name) > 3:
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        name = TO_LANGUAGE_CODE.get(name.lower(), name)
    return f"<|{name}|>"


def _ids(given: Any, text: TextTokenizer) -> list[int]:
    return [i for i in given or () if 0 <= i < text.vocab_size]
