"""Conversion of Hugging Face models with parity of outputs: one module per family, each with a table of weight names.

`config.model_type` selects the family. Its converter takes (config, weights, source) and returns a model of worldtokens;
an unknown setting, class or weight is an error that names it.
"""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.pretrained.hf.source import open_source

# config.model_type -> module:function in `pretrained`, called as convert(config, weights, source)
FAMILIES = {
    "bert": "hf.bert:convert",
    "clip": "hf.clip:convert",
    "clip_text_model": "hf.clip:convert",
    "clip_vision_model": "hf.clip:convert",
    "distilbert": "hf.bert:convert",
    "gpt2": "hf.decoders:convert_gpt2",
    "llama": "hf.decoders:convert_llama",
    "mistral": "hf.decoders:convert_llama",
    "qwen2": "hf.decoders:convert_llama",
    "qwen3": "hf.decoders:convert_llama",
    "roberta": "hf.bert:convert",
    "siglip": "hf.clip:convert",
    "siglip_text_model": "hf.clip:convert",
    "siglip_vision_model": "hf.clip:convert",
    "vit": "hf.vit:convert",
    "whisper": "hf.whisper:convert",
    "xlm-roberta": "hf.bert:convert",
}
# single-file models: suffix -> module:function, called as convert(path, tokenizer)
FILES: dict[str, str] = {".gguf": "gguf.load:from_gguf"}
# families that stream tensors, each converted to float32 on copying: there is no float32 copy of all weights
STREAMED = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "whisper")


def from_hf(
    source: str | Path | nn.Module,
    tokenizer: Any = None,
    processor: Any = None,
    ignore: Sequence[str] = (),
) -> Any:
    """Load a model of Hugging Face's transformers with equal outputs, vocabulary and preprocessing included.

    BERT, RoBERTa, XLM-R, DistilBERT and sentence-transformers folders of them become an `Encoder`; ViT a `Classifier`
    (without a head an `Encoder`); CLIP and SigLIP a `CLIP` (one tower alone an `Encoder`). GPT-2, Llama, Mistral, Qwen2
    and Qwen3 become a `LanguageModel` (with a chat template a `ChatModel`), Whisper a `Captioner`.

    Args:
        source: a folder written by `save_pretrained`, a published name (``"sentence-transformers/all-MiniLM-L6-v2"``,
            downloaded), a live model of transformers, or a .gguf file. A folder is read without transformers.
        tokenizer: the vocabulary, if the source has none: a fast tokenizer of transformers, a `tokenizers.Tokenizer`, or
            the path of a tokenizer.json. A live model without one takes ids as text: ``"101 2054 102"``.
        processor: the preprocessing, if the source has none: an image processor or feature extractor of transformers, or
            the dict of a preprocessor_config.json.
        ignore: patterns of weights to drop, such as ``"cls.*"``, the head of a masked language model. No other weight is
            dropped; a pattern without match is an error.

    Returns:
        The model in eval mode, on the CPU, float32. Dropout is not converted.

    Raises:
        InputError: the source is not found, or an architecture, setting or weight is not supported; named.
    """
    if not isinstance(source, nn.Module) and Path(source).suffix in FILES:
        if not Path(source).is_file():
            raise InputError(f"there is no file {str(source)!r}")
        return _resolve(FILES[Path(source).suffix])(Path(source), tokenizer)
    config, weights, opened = open_source(source, tokenizer, processor)
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise InputError(
            f"{opened.name} is of model_type {kind!r}; from_hf knows {', '.join(sorted(FAMILIES))}"
            + "".join(f", and {ending} files" for ending in FILES)
        )
    selected = _select_weights(weights, ignore, opened.name, float32=kind not in STREAMED)
    return _resolve(FAMILIES[kind])(config, selected, opened).eval()


def _resolve(path: str) -> Any:
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(f"worldtokens.pretrained.{module}"), function)


def _select_weights(
    weights: dict[str, Tensor], ignore: Sequence[str], name: str, float32: bool
) -> dict[str, Tensor]:
    out = {k: v.float() if float32 and v.is_floating_point() else v for k, v in weights.items()}
    for pattern in ignore:
        dropped = fnmatch.filter(out, pattern)
        if not dropped:
            raise InputError(f"ignore={pattern!r} matches no weight of {name}; it has {sorted(out)[:5]} ...")
        for key in dropped:
            del out[key]
    return out
