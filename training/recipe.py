"""A recipe is one YAML file: what to train, on what, how. `worldtokens train RECIPE [--section.key value ...]`

    model: {class: worldtokens.CLIP, args: {...}}      # the form of a saved model's config.json
    data:
      train: emoji                                     # or {source: pairs.csv, columns: {image: file}, ...}
      validation: {split: validation}                  # what is not given here is as in `train`
      augment: {image: [{class: torchvision.transforms.v2.RandomResizedCrop, args: {size: 64}}]}
    optim: {lr: 1e-3}                                  # OptimSettings
    train: {steps: 1000, out: runs/clip}               # TrainSettings

jsonargparse checks every value against the type hints of the class or function that takes it, and unknown keys
are errors that name them. Any value can be changed from the command line by its path, with `args` left out or
not: `--model.dim 128`, `--model.tokenizers.image.patch 8`, `--data.augment.image.0.size 48`.

A text front-end's `vocabulary: {train: 4000}` is learned from the training rows' own column before the model is
built; `{file: tokenizer.json}`, as saved models have it, is looked up beside the recipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from torch import nn

from worldtokens.data.manifests import open_rows
from worldtokens.errors import InputError
from worldtokens.parts import write_whole
from worldtokens.tasks.base import Task
from worldtokens.training import checkpoint
from worldtokens.training.data import seed_all
from worldtokens.training.loop import train
from worldtokens.training.optim import OptimSettings
from worldtokens.training.settings import TrainReport, TrainSettings

RECIPES = Path(__file__).parent.parent / "recipes"
SECTIONS = ("model", "data", "optim", "train")


class _Yaml(yaml.SafeLoader):
    """YAML in which 1e-3 is a number and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def shipped() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def find(recipe: str) -> Path:
    """A recipe by path, or by shipped name from anywhere."""
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    if recipe in shipped():
        return RECIPES / f"{recipe}.yaml"
    raise InputError(f"{recipe}: no such file, and no shipped recipe ({', '.join(shipped()) or 'none'})")


