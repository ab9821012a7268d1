"""Sources of Hugging Face models: a folder written by `save_pretrained`, a published name, or a live module.

A folder is read without transformers: config.json, weights, vocabulary and preprocessing are plain files. `Source` is
shared by all families: it opens the vocabulary and checks settings, where any unsupported value is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.pretrained import mapping
from worldtokens.tokenizers.text.vocabulary import open_vocabulary

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
FILES = ["*.json", "*.safetensors", "*.bin", "*.txt", "1_Pooling/*", "2_Dense/*", "2_Normalize/*"]
# the same weights for other frameworks
OTHERS = ["onnx/*", "openvino/*", "coreml/*", "*.onnx*", "flax_*", "tf_*"]
# vocabulary formats before tokenizer.json
SLOW = ("vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model")
# transformers' names -> ours; "gelu_fast" and "gelu_new" are the same tanh formula
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


@dataclasses.dataclass(frozen=True)
class Source:
    """What a converter needs besides config and weights.

    Args:
        name: name of the source, for errors.
        architecture: the class of transformers that wrote the weights, e.g. ``"BertModel"``.
        folder: folder of its files, or None.
        tokenizer: given by the caller, or None; `vocabulary` opens it.
        processor: given by the caller, or None; `preprocessing` reads it.
        generation: generation config of a live model, or None; `generation_settings` reads it.
    """

    name: str
    architecture: str
    folder: Path | None = None
    tokenizer: Any = None
    processor: Any = None
    generation: Mapping[str, Any] | None = None

    def read(self, file: str) -> Any:
        """A JSON file of the folder, or None if it does not exist.

        Raises:
            InputError: it is not JSON.
        """
        path = self.folder and self.folder / file
        if path is None or not path.is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as e:
            raise InputError(f"{path} is not JSON: {e}") from e

    @functools.cached_property
    def vocabulary(self) -> tokenizers.Tokenizer | None:
        """The given vocabulary, or the folder's tokenizer.json or BERT's vocab.txt. None if there is neither."""
        given = getattr(self.processor, "tokenizer", None) if self.tokenizer is None else self.tokenizer
        if given is not None:
            given = getattr(given, "tokenizer", given)  # a processor with a tokenizer
            return open_vocabulary(getattr(given, "backend_tokenizer", given))
        if self.folder is None:
            return None
        if (self.folder / "tokenizer.json").is_file():
            return open_vocabulary(self.folder / "tokenizer.json")
        if (self.folder / "vocab.txt").is_file():
            return _wordpiece(self.folder / "vocab.txt", self.read("tokenizer_config.json") or {})
        for file in SLOW:
            if (self.folder / file).is_file():
                raise self.error(
                    f"its vocabulary is {file}, without a tokenizer.json: convert it with transformers, "
                    f"AutoTokenizer.from_pretrained({str(self.folder)!r}), and give it as tokenizer="
                )
        return None

    @property
    def preprocessing(self) -> dict[str, Any] | None:
        """Settings of the image or audio preprocessing: the given processor's, or the folder's preprocessor_config.json."""
        given = self.processor
        if given is None:
            found = self.read("preprocessor_config.json")
            return (
                found
                if found is not None
                else (self.read("processor_config.json") or {}).get("image_processor")
            )
        given = getattr(given, "image_processor", getattr(given, "feature_extractor", given))
        return dict(given) if isinstance(given, Mapping) else given.to_dict()

    @property
    def generation_settings(self) -> dict[str, Any]:
        """Generation config of a live model or of the folder's generation_config.json, without nulls."""
        found = self.generation if self.generation is not None else self.read("generation_config.json")
        return {k: v for k, v in (found or {}).items() if v is not None}

    def error(self, what: str) -> InputError:
        """An error that names the source: ``raise source.error("relative positions")``."""
        return InputError(f"{self.name} ({self.architecture}): {what}")

    def expect(self, config: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
        """Check settings that the converter does not implement in any other way; an absent setting passes.

        Args:
            config: settings of the model.
            allowed: setting -> its supported value, or a tuple of supported values.

        Raises:
            InputError: a setting has another value; named.
        """
        for key, values in allowed.items():
            values = values if isinstance(values, tuple) else (values,)
            if key in config and config[key] not in values:
                supported = " or ".join(map(repr, values))
                raise self.error(f"{key}={config[key]!r} is not supported, {supported} is")

    def lookup_architecture(self, known: Mapping[str, Any]) -> Any:
        """A family's table entry for this architecture; the first entry if the config names none.

        Raises:
            InputError: the table has no such entry.
        """
        if not self.architecture:
            return next(iter(known.values()))
        if self.architecture not in known:
            raise self.error(
                f"this class is not supported; supported classes of its family: {', '.join(known)}"
            )
        return known[self.architecture]

    def activation(self, name: Any) -> str:
        """Our name of an activation function of transformers."""
        if name not in ACTIVATIONS:
            raise self.error(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]


def numeric_vocabulary(size: int) -> tokenizers.Tokenizer:
    """Stand-in for a missing vocabulary: a text is ids as decimal numbers, ``"101 2054 102"``."""
    out = tokenizers.Tokenizer(models.WordLevel({str(i): i for i in range(size)}))
    out.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return out


def _wordpiece(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """BERT's vocabulary from a vocab.txt."""
    lines = path.read_text(encoding="utf-8").splitlines()
    vocab = {line: i for i, line in enumerate(lines)}
    named = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    for key in named:
        token = config.get(f"{key}_token", named[key])
        named[key] = token["content"] if isinstance(token, Mapping) else token
    missing = [t for t in (named["unk"], named["cls"], named["sep"]) if t not in vocab]
    if missing:
        raise InputError(f"{path} lacks {missing}: expected a WordPiece vocabulary, one token per line")
    lower, accents = config.get("do_lower_case", True), config.get("strip_accents")
    out = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=named["unk"], max_input_chars_per_word=100))
    out.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        lowercase=lower,
        strip_accents=accents,
    )
    out.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    out.decoder = decoders.WordPiece()
    out.post_processor = processors.TemplateProcessing(
        single=f"{named['cls']} $A {named['sep']}",
        pair=f"{named['cls']} $A {named['sep']} $B:1 {named['sep']}:1",
        special_tokens=[(named[k], vocab[named[k]]) for k in ("cls", "sep")],
    )
    known = [t for t in named.values() if t in vocab]
    out.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in known])
    return out


