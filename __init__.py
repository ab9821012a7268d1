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
    "AudioTokenizer": "tokenizers.audio",
    "Autoencoder": "tasks.autoencoding",
    "Batch": "tokenizers.base",
    "CLIP": "tasks.contrastive",
    "Captioner": "tasks.captioning",
    "ChatModel": "tasks.chat",
    "Classifier": "tasks.classification",
    "Diffusion": "tasks.diffusion",
    "DiscreteTokenizer": "tokenizers.discrete",
    "Encoder": "tasks.encoder",
    "FSQ": "tokenizers.quantize",
    "ImageTokenizer": "tokenizers.image",
    "InputError": "errors",
    "LanguageModel": "tasks.language_model",
    "LatentTokenizer": "tokenizers.latents",
    "Layout": "tokens",
    "MultimodalLM": "tasks.multimodal_lm",
    "OptimSettings": "training.optim",
    "PairTokenizer": "tokenizers.pairs",
    "Part": "parts",
    "PictureLM": "tasks.picture_language_model",
    "PointTokenizer": "tokenizers.points",
    "Projector": "backbone.projector",
    "Recurrent": "backbone.recurrent",
    "Reduced": "tokenizers.reduce",
    "Resampler": "backbone.resampler",
    "SeriesTokenizer": "tokenizers.series",
    "Task": "tasks.base",
    "TextTokenizer": "tokenizers.text",
    "Tokenizer": "tokenizers.base",
    "Tokens": "tokens",
    "TrainReport": "training.settings",
    "TrainSettings": "training.settings",
    "Transformer": "backbone.transformer",
    "TransformerConfig": "backbone.config",
    "Translator": "tasks.translation",
    "VectorQuantizer": "tokenizers.quantize",
    "VideoTokenizer": "tokenizers.video",
    "ViewTokenizer": "tokenizers.views",
    "alignment_figure": "apps.attention_look",
    "attention_figure": "apps.attention_look",
    "attention_maps": "backbone.maps",
    "build": "parts",
    "draw_confusion": "apps.confusion",
    "export_onnx": "pretrained.export",
    "export_program": "pretrained.export",
    "freeze": "pretrained.freezing",
    "from_hf": "pretrained.from_hf",
    "from_open_clip": "pretrained.from_open_clip",
    "from_timm": "pretrained.from_timm",
    "grow_vocabulary": "pretrained.vocabulary",
    "linear_probe": "tasks.probe",
    "load": "parts",
    "mask_tokens": "tokenizers.reduce",
    "merge_lora": "pretrained.lora",
    "merge_tokens": "tokenizers.reduce",
    "modality_id": "tokens",
    "open_rows": "data.manifests",
    "pack": "packing",
    "resize_context": "pretrained.vocabulary",
    "resize_pictures": "pretrained.resize",
    "retrieval_table": "tasks.retrieval",
    "reuse": "pretrained.reuse",
    "shrink_vocabulary": "pretrained.vocabulary",
    "train": "training.loop",
    "trained_codes": "tasks.autoencoding",
    "unfreeze": "pretrained.freezing",
    "visible": "tokens",
    "weights": "data.weights",
    "zero_shot_top1": "tasks.probe",
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
    from worldtokens.apps.attention_look import alignment_figure, attention_figure
    from worldtokens.apps.confusion import draw_confusion
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
    from worldtokens.packing import pack
    from worldtokens.parts import Part, build, load
    from worldtokens.pretrained.export import export_onnx, export_program
    from worldtokens.pretrained.freezing import freeze, unfreeze
    from worldtokens.pretrained.from_hf import from_hf
    from worldtokens.pretrained.from_open_clip import from_open_clip
    from worldtokens.pretrained.from_timm import from_timm
    from worldtokens.pretrained.lora import merge_lora
    from worldtokens.pretrained.resize import resize_pictures
    from worldtokens.pretrained.reuse import reuse
    from worldtokens.pretrained.vocabulary import grow_vocabulary, resize_context, shrink_vocabulary
    from worldtokens.tasks.autoencoding import Autoencoder, trained_codes
    from worldtokens.tasks.base import Task
    from worldtokens.tasks.captioning import Captioner
    from worldtokens.tasks.chat import ChatModel
    from worldtokens.tasks.classification import Classifier
    from worldtokens.tasks.contrastive import CLIP
    from worldtokens.tasks.diffusion import Diffusion
    from worldtokens.tasks.encoder import Encoder
    from worldtokens.tasks.language_model import LanguageModel
    from worldtokens.tasks.multimodal_lm import MultimodalLM
    from worldtokens.tasks.picture_language_model import PictureLM
    from worldtokens.tasks.probe import linear_probe, zero_shot_top1
    from worldtokens.tasks.retrieval import retrieval_table
    from worldtokens.tasks.translation import Translator
    from worldtokens.tokenizers.audio import AudioTokenizer
    from worldtokens.tokenizers.base import Batch, Tokenizer
    from worldtokens.tokenizers.discrete import DiscreteTokenizer
    from worldtokens.tokenizers.image import ImageTokenizer
    from worldtokens.tokenizers.latents import LatentTokenizer
    from worldtokens.tokenizers.pairs import PairTokenizer
    from worldtokens.tokenizers.points import PointTokenizer
    from worldtokens.tokenizers.quantize import FSQ, VectorQuantizer
    from worldtokens.tokenizers.reduce import Reduced, mask_tokens, merge_tokens
    from worldtokens.tokenizers.series import SeriesTokenizer
    from worldtokens.tokenizers.text import TextTokenizer
    from worldtokens.tokenizers.video import VideoTokenizer
    from worldtokens.tokenizers.views import ViewTokenizer
    from worldtokens.tokens import Layout, Tokens, modality_id, visible
    from worldtokens.training.loop import train
    from worldtokens.training.optim import OptimSettings
    from worldtokens.training.settings import TrainReport, TrainSettings
