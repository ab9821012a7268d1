"""Recipes: one YAML file holds model, data, optimizer and training. `worldtokens train RECIPE [--section.key value ...]`

    model: {class: worldtokens.CLIP, args: {...}}      # the form of a saved model's config.json
    data:
      train: emoji                                     # or {source: pairs.csv, columns: {image: file}, ...}
      validation: {split: validation}                  # other keys as in `train`
      augment: {image: [{class: torchvision.transforms.v2.RandomResizedCrop, args: {size: 64}}]}
    optim: {lr: 1e-3}                                  # OptimSettings
    train: {steps: 1000, out: runs/clip}               # TrainSettings

jsonargparse checks every value against the type hints of the class or function that takes it; an unknown key raises an
error that names it. The command line can change any value by its path, with or without `args`: `--model.dim 128`,
`--model.tokenizers.image.patch 8`, `--data.augment.image.0.size 48`.

A text front-end's `vocabulary: {train: 4000}` is trained on the training rows' column before the model is built;
`{file: tokenizer.json}`, as in saved models, is a path relative to the recipe.
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
    """YAML loader that reads 1e-3 as a number and rejects duplicate keys."""

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


def shipped_recipes() -> list[str]:
    """Names of the recipes in the package."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def find_recipe(recipe: str) -> Path:
    """The file of a recipe given by path or by shipped name.

    Raises:
        InputError: there is neither.
    """
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    if recipe in shipped_recipes():
        return RECIPES / f"{recipe}.yaml"
    names = ", ".join(shipped_recipes()) or "none"
    raise InputError(f"{recipe}: no such file, and no shipped recipe of that name ({names})")