# ---- opening -----------------------------------------------------------------------------------------------


def open_source(
    source: str | Path | nn.Module, tokenizer: Any = None, processor: Any = None
) -> tuple[dict[str, Any], dict[str, Tensor], Source]:
    """Open a source: (config, weights, `Source`).

    Raises:
        InputError: there is no such folder or published name, or a file is missing.
    """
    if isinstance(source, nn.Module):
        config = getattr(source, "config", None)
        if config is None or not hasattr(config, "to_dict"):
            raise InputError(f"{type(source).__name__} is not a model of transformers: it has no config")
        path = Path(str(getattr(config, "name_or_path", "") or ""))
        folder = path if str(path) != "." and path.is_dir() else None
        generation = getattr(source, "generation_config", None)
        generation = generation.to_dict() if hasattr(generation, "to_dict") else None
        kind = type(source).__name__
        opened = Source(kind, kind, folder, tokenizer, processor, generation)
        return config.to_dict(), dict(source.state_dict()), opened
    folder = Path(source)
    if folder.is_file():
        raise InputError(
            f"{folder} is a file of weights alone: give its folder, which needs {CONFIG} too, or a .gguf file"
        )
    if not folder.is_dir():
        folder = _download(str(source))
    name = str(source)
    opened = Source(name, "", folder, tokenizer, processor)
    config = opened.read(CONFIG)
    if not isinstance(config, dict):
        raise InputError(f"{folder} has no {CONFIG}: expected a folder written by save_pretrained")
    if config.get("auto_map"):
        raise InputError(
            f"{name} needs code of its own ({CONFIG}, auto_map), which is never run: not supported"
        )
    architectures = config.get("architectures") or [""]
    return config, _weights(folder), dataclasses.replace(opened, architecture=architectures[0])


def _download(name: str) -> Path:
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    wanted = FILES
    try:
        with contextlib.suppress(OSError, HfHubHTTPError):  # without network: use the cache
            if any(f.startswith("model.safetensors") for f in list_repo_files(name)):
                wanted = [f for f in FILES if not f.endswith(".bin")]  # the same weights twice
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=OTHERS))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as e:
        raise InputError(
            f"there is no folder {name!r}, and the Hugging Face hub has no model of that name: {e}"
        ) from e


def _weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder, from one file or from the shards listed in its index."""
    for file in WEIGHTS:
        if (folder / file).is_file():
            return mapping.read_weights(folder / file)
        index = folder / f"{file}.index.json"
        if index.is_file():
            shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            # names without folders: a downloaded index must not reach other files
            shards = sorted({Path(s).name for s in shard_of.values()})
            out: dict[str, Tensor] = {}
            for shard in shards:
                out |= mapping.read_weights(folder / shard)
            missing = sorted(set(shard_of) - set(out))
            if missing:
                raise InputError(f"{index} lists weights that its shards lack: {missing[:5]}")
            return out
    raise InputError(f"{folder} holds no weights: expected {' or '.join(WEIGHTS)}, as one file or in shards")
