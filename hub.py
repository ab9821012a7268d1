"""Pushing models to and loading them from the Hugging Face Hub, with `huggingface_hub.ModelHubMixin` and a model card.

The mixin wraps a model and is not a base class of it, so that huggingface_hub is imported only when used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn

from worldtokens.errors import InputError

Model = TypeVar("Model", bound=nn.Module)

# class -> the Hub's pipeline tag
PIPELINES = {
    "Captioner": "image-to-text",
    "Diffusion": "text-to-image",
    "LanguageModel": "text-generation",
    "MultimodalLM": "image-text-to-text",
    "Translator": "translation",
}
FILES = ["model.safetensors", "*.json"]


class HubModel(ModelHubMixin):
    """A model wrapped for the mixin; `pull` sets the function that loads a folder."""

    load: Callable[[str, str], Any]

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def _save_pretrained(self, save_directory: Path) -> None:
        self.model.save(save_directory)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        device: str = "cpu",
    ) -> HubModel:
        folder = model_id
        if not os.path.isdir(folder):
            folder = snapshot_download(
                model_id,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
                allow_patterns=FILES,
            )
        return cls(cls.load(folder, device))

    def generate_model_card(self, **options: Any) -> ModelCard:
        return card(self.model, **options)


def _with_loader(load: Callable[[str, str], Any]) -> type[HubModel]:
    return type("HubModel", (HubModel,), {"load": staticmethod(load)})


def push(model: nn.Module, repo_id: str, **options: Any) -> str:
    """Push a model to the Hub with `huggingface_hub.ModelHubMixin.push_to_hub`.

    Args:
        model: any `Part`.
        repo_id: ``"someone/name"``; created if it does not exist.
        options: arguments of the mixin: `commit_message`, `private`, `token`, `branch`, `create_pr`, and
            `model_card_kwargs`, the arguments of `card`.

    Returns:
        The URL of the commit.
    """
    card_options = {"repo_id": repo_id} | (options.pop("model_card_kwargs", None) or {})
    return HubModel(model).push_to_hub(repo_id, model_card_kwargs=card_options, **options)


def pull(
    model_class: type[Model], load: Callable[[str, str], Any], source: str | os.PathLike, **options: Any
) -> Model:
    """Load a model from a folder or the Hub, in eval mode.

    Args:
        model_class: the expected class.
        load: ``load(folder, device)`` returns the model (`parts.load`).
        source: a folder or ``"someone/name"``.
        options: arguments of the mixin: `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`, and `device`.

    Raises:
        InputError: the model does not exist, is not one of this package, or is of another class.
    """
    try:
        model = _with_loader(load).from_pretrained(os.fspath(source), **options).model
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        raise InputError(
            f"{source}: no such folder, and no such model on the Hub ({type(e).__name__}: {e})"
        ) from e
    if not isinstance(model, model_class):
        raise InputError(
            f"{source} is a {type(model).__name__}, not a {model_class.__name__}: use wt.Part.from_pretrained"
        )
    return model


def card(
    model: nn.Module, repo_id: str = "someone/name", license: str | None = None, text: str = "", **data: Any
) -> ModelCard:
    """A model card made from the model's settings.

    Args:
        model: any `Part`.
        repo_id: used in the loading example.
        license: the Hub's name of a licence, e.g. ``"apache-2.0"``.
        text: further Markdown: training data, evaluation, limitations.
        data: further metadata, arguments of `huggingface_hub.ModelCardData` (`language`, `datasets`, ...).
    """
    from worldtokens import __version__

    kind = type(model).__name__
    fronts = {
        n: m for n, m in model.named_modules() if getattr(m, "modality", None) and hasattr(m, "collate")
    }
    pipeline = PIPELINES.get(kind)
    modalities = {m.modality for m in fronts.values()}
    single = next(iter(modalities)) if len(modalities) == 1 else None
    if kind == "Classifier" and single in ("image", "text", "audio", "video"):
        pipeline = f"{single}-classification"
    if kind == "CLIP" and {"image", "text"} <= modalities:
        pipeline = "zero-shot-image-classification"
    if kind == "Encoder":
        pipeline = {"text": "feature-extraction", "image": "image-feature-extraction"}.get(single)
    head = ModelCardData(
        library_name="worldtokens",
        license=license,
        pipeline_tag=pipeline,
        tags=["worldtokens", *sorted(modalities)],
        **data,
    )
    count = sum(p.numel() for p in model.parameters())
    lines = [
        f"# {repo_id.rpartition('/')[2]}",
        f"A `{kind}` of [worldtokens](https://pypi.org/project/worldtokens) {__version__} with {count:,} parameters.",
        f"```python\nimport worldtokens as wt\n\nmodel = wt.{kind}.from_pretrained({repo_id!r})\n```"
        if model.config()["class"] == f"worldtokens.{kind}"
        else f"```python\nimport worldtokens as wt\n\nmodel = wt.Part.from_pretrained({repo_id!r})\n```",
    ]
    if text:
        lines.append(text.strip())
    if getattr(model, "names", None):
        names = list(model.names)
        more = f" and {len(names) - 50} more" if len(names) > 50 else ""
        lines.append(f"Classes ({len(names)}): {', '.join(map(str, names[:50]))}{more}")
    lines.append("## Input")
    for name, front in fronts.items():
        rows = [f"| {k} | `{_short(v)}` |" for k, v in front.config()["args"].items()]
        lines.append(
            "\n".join([f"`{name}`: {type(front).__name__}", "", "| setting | value |", "|---|---|", *rows])
        )
    return ModelCard(f"---\n{head.to_yaml()}\n---\n\n" + "\n\n".join(lines) + "\n")


def _short(value: Any) -> str:
    if isinstance(value, dict) and "class" in value:
        return value["class"].rpartition(".")[2]
    return str(value["file"] if isinstance(value, dict) and set(value) == {"file"} else value).replace(
        "|", "\\|"
    )