@dataclasses.dataclass
class Recipe:
    """A recipe, read and checked; nothing is opened or built yet.

    Args:
        path: where it was read.
        values: all of it, defaults included, in the form in which it is written.
        optim: how weights are updated.
        train: how the run goes.
    """

    path: Path
    values: dict[str, Any]
    optim: OptimSettings
    train: TrainSettings
    _parser: ArgumentParser

    @classmethod
    def read(cls, recipe: str, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe and check it whole.

        Args:
            recipe: a path or a shipped name.
            overrides: as on the command line: ``["--optim.lr", "1e-3"]``.

        Raises:
            InputError: the file, a key or a value cannot be used.
        """
        path = find(recipe)
        values = _load(path.read_text(encoding="utf-8"), path)
        if not isinstance(values, dict) or "model" not in values or "data" not in values:
            raise InputError(f"{path} is not a recipe: expected the sections {', '.join(SECTIONS)}")
        _normalise(values, path)
        for place, value in _pairs(overrides):
            _set(values, place, value)
        _normalise(values, path)
        if unknown := set(values) - set(SECTIONS):
            raise InputError(f"{path}: unknown section {sorted(unknown)}, expected {', '.join(SECTIONS)}")
        parser = recipe_parser(validation="validation" in values["data"])
        try:
            checked = parser.parse_object(_translate(values, to_jsonargparse=True, folder=path.parent))
            made = {k: _built(parser, checked, k) for k in ("optim", "train")}
        except (argparse.ArgumentError, TypeError) as e:
            message = (
                str(getattr(e, "message", e)).replace("class_path", "class").replace("init_args", "args")
            )
            raise InputError(f"{path}: {' '.join(message.split())}") from e
        whole = _translate(_dump(parser, checked), to_jsonargparse=False)
        if lost := _lost(_translate(values, False), whole):
            raise InputError(f"{path}: unknown key {lost}")
        return cls(path, whole, **made, _parser=parser)

    def __str__(self) -> str:
        return yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True, width=100)

    def rows(self) -> tuple[Any, Any]:
        """The training rows, and the validation rows or None."""
        sets = [self.values["data"].get(k) for k in ("train", "validation")]
        return tuple(open_rows(**s) if s else None for s in sets)

    def build(self, rows: Any) -> tuple[Task, dict[str, Callable]]:
        """The task, its weights drawn from `train.seed`, and what augments each column."""
        with tempfile.TemporaryDirectory() as folder:
            model = _with_vocabularies(self.values["model"], rows, Path(folder))
            values = _translate(self.values | {"model": model}, to_jsonargparse=True, folder=self.path.parent)
            checked = self._parser.parse_object(values)
            seed_all(self.train.seed)
            try:
                made = _instantiate(self._parser, checked)
            except (ValueError, TypeError) as e:
                raise e if isinstance(e, InputError) else InputError(f"{self.path}: {e}") from e
        augment = {k: _Chain(v) for k, v in (made["data"]["augment"] or {}).items()}
        if extra := set(augment) - set(made["model"].tokenizers):
            raise InputError(
                f"{self.path}: data.augment names {sorted(extra)}, the model reads {list(made['model'].tokenizers)}"
            )
        return made["model"], augment

    def run(self) -> tuple[Task, TrainReport]:
        """Open, build, train."""
        out = Path(self.train.out)
        checkpoint.claim(out, self.train.resume, self.train.overwrite)
        rows, validation = self.rows()
        task, augment = self.build(rows)
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "recipe.yaml", str(self).encode())
        report = train(task, rows, validation, train=self.train, optim=self.optim, augment=augment)
        return task, report


class _Chain:
    """Transforms, one after another."""

    def __init__(self, transforms: Sequence[Callable]) -> None:
        self.transforms = transforms

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            raw = transform(raw)
        return raw


# ---- parsing ------------------------------------------------------------------------------------------


def recipe_parser(validation: bool, model: bool = True) -> ArgumentParser:
    parser = ArgumentParser(prog="worldtokens train", exit_on_error=False, add_help=False)
    if model:
        parser.add_argument("--model", type=Task, required=True)
    parser.add_function_arguments(open_rows, "data.train")
    if validation:
        parser.add_function_arguments(open_rows, "data.validation")
    parser.add_argument(
        "--data.augment",
        type=dict[str, list[nn.Module]],
        default={},
        help="by column, transforms of a raw tensor in training",
    )
    parser.add_class_arguments(OptimSettings, "optim")
    parser.add_class_arguments(TrainSettings, "train")
    return parser


def _instantiate(parser: ArgumentParser, checked: Any) -> Any:
    made = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
    return made(checked)


def _built(parser: ArgumentParser, checked: Any, section: str) -> Any:
    cls = {"optim": OptimSettings, "train": TrainSettings}[section]
    return cls(**checked[section].as_dict())


def _dump(parser: ArgumentParser, checked: Any) -> dict:
    try:
        text = parser.dump(checked, skip_unset=False)
    except TypeError:  # the switch's name before jsonargparse 4.49
        text = parser.dump(checked, skip_none=False)
    return yaml.load(text, _Yaml)


def _lost(given: Any, kept: Any, place: str = "") -> str | None:
    """The path of a key that was given and is not in what was understood; jsonargparse passes over some."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            here = f"{place}.{key}".lstrip(".")
            if key not in kept:
                return here
            if lost := _lost(value, kept[key], here):
                return lost
    return None


def _load(text: str, where: Any) -> Any:
    try:
        return yaml.load(text, _Yaml)
    except yaml.YAMLError as e:
        raise InputError(f"{where}: not valid YAML: {e}") from e


def _normalise(values: dict, path: Path) -> None:
    """Short forms written out: `train: emoji`, `validation: {split: ...}`, a class without `args`."""
    data = values["data"]
    if not isinstance(data, dict) or "train" not in data:
        raise InputError(f"{path}: data.train is missing: give a path, or a named set such as emoji")
    for side in ("train", "validation"):
        if isinstance(data.get(side), str):
            data[side] = {"source": data[side]}
        if side in data and data[side] is None:
            del data[side]
    if isinstance(data.get("validation"), dict) and "source" not in data["validation"]:
        data["validation"] = {**data["train"], **data["validation"]}


def _translate(value: Any, to_jsonargparse: bool, folder: Path | None = None) -> Any:
    """Between ``{class, args}`` and jsonargparse's ``{class_path, init_args}``, at every depth."""
    names = [("class", "args"), ("class_path", "init_args")]
    (old_class, old_args), (new_class, new_args) = names if to_jsonargparse else names[::-1]
    if isinstance(value, list | tuple):
        return [_translate(v, to_jsonargparse, folder) for v in value]
    if isinstance(value, dict):
        if set(value) == {"file"} and to_jsonargparse and folder is not None:
            return str(folder / Path(str(value["file"])).name)
        if old_class in value and set(value) <= {old_class, old_args}:
            args = _translate(value.get(old_args) or {}, to_jsonargparse, folder)
            return {new_class: value[old_class], new_args: args}
        if set(value) == {"train"} and isinstance(value["train"], int) and to_jsonargparse:
            return f"train:{value['train']}"  # a string passes where a vocabulary's path is meant
        return {k: _translate(v, to_jsonargparse, folder) for k, v in value.items()}
    if isinstance(value, str) and not to_jsonargparse and re.fullmatch(r"train:\d+", value):
        return {"train": int(value[6:])}
    return value


def _pairs(words: Sequence[str]) -> list[tuple[list[str], Any]]:
    """["--a.b", "1", "--c=x", "--flag"] -> [(["a", "b"], 1), (["c"], "x"), (["flag"], True)]"""
    pairs, words = [], list(words)
    while words:
        word = words.pop(0)
        if not re.match(r"--\w", word):
            raise InputError(f"found {word!r} on the command line, expected --section.key value")
        key, given, text = word[2:].partition("=")
        if not given and words and not re.match(r"--\w", words[0]):
            given, text = "=", words.pop(0)
        place = key.split(".")
        if place[0] not in SECTIONS:
            raise InputError(
                f"--{key}: the first name is one of {', '.join(SECTIONS)}, as in --optim.lr 1e-3"
            )
        pairs.append((place, _load(text, f"--{key}") if given else True))
    return pairs


def _set(values: Any, place: Sequence[str], value: Any) -> None:
    """Set the value at a path; inside a `{class, args}` the word `args` may be left out."""
    node, (*way, last) = values, place
    for i, name in enumerate([*way, last]):
        if isinstance(node, dict) and "class" in node and name not in ("class", "args"):
            node = node.setdefault("args", {})
        if isinstance(node, list):
            try:
                name = int(name)
                node[name]
            except (ValueError, IndexError) as e:
                where = ".".join(place[: i + 1])
                raise InputError(
                    f"--{where}: a list of {len(node)} stands there, expected a number below"
                ) from e
        elif not isinstance(node, dict):
            raise InputError(f"--{'.'.join(place)}: {'.'.join(place[:i])} is {node!r}, which has no parts")
        if i == len(way):
            node[name] = value
        else:
            if isinstance(node, dict) and node.get(name) is None:
                node[name] = {}
            node = node[name]


def _with_vocabularies(model: Any, rows: Any, folder: Path) -> Any:
    """The model section with each ``vocabulary: {train: N}`` learned from the rows and written to a file."""

    def visit(node: Any, column: str, parent: str = "") -> Any:
        if isinstance(node, list):
            return [visit(v, column) for v in node]
        if not isinstance(node, dict):
            return node
        args = node.get("args")
        wish = args.get("vocabulary") if isinstance(args, Mapping) else None
        if isinstance(wish, Mapping) and set(wish) == {"train"}:
            args = dict(args)
            args["end"] = args.get("end") or "<|endoftext|>"
            args["pad"] = args.get("pad") or args["end"]
            module, _, name = node["class"].rpartition(".")
            front = getattr(importlib.import_module(module), name)
            texts = rows.texts(column)
            learnt = front.train(
                texts, vocab_size=wish["train"], dim=1, start=args.get("start"), end=args["end"]
            )
            args["vocabulary"] = str(learnt.save_vocabulary(folder / f"{column}.json"))
            return {"class": node["class"], "args": args}
        # the names below `tokenizers` are columns; a front-end inside another one (TokenReducer) has its column
        return {k: visit(v, k if parent == "tokenizers" else column, k) for k, v in node.items()}

    return visit(model, "text")
