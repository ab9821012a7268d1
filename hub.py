"""Models on the Hugging Face Hub, through huggingface_hub's own mixin, with a card that tells what is known.

The mixin is put around a model, not under its class, so that huggingface_hub is loaded only when it is asked for.
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

# what the Hub calls a task, by our class
PIPELINES = {
    "Captioner": "image-to-text",
    "Diffusion": "text-to-image",
    "LanguageModel": "text-generation",
    "MultimodalLM": "image-text-to-text",
    "Translator": "translation",
}
FILES = ["model.safetensors", "*.json"]


class Shared(ModelHubMixin):
    """A model as the mixin sees it; `pull` sets what loads a folder."""

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
    ) -> Shared:
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

    def generate_model_card(self, **about: Any) -> ModelCard:
        return card(self.model, **about)


def _shared(load: Callable[[str, str], Any]) -> type[Shared]:
    return type("Shared", (Shared,), {"load": staticmethod(load)})


def push(model: nn.Module, repo_id: str, **options: Any) -> str:
    """Save a model to the Hub as `huggingface_hub.ModelHubMixin.push_to_hub` does.

    Args:
        model: any part.
        repo_id: ``"someone/name"``; it is made where it does not exist.
        options: the mixin's: `commit_message`, `private`, `token`, `branch`, `create_pr`, and `model_card_kwargs`, what
            `card` takes.

    Returns:
        The commit's address.
    """
    card_options = {"repo_id": repo_id} | (options.pop("model_card_kwargs", None) or {})
    return Shared(model).push_to_hub(repo_id, model_card_kwargs=card_options, **options)


def pull(
    kind: type[Model], load: Callable[[str, str], Any], source: str | os.PathLike, **options: Any
) -> Model:
    """A model from a folder or the Hub, in eval mode.

    Args:
        kind: the class that it must be of.
        load: called as ``load(folder, device)``, gives the model (`parts.load`).
        source: a folder or ``"someone/name"``.
        options: the mixin's: `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`, and `device`.

    Raises:
        InputError: there is no such model, it is not one of this package, or of another class.
    """
    try:
        model = _shared(load).from_pretrained(os.fspath(source), **options).model
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        raise InputError(
            f"{source}: no such folder, and the Hub gave no model of that name ({type(e).__name__}: {e})"
        ) from e
    if not isinstance(model, kind):
        raise InputError(
            f"{source} is a {type(model).__name__}, not a {kind.__name__}: use wt.Part.from_pretrained"
        )
    return model


def card(
    model: nn.Module, repo_id: str = "someone/name", license: str | None = None, text: str = "", **data: Any
) -> ModelCard:
    """A model card with what the model itself knows.

    Args:
        model: any part.
        repo_id: for the lines that show how to load it.
        license: as the Hub names licences, e.g. ``"apache-2.0"``.
        text: what else to tell, in Markdown: what it was trained on, how good it is, what it is not for.
        data: more for the card's head, as `huggingface_hub.ModelCardData` takes it (`language`, `datasets`, ...).
    """
    from worldtokens import __version__

    kind = type(model).__name__
    fronts = {
        n: m for n, m in model.named_modules() if getattr(m, "modality", None) and hasattr(m, "collate")
    }
    pipeline = PIPELINES.get(kind)
    seen = {m.modality for m in fronts.values()}
    if kind == "Classifier" and seen <= {"image", "text", "audio", "video"} and len(seen) == 1:
        pipeline = f"{seen.copy().pop()}-classification"
    if kind == "CLIP" and {"image", "text"} <= seen:
        pipeline = "zero-shot-image-classification"
    if kind == "Encoder":
        pipeline = {"text": "feature-extraction", "image": "image-feature-extraction"}.get("".join(seen))
    head = ModelCardData(
        library_name="worldtokens",
        license=license,
        pipeline_tag=pipeline,
        tags=["worldtokens", *sorted(seen)],
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
    lines.append("## What goes in")
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
