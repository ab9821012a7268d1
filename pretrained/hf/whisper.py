"""Hugging Face's Whisper as a `Captioner`: a sound's spectrum is read by an encoder, its words are written by a decoder.

Every answer begins with the ids that Whisper was told what to do by: language, task, no time stamps. What its
generation config never lets it write is never written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken
from torch import Tensor

from worldtokens.backbone.transformer import Transformer
from worldtokens.pretrained.hf.decoders import widened
from worldtokens.pretrained.hf.source import Source, numbers
from worldtokens.pretrained.streaming import pour
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
# keys have no bias, and need none: one adds the same to every score of a query, which a softmax takes out again
NO_KEY_BIAS = ("encoder.blocks.*.attn.qkv.bias[k]", "decoder.blocks.*.attn.qkv.bias[k]")
NO_KEY_BIAS += ("decoder.blocks.*.cross.kv.bias[ck]",)
SAMPLE_RATE, HOP, END = 16000, 160, "<|endoftext|>"
HEARING = {  # preprocessor_config.json
    "sampling_rate": SAMPLE_RATE,
    "hop_length": HOP,
    "n_fft": 400,
    "padding_value": 0.0,
    "dither": 0.0,
    "do_normalize": False,
}


def convert(config: Mapping[str, Any], weights: dict[str, Tensor], source: Source) -> Captioner:
    """Whisper with its head; see `from_hf`. Columns ``"audio"`` and ``"text"``; of a longer sound the first 30 s count."""
    c = dict(config)
    dim, mels = c.get("d_model", 384), c.get("num_mel_bins", 80)
    heard = source.preprocessing or {}
    source.expect(heard, HEARING | {"feature_size": mels})
    places = c.get("max_source_positions", 1500)
    audio = AudioTokenizer(
        dim,
        "whisper",
        SAMPLE_RATE,
        mels,
        seconds=places * 2 * HOP / SAMPLE_RATE,
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
            raise source.refuse(f"its config cannot be built: {e}") from e

    tied, told = c.get("tie_word_embeddings", True), source.generation_settings
    text = _words(c, dim, source)
    model = Captioner(
        {"audio": audio, "text": text},
        decoder=tower("decoder", cross=True),
        encoder=tower("encoder"),
        tied=tied,
        prefix=_prefix(c, told, text.backend, source),
        suppress=_ids(told.get("suppress_tokens", c.get("suppress_tokens")), text),
        suppress_first=_ids(told.get("begin_suppress_tokens", c.get("begin_suppress_tokens")), text),
        max_new_tokens=text.context,
    )
    weights = {k.removeprefix("model."): v for k, v in weights.items()}
    head = weights.get("proj_out.weight")
    if tied and head is not None:
        if not torch.equal(head, weights.get("decoder.embed_tokens.weight", head[:0])):
            raise source.refuse("tie_word_embeddings is true, but proj_out.weight is not the embedding")
        del weights["proj_out.weight"]
    pour(
        model,
        weights,
        WHISPER,
        source.name,
        rows={"q": (0, dim), "k": (dim, dim), "v": (2 * dim, dim), "ck": (0, dim), "cv": (dim, dim)},
        change={"encoder.embed_positions.weight": lambda w: w[:, None]},
        zero=NO_KEY_BIAS,
    )
    return model


def _words(c: Mapping[str, Any], dim: int, source: Source) -> TextTokenizer:
    rows, rust, end = c.get("vocab_size", 51865), source.vocabulary, END
    if rust is None:
        rust, end = numbers(rows), str(c.get("eos_token_id", 50256))
    else:
        # time stamps are no text: control tokens like the others
        stamps = [t.content for t in rust.get_added_tokens_decoder().values() if _is_time(t.content)]
        rust.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in stamps])
        rust = widened(rust, rows, source)
        if rust.token_to_id(end) is None:
            raise source.refuse(f"its vocabulary has no {END!r}")
    return TextTokenizer(rust, dim, c.get("max_target_positions", 448), end=end)


def _is_time(token: str) -> bool:
    return token.startswith("<|") and token.endswith("|>") and token[2:-2].replace(".", "", 1).isdecimal()


def _prefix(
    c: Mapping[str, Any], told: Mapping[str, Any], rust: tokenizers.Tokenizer, source: Source
) -> list[int]:
    """What an answer begins with: start, and where the model knows them language, task and "no time stamps"."""
    ids = [told.get("decoder_start_token_id", c.get("decoder_start_token_id", 50257))]
    languages, asked = told.get("lang_to_id") or {}, told.get("language")
    if told.get("is_multilingual", bool(languages) or c.get("vocab_size", 51865) >= 51865):
        name = _language(asked or "en")
        ids += [languages.get(name, rust.token_to_id(name))]
        if ids[-1] is None and asked:
            raise source.refuse(f"language {asked!r} is not among its tokens")
        task = told.get("task") or "transcribe"
        ids += [(told.get("task_to_id") or {}).get(task, rust.token_to_id(f"<|{task}|>"))]
    ids += [told.get("no_timestamps_token_id", rust.token_to_id("<|notimestamps|>"))]
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
