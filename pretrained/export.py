"""Export of encoders as a graph without Python: `torch.export`, and ONNX for onnxruntime.

    wt.export_onnx(model, "image.onnx", column="image")

Inputs are preprocessed: images as normalised floats, texts as token ids with lengths. A JSON file beside the graph holds the
preprocessing settings, and a tokenizer.json the vocabulary. The batch size is dynamic; so are the length of texts, up to
the context, and the image size of a front-end with native aspect.

Shapes: B samples, N ids of the longest text, D dim of an embedding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from worldtokens.backbone.recurrent import Recurrent
from worldtokens.errors import InputError
from worldtokens.parts import write_whole
from worldtokens.tasks.classification.model import Classifier
from worldtokens.tasks.contrastive.model import CLIP
from worldtokens.tasks.embedding.model import Encoder
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokenizers.image.tokenizer import ImageTokenizer
from worldtokens.tokenizers.text.tokenizer import TextTokenizer


def export_program(model: nn.Module, column: str | None = None) -> torch.export.ExportedProgram:
    """Export one column of a model with `torch.export`.

    Args:
        model: a `CLIP` (one of its towers), a `Classifier` or an `Encoder`; exported in eval mode, left as it was.
        column: name of the front-end, e.g. ``"image"``; needed if there are several.

    Returns:
        A program whose `module()` takes ``pixels`` (B, 3, H, W), normalised floats, or ``ids`` (B, N) int64 and
        ``lengths`` (B,) int64, each 1 to N, and returns (B, D) embeddings or (B, classes) logits. Ids after a
        text's length are ignored. A text front-end with ``pad_to_context=True`` takes ``ids`` alone, padded to the context.
        Images of a front-end without a size have sides of two patches or more, multiples of the patch.

    Raises:
        InputError: the model or its front-end cannot be exported.
    """
    return _export(_graph(model, column))


def export_onnx(
    model: nn.Module, path: str | os.PathLike, column: str | None = None, opset: int = 18
) -> Path:
    """Export one column of a model to ONNX, with its preprocessing settings as JSON.

    Beside ``image.onnx`` there is ``image.json``; for text also ``text.tokenizer.json``, the vocabulary for Hugging Face's
    `tokenizers`. Inputs and outputs are those of `export_program`; the output is named ``embeddings`` or ``logits``.

    Args:
        model, column: as in `export_program`.
        path: path of the file, ending in ``.onnx``.
        opset: ONNX operator set version, 18 or more.

    Returns:
        The path.

    Raises:
        InputError: as `export_program`, or onnx or onnxscript is not installed.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise InputError(f"{path}: expected a name that ends in .onnx")
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as e:
        raise InputError(f"writing ONNX needs {e.name}: pip install worldtokens[export]") from e
    graph = _graph(model, column)
    program = _export(graph)
    with _quiet():
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            input_names=list(graph.inputs),
            output_names=[graph.output],
            verbose=False,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx_program.save(path)
    description = graph.description()
    if isinstance(graph.front, TextTokenizer):
        description["preprocess"]["vocabulary"] = f"{path.stem}.tokenizer.json"
        graph.front.save_vocabulary(path.with_name(description["preprocess"]["vocabulary"]))
    write_whole(
        path.with_suffix(".json"), (json.dumps(description, indent=2, ensure_ascii=False) + "\n").encode()
    )
    return path


