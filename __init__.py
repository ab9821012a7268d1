"""worldtokens: turn the world into tokens, then learn the dependencies between them.

Every public name is listed here and loaded when first used, so that `worldtokens --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "AdditiveDecoder": "backbone.additive",
    "AttentionPool": "backbone.pooling",
    "AudioConfig": "tokenizers.audio.config",
    "AudioTokenizer": "tokenizers.audio.tokenizer",
    "Autoencoder": "tasks.image_lm.autoencoder",
    "Batch": "tokenizers.base",
    "CLIP": "tasks.contrastive.model",
    "Captioner": "tasks.seq2seq.captioner",
    "ChatModel": "tasks.language.chat",
    "Classifier": "tasks.classification.model",
    "Diffusion": "tasks.diffusion.model",
    "DiscreteTokenizer": "tokenizers.discrete.tokenizer",
    "Encoder": "tasks.embedding.model",
    "FSQ": "tokenizers.discrete.quantize",
    "ImagePreprocess": "tokenizers.image.preprocess",
    "ImageTokenizer": "tokenizers.image.tokenizer",
    "InputError": "errors",
    "LanguageModel": "tasks.language.model",
    "LatentTokenizer": "tokenizers.latents.tokenizer",
    "Layout": "layout",
    "MultimodalLM": "tasks.multimodal.model",
    "OptimSettings": "training.optim",
    "PairTokenizer": "tokenizers.text.pairs",
    "Part": "parts",
    "PatchEmbedConfig": "tokenizers.image.embedding",
    "ImageLM": "tasks.image_lm.model",
    "PointTokenizer": "tokenizers.points.tokenizer",
    "Projector": "backbone.projector",
    "Recurrent": "backbone.recurrent",
    "TokenReducer": "tokenizers.reduce.tokenizer",
    "Resampler": "backbone.resampler",
    "SeriesTokenizer": "tokenizers.series.tokenizer",
    "Task": "tasks.base",
    "TextTokenizer": "tokenizers.text.tokenizer",
    "Tokenizer": "tokenizers.base",
    "Tokens": "tokens",
    "TrainReport": "training.settings",
    "TrainSettings": "training.settings",
    "Transformer": "backbone.transformer",
    "TransformerConfig": "backbone.config",
    "Translator": "tasks.seq2seq.translator",
    "VectorQuantizer": "tokenizers.discrete.quantize",
    "VideoTokenizer": "tokenizers.video.tokenizer",
    "ViewTokenizer": "tokenizers.views.tokenizer",
    "alignment_figure": "figures.attention",
    "attention_figure": "figures.attention",
    "attention_maps": "backbone.maps",
    "build": "parts",
    "confusion_figure": "figures.confusion",
    "export_onnx": "pretrained.export",
    "export_program": "pretrained.export",
    "freeze": "pretrained.surgery.freeze",
    "from_hf": "pretrained.hf.load",
    "from_open_clip": "pretrained.open_clip.load",
    "from_timm": "pretrained.timm.load",
    "grow_vocabulary": "pretrained.surgery.vocabulary",
    "linear_probe": "tasks.metrics.probe",
    "load": "parts",
    "mask_tokens": "tokenizers.reduce.tokenizer",
    "merge_lora": "pretrained.surgery.lora",
    "merge_tokens": "tokenizers.reduce.tokenizer",
    "modality_id": "layout",
    "open_rows": "data.manifests",
    "pack": "tokens",
    "resize_context": "pretrained.surgery.context",
    "resize_images": "pretrained.surgery.resize",
    "retrieval_table": "tasks.metrics.retrieval",
    "adapt_tokenizer": "pretrained.surgery.adapt",
    "shrink_vocabulary": "pretrained.surgery.vocabulary",
    "train": "training.loop",
    "from_autoencoder": "tasks.image_lm.autoencoder",
    "unfreeze": "pretrained.surgery.freeze",
    "visible": "tokens",
    "weights": "data.weights",
    "zero_shot_top1": "tasks.metrics.probe",
}
_MODULES = {room: room for room in ("apps", "backbone", "data", "tasks", "testing", "tokenizers", "training")}
_MODULES["samples"] = "data.samples"

__all__ = ["__version__", *sorted(_HOME), *_MODULES]


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


if TYPE_CHECKING:
    from worldtokens.backbone.additive import AdditiveDecoder
    from worldtokens.backbone.config import TransformerConfig
    from worldtokens.backbone.maps import attention_maps
    from worldtokens.backbone.pooling import AttentionPool
    from worldtokens.backbone.projector import Projector
    from worldtokens.backbone.recurrent import Recurrent
    from worldtokens.backbone.resampler import Resampler
    from worldtokens.backbone.transformer import Transformer
    from worldtokens.data import samples
    from worldtokens.data.manifests import open_rows
    from worldtokens.data.weights import weights
    from worldtokens.errors import InputError
    from worldtokens.figures.attention import alignment_figure, attention_figure
    from worldtokens.figures.confusion import confusion_figure
    from worldtokens.layout import Layout, modality_id
    from worldtokens.parts import Part, build, load
    from worldtokens.pretrained.export import export_onnx, export_program
    from worldtokens.pretrained.hf.load import from_hf
    from worldtokens.pretrained.open_clip.load import from_open_clip
    from worldtokens.pretrained.surgery.adapt import adapt_tokenizer
    from worldtokens.pretrained.surgery.context import resize_context
    from worldtokens.pretrained.surgery.freeze import freeze, unfreeze
    from worldtokens.pretrained.surgery.lora import merge_lora
    from worldtokens.pretrained.surgery.resize import resize_images
    from worldtokens.pretrained.surgery.vocabulary import grow_vocabulary, shrink_vocabulary
    from worldtokens.pretrained.timm.load import from_timm
    from worldtokens.tasks.base import Task
    from worldtokens.tasks.classification.model import Classifier
    from worldtokens.tasks.contrastive.model import CLIP
    from worldtokens.tasks.diffusion.model import Diffusion
    from worldtokens.tasks.embedding.model import Encoder
    from worldtokens.tasks.image_lm.autoencoder import Autoencoder, from_autoencoder
    from worldtokens.tasks.image_lm.model import ImageLM
    from worldtokens.tasks.language.chat import ChatModel
    from worldtokens.tasks.language.model import LanguageModel
    from worldtokens.tasks.metrics.probe import linear_probe, zero_shot_top1
    from worldtokens.tasks.metrics.retrieval import retrieval_table
    from worldtokens.tasks.multimodal.model import MultimodalLM
    from worldtokens.tasks.seq2seq.captioner import Captioner
    from worldtokens.tasks.seq2seq.translator import Translator
    from worldtokens.tokenizers.audio.config import AudioConfig
    from worldtokens.tokenizers.audio.tokenizer import AudioTokenizer
    from worldtokens.tokenizers.base import Batch, Tokenizer
    from worldtokens.tokenizers.discrete.quantize import FSQ, VectorQuantizer
    from worldtokens.tokenizers.discrete.tokenizer import DiscreteTokenizer
    from worldtokens.tokenizers.image.embedding import PatchEmbedConfig
    from worldtokens.tokenizers.image.preprocess import ImagePreprocess
    from worldtokens.tokenizers.image.tokenizer import ImageTokenizer
    from worldtokens.tokenizers.latents.tokenizer import LatentTokenizer
    from worldtokens.tokenizers.points.tokenizer import PointTokenizer
    from worldtokens.tokenizers.reduce.tokenizer import TokenReducer, mask_tokens, merge_tokens
    from worldtokens.tokenizers.series.tokenizer import SeriesTokenizer
    from worldtokens.tokenizers.text.pairs import PairTokenizer
    from worldtokens.tokenizers.text.tokenizer import TextTokenizer
    from worldtokens.tokenizers.video.tokenizer import VideoTokenizer
    from worldtokens.tokenizers.views.tokenizer import ViewTokenizer
    from worldtokens.tokens import Tokens, pack, visible
    from worldtokens.training.loop import train
    from worldtokens.training.optim import OptimSettings
    from worldtokens.training.settings import TrainReport, TrainSettings