@dataclasses.dataclass
class Recipe:
    """A recipe that is read and checked; no data is opened and no model built yet.

    Args:
        path: the YAML file.
        given: the values of the file and the overrides, in the file's form.
        values: `given` with all defaults filled in, itself a recipe.
        optim: optimizer settings.
        train: training settings.
    """

    path: Path
    given: dict[str, Any]
    values: dict[str, Any]
    optim: OptimSettings
    train: TrainSettings
    _parser: ArgumentParser

    @classmethod
    def read(cls, recipe: str, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe and check all of its values.

        Args:
            recipe: a path or a shipped name.
            overrides: command-line arguments such as ``["--optim.lr", "1e-3"]``.

        Raises:
            InputError: the file, a key or a value is invalid.
        """
        path = find_recipe(recipe)
        values = _load(path.read_text(encoding="utf-8"), path)
        if not isinstance(values, dict) or "model" not in values or "data" not in values:
            raise InputError(f"{path} is not a recipe: expected the sections {', '.join(SECTIONS)}")
        _normalise(values, path)
        for keys, value in _parse_overrides(overrides):
            _set(values, keys, value)
        _normalise(values, path)
        if unknown := set(values) - set(SECTIONS):
            raise InputError(f"{path}: unknown section {sorted(unknown)}, expected {', '.join(SECTIONS)}")
        parser = _recipe_parser(validation="validation" in values["data"])
        try:
            checked = parser.parse_object(_translate(values, to_jsonargparse=True, folder=path.parent))
            settings = {k: _settings(checked, k) for k in ("optim", "train")}
        except (argparse.ArgumentError, TypeError) as e:
            message = (
                str(getattr(e, "message", e)).replace("class_path", "class").replace("init_args", "args")
            )
            raise InputError(f"{path}: {' '.join(message.split())}") from e
        given = _translate(values, to_jsonargparse=False)
        complete = _translate(_dump(parser, checked), to_jsonargparse=False)
        if ignored := _ignored_key(given, complete):
            raise InputError(f"{path}: unknown key {ignored}")
        return cls(path, given, complete, **settings, _parser=parser)

    def __str__(self) -> str:
        return yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True, width=100)

    def rows(self) -> tuple[Any, Any]:
        """Training rows, and validation rows or None."""
        sets = [self.values["data"].get(k) for k in ("train", "validation")]
        return tuple(open_rows(**s) if s else None for s in sets)

    def build(self, rows: Any) -> tuple[Task, dict[str, Callable]]:
        """The task, initialised with `train.seed`, and the augmentation of each column.

        Args:
            rows: the training rows, for vocabularies that are trained.

        Raises:
            InputError: an argument that a class rejects, or augmentation of a column that the model does not have.
        """
        with tempfile.TemporaryDirectory() as folder:
            model = _with_vocabularies(self.values["model"], rows, Path(folder))
            values = _translate(self.values | {"model": model}, to_jsonargparse=True, folder=self.path.parent)
            checked = self._parser.parse_object(values)
            seed_all(self.train.seed)
            try:
                built = _instantiate(self._parser, checked)
            except (ValueError, TypeError) as e:
                raise e if isinstance(e, InputError) else InputError(f"{self.path}: {e}") from e
        augment = {k: _Compose(v) for k, v in (built["data"]["augment"] or {}).items()}
        task = built["model"]
        if extra := set(augment) - set(task.tokenizers):
            raise InputError(
                f"{self.path}: data.augment has the columns {sorted(extra)}, the model has {list(task.tokenizers)}"
            )
        return task, augment

    def run(self) -> tuple[Task, TrainReport]:
        """Open the data, build the task, train it."""
        out = Path(self.train.out)
        checkpoint.prepare_output(out, self.train.resume, self.train.overwrite)
        rows, validation = self.rows()
        task, augment = self.build(rows)
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "recipe.yaml", str(self).encode())
        report = train(task, rows, validation, train=self.train, optim=self.optim, augment=augment)
        return task, report


class _Compose:
    """Applies transforms in order."""

    def __init__(self, transforms: Sequence[Callable]) -> None:
        self.transforms = transforms

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            raw = transform(raw)
        return raw


# ---- parsing ------------------------------------------------------------------------------------------


def _recipe_parser(validation: bool) -> ArgumentParser:
    parser = ArgumentParser(prog="worldtokens train", exit_on_error=False, add_help=False)
    parser.add_argument("--model", type=Task, required=True)
    parser.add_function_arguments(open_rows, "data.train")
    if validation:
        parser.add_function_arguments(open_rows, "data.validation")
    parser.add_argument(
        "--data.augment",
        type=dict[str, list[nn.Module]],
        default={},
    )
    parser.add_class_arguments(OptimSettings, "optim")
    parser.add_class_arguments(TrainSettings, "train")
    return parser


def _instantiate(parser: ArgumentParser, checked: Any) -> Any:
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
    return instantiate(checked)


def _settings(checked: Any, section: str) -> Any:
    cls = {"optim": OptimSettings, "train": TrainSettings}[section]
    return cls(**checked[section].as_dict())


def _dump(parser: ArgumentParser, checked: Any) -> dict:
    try:
        text = parser.dump(checked, skip_unset=False)
    except TypeError:  # the argument's name before jsonargparse 4.49
        text = parser.dump(checked, skip_none=False)
    return yaml.load(text, _Yaml)


def _ignored_key(given: Any, parsed: Any, prefix: str = "") -> str | None:
    """The path of a key in `given` that is missing in `parsed`, or None; jsonargparse ignores some unknown keys."""
    if isinstance(given, dict) and isinstance(parsed, dict):
        for key, value in given.items():
            path = f"{prefix}.{key}".lstrip(".")
            if key not in parsed:
                return path
            if ignored := _ignored_key(value, parsed[key], path):
                return ignored
    return None


def _load(text: str, where: Any) -> Any:
    try:
        return yaml.load(text, _Yaml)
    except yaml.YAMLError as e:
        raise InputError(f"{where}: not valid YAML: {e}") from e


def _normalise(values: dict, path: Path) -> None:
    """Expand the short forms `train: emoji` and `validation: {split: ...}` in place."""
    data = values["data"]
    if not isinstance(data, dict) or "train" not in data:
        raise InputError(f"{path}: data.train is missing: give a path, or a named data set such as emoji")
    for side in ("train", "validation"):
        if isinstance(data.get(side), str):
            data[side] = {"source": data[side]}
        if side in data and data[side] is None:
            del data[side]
    if isinstance(data.get("validation"), dict) and "source" not in data["validation"]:
        data["validation"] = {**data["train"], **data["validation"]}


def _translate(value: Any, to_jsonargparse: bool, folder: Path | None = None) -> Any:
    """Convert between ``{class, args}`` and jsonargparse's ``{class_path, init_args}``, recursively."""
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
            return f"train:{value['train']}"  # a string passes the type check of a vocabulary's path
        return {k: _translate(v, to_jsonargparse, folder) for k, v in value.items()}
    if isinstance(value, str) and not to_jsonargparse and re.fullmatch(r"train:\d+", value):
        return {"train": int(value[6:])}
    return value


def _parse_overrides(argv: Sequence[str]) -> list[tuple[list[str], Any]]:
    """["--a.b", "1", "--c=x", "--flag"] -> [(["a", "b"], 1), (["c"], "x"), (["flag"], True)]"""
    overrides, argv = [], list(argv)
    while argv:
        word = argv.pop(0)
        if not re.match(r"--\w", word):
            raise InputError(f"found {word!r} on the command line, expected --section.key value")
        key, equals, text = word[2:].partition("=")
        if not equals and argv and not re.match(r"--\w", argv[0]):
            equals, text = "=", argv.pop(0)
        keys = key.split(".")
        if keys[0] not in SECTIONS:
            raise InputError(
                f"--{key}: unknown section, expected one of {', '.join(SECTIONS)}, as in --optim.lr 1e-3"
            )
        overrides.append((keys, _load(text, f"--{key}") if equals else True))
    return overrides


def _set(values: Any, keys: Sequence[str], value: Any) -> None:
    """Set the value at a path; `args` may be omitted from the path inside a `{class, args}`."""
    node = values
    for i, name in enumerate(keys):
        if isinstance(node, dict) and "class" in node and name not in ("class", "args"):
            node = node.setdefault("args", {})
        if isinstance(node, list):
            try:
                name = int(name)
                node[name]
            except (ValueError, IndexError) as e:
                raise InputError(
                    f"--{'.'.join(keys[: i + 1])}: expected an index below {len(node)}, the length of the list"
                ) from e
        elif not isinstance(node, dict):
            raise InputError(f"--{'.'.join(keys)}: {'.'.join(keys[:i])} is {node!r}, which has no keys")
        if i == len(keys) - 1:
            node[name] = value
        else:
            if isinstance(node, dict) and node.get(name) is None:
                node[name] = {}
            node = node[name]


def _with_vocabularies(model: Any, rows: Any, folder: Path) -> Any:
    """The model section with each ``vocabulary: {train: N}`` trained on the rows and replaced by its file in `folder`."""

    def visit(node: Any, column: str, parent: str = "") -> Any:
        if isinstance(node, list):
            return [visit(v, column) for v in node]
        if not isinstance(node, dict):
            return node
        args = node.get("args")
        vocabulary = args.get("vocabulary") if isinstance(args, Mapping) else None
        if isinstance(vocabulary, Mapping) and set(vocabulary) == {"train"}:
            args = dict(args)
            args["end"] = args.get("end") or "<|endoftext|>"
            args["pad"] = args.get("pad") or args["end"]
            module, _, name = node["class"].rpartition(".")
            cls = getattr(importlib.import_module(module), name)
            texts = rows.texts(column)
            trained = cls.train(
                texts, vocab_size=vocabulary["train"], dim=1, start=args.get("start"), end=args["end"]
            )
            args["vocabulary"] = str(trained.save_vocabulary(folder / f"{column}.json"))
            return {"class": node["class"], "args": args}
        # keys of `tokenizers` are columns; a front-end nested in another one (TokenReducer) has its column
        return {k: visit(v, k if parent == "tokenizers" else column, k) for k, v in node.items()}

    return visit(model, "text")