@dataclasses.dataclass
class _Graph:
    """A module over plain tensors, example inputs, and the dynamic axes of the inputs."""

    model: nn.Module
    column: str
    front: Tokenizer
    parts: dict[str, nn.Module]  # the modules that `run` uses: the graph holds no other weights
    run: Callable[[Batch], Tensor]
    output: str
    inputs: dict[str, Tensor] = dataclasses.field(init=False)
    dynamic: dict[str, dict[int, Any]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        rows = torch.export.Dim("rows")
        front, device = self.front, next(self.model.parameters()).device
        if isinstance(front, ImageTokenizer):
            self.inputs, self.dynamic = _image_inputs(front, rows)
        else:
            self.inputs, self.dynamic = _text_inputs(cast(TextTokenizer, front), rows)
        dtype = next(self.model.parameters()).dtype
        self.inputs = {
            k: v.to(device, dtype if v.is_floating_point() else None) for k, v in self.inputs.items()
        }

    def description(self) -> dict[str, Any]:
        """Inputs, output and preprocessing settings, for programs in other languages."""
        shapes = {}
        for name, value in self.inputs.items():
            sides = [
                str(self.dynamic[name][i].__name__) if i in self.dynamic[name] else n
                for i, n in enumerate(value.shape)
            ]
            shapes[name] = {"type": str(value.dtype).removeprefix("torch."), "shape": sides}
        out: dict[str, Any] = {"model": type(self.model).__name__, "column": self.column, "inputs": shapes}
        out["output"] = {"name": self.output}
        names = getattr(self.model, "names", None)
        if self.output == "logits" and names:
            out["output"]["classes"] = list(names)
        return out | {"preprocess": _preprocess(self.front)}


class _Module(nn.Module):
    """Forward of a graph: named tensors in, one tensor out."""

    def __init__(self, graph: _Graph) -> None:
        super().__init__()
        self.parts, self.run = nn.ModuleDict(graph.parts), graph.run


class _ImageModule(_Module):
    def forward(self, pixels: Tensor) -> Tensor:
        return self.run(Batch(pixels=pixels))


class _TextModule(_Module):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.run(Batch(ids=ids, lengths=lengths))


class _PaddedTextModule(_Module):
    def forward(self, ids: Tensor) -> Tensor:
        return self.run(Batch(ids=ids, lengths=None))


def _graph(model: nn.Module, column: str | None) -> _Graph:
    if isinstance(model, CLIP):
        fronts = dict(model.tokenizers)
    elif isinstance(model, Classifier):
        fronts = {model.column: model.tokenizers[model.column]}
    elif isinstance(model, Encoder):
        fronts = {model.tokenizer.modality: model.tokenizer}
    else:
        raise InputError(
            f"a {type(model).__name__} cannot be exported: CLIP, Classifier and Encoder can. Build an Encoder from the "
            "front-end and trunk that you need"
        )
    if column is None and len(fronts) > 1:
        raise InputError(f"this model has the columns {list(fronts)}: name one, column=")
    column = next(iter(fronts)) if column is None else column
    if column not in fronts:
        raise InputError(f"this model has no column {column!r}; it has {list(fronts)}")
    front = fronts[column]
    if not isinstance(front, ImageTokenizer | TextTokenizer):
        raise InputError(
            f"the {column!r} front-end is a {type(front).__name__}: images (ImageTokenizer) and text (TextTokenizer) "
            "can be exported"
        )
    if isinstance(front, ImageTokenizer) and front.size is not None and front.preprocess.resize == "pad":
        raise InputError(
            "resize='pad' drops patches of background, which makes the shape depend on the image: export with "
            "resize='crop' or 'squash'"
        )
    trunk = model._trunk(column) if isinstance(model, CLIP) else model.trunk
    if isinstance(trunk, Recurrent):
        raise InputError("a Recurrent trunk cannot be exported with a dynamic batch size: use a Transformer")
    parts: dict[str, nn.Module] = {"front": front, "trunk": trunk}
    if isinstance(model, CLIP):
        parts |= {"projection": model.projections[column]}
        parts |= {"standard": model.standardizers[column]} if model.standardizers else {}
        parts |= {"pool": model.pools[column]} if column in model.pools else {}
        return _Graph(model, column, front, parts, lambda batch: model.encode(column, batch), "embeddings")
    parts |= {
        name: m for name, m in model.named_children() if name not in ("tokenizers", "tokenizer", "trunk")
    }
    if isinstance(model, Encoder):
        return _Graph(model, column, front, parts, model.features, "embeddings")
    output = "logits" if model.classes else "embeddings"
    return _Graph(
        model, column, front, parts, lambda batch: model.head(model.features({column: batch})), output
    )


def _image_inputs(front: ImageTokenizer, rows: Any) -> tuple[dict[str, Tensor], dict[str, dict[int, Any]]]:
    if front.size is not None:
        return {"pixels": torch.zeros(2, 3, *front.size)}, {"pixels": {0: rows}}
    dynamic: dict[int, Any] = {0: rows}
    for axis, (name, p) in enumerate(zip(("height", "width"), front.patch, strict=True), 2):
        # min=2: an axis of length 1 would be exported as a broadcast
        patches = torch.export.Dim(f"{name}_patches", min=2, max=front.max_tokens)
        dynamic[axis] = p * patches if p > 1 else patches
    # different example sides, so that they are not specialised as equal
    return {"pixels": torch.zeros(2, 3, 3 * front.patch[0], 5 * front.patch[1])}, {"pixels": dynamic}


def _text_inputs(front: TextTokenizer, rows: Any) -> tuple[dict[str, Tensor], dict[str, dict[int, Any]]]:
    if front.pad_to_context:
        ids = torch.full((2, cast(int, front.context)), front.pad_id)
        return {"ids": ids}, {"ids": {0: rows}}
    max_length = front.context or 2**20
    ids = torch.full((2, min(max_length, 7)), front.pad_id)
    dynamic: dict[int, Any] = {0: rows}
    if max_length > 1:
        dynamic[1] = torch.export.Dim("length", min=1, max=max_length)
    return {"ids": ids, "lengths": torch.tensor([ids.shape[1], 1])}, {"ids": dynamic, "lengths": {0: rows}}


def _export(graph: _Graph) -> torch.export.ExportedProgram:
    kind = (
        _ImageModule
        if "pixels" in graph.inputs
        else _TextModule
        if "lengths" in graph.inputs
        else _PaddedTextModule
    )
    was_training = graph.model.training
    graph.model.eval()
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(
                kind(graph), tuple(graph.inputs.values()), dynamic_shapes=dict(graph.dynamic), strict=False
            )
    finally:
        graph.model.train(was_training)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings and logs of the exporter."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _preprocess(front: Tokenizer) -> dict[str, Any]:
    if isinstance(front, ImageTokenizer):
        return {
            "kind": "image",
            "channels": "RGB",
            "layout": "NCHW",
            "size": None if front.size is None else list(front.size),
            "patch": list(front.patch),
            "max_patches": front.max_tokens if front.size is None else None,
            "resize": front.preprocess.resize,
            "crop_pct": front.preprocess.crop_pct,
            "interpolation": front.preprocess.interpolation,
            "background": list(front.preprocess.background),
            "scale": 1 / 255,
            "mean": list(front.mean),
            "std": list(front.std),
        }
    token = front.backend.id_to_token
    return {
        "kind": "text",
        "context": front.context,
        "start": None if front.start_id is None else {"id": front.start_id, "token": token(front.start_id)},
        "end": None if front.end_id is None else {"id": front.end_id, "token": token(front.end_id)},
        "pad": {"id": front.pad_id, "token": token(front.pad_id)},
        "pad_to_context": front.pad_to_context,
        "normalize": front.normalize,
    }
