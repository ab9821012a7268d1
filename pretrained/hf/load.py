"""Hugging Face's models as ours: the same numbers from the same weights. One module a family, one table of names each.

A family is found by `config.model_type`. Its converter takes (config, weights, source) and gives a model of worldtokens;
what it does not know, a setting, a class or a weight, it refuses by name.
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
# a file that is a model by itself: its ending -> module:function, called as convert(path, tokenizer)
FILES: dict[str, str] = {".gguf": "gguf.load:convert_gguf"}
# filled tensor by tensor, each brought to float32 on its way: no float32 copy of the whole is made first
POURED = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "whisper")


def from_hf(
    source: str | Path | nn.Module,
    tokenizer: Any = None,
    processor: Any = None,
    ignore: Sequence[str] = (),
) -> Any:
    """A model of Hugging Face's transformers with equal outputs, its vocabulary and preprocessing included.

    BERT, RoBERTa, XLM-R, DistilBERT and sentence-transformers' folders of them become an `Encoder`; ViT a `Classifier`
    (an `Encoder` without its head); CLIP and SigLIP a `CLIP` (an `Encoder` where it is one tower). GPT-2, Llama, Mistral,
    Qwen2 and Qwen3 become a `LanguageModel` (a `ChatModel` where there is a chat template), Whisper a `Captioner`.

    Args:
        source: a folder that `save_pretrained` wrote, a published name (``"sentence-transformers/all-MiniLM-L6-v2"``,
            downloaded), a live model of transformers, or a .gguf file. A folder is read without transformers.
        tokenizer: the vocabulary, where the source does not bring it: a fast tokenizer of transformers, a
            `tokenizers.Tokenizer`, or the path of a tokenizer.json. A live BERT without any reads numbers: ``"101 2054
            102"``.
        processor: how images are prepared, where the source does not tell: an image processor of transformers, or the
            dict of a preprocessor_config.json.
        ignore: patterns of weights to leave out, such as ``"cls.*"``, a masked language model's head. Nothing else
            is left out; a pattern that matches nothing is an error.

    Returns:
        The model in eval mode, on the CPU, float32. Dropout is not carried.

    Raises:
        InputError: the source cannot be found, or is an architecture, a setting or a weight that is not supported; named.
    """
    if not isinstance(source, nn.Module) and Path(source).suffix in FILES:
        if not Path(source).is_file():
            raise InputError(f"there is no file {str(source)!r}")
        return _found(FILES[Path(source).suffix])(Path(source), tokenizer)
    config, weights, opened = open_source(source, tokenizer, processor)
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise InputError(
            f"{opened.name} is of model_type {kind!r}; from_hf knows {', '.join(sorted(FAMILIES))}"
            + "".join(f", and {ending} files" for ending in FILES)
        )
    kept = _kept(weights, ignore, opened.name, float32=kind not in POURED)
    return _found(FAMILIES[kind])(config, kept, opened).eval()


def _found(place: str) -> Any:
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(f"worldtokens.pretrained.{module}"), function)


def _kept(weights: dict[str, Tensor], ignore: Sequence[str], name: str, float32: bool) -> dict[str, Tensor]:
    out = {k: v.float() if float32 and v.is_floating_point() else v for k, v in weights.items()}
    for pattern in ignore:
        dropped = fnmatch.filter(out, pattern)
        if not dropped:
            raise InputError(f"ignore={pattern!r} matches no weight of {name}; it has {sorted(out)[:5]} ...")
        for key in dropped:
            del out[key]
    return out
