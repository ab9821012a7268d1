"""Help of `worldtokens train`: the usage with one example per need, and a recipe's own values."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import docstring_parser
import yaml

from worldtokens.training.recipe import Recipe, shipped_recipes

WIDTH = 120

USAGE = """\
usage: worldtokens train RECIPE [--section.key VALUE ...] [--resume] [--print_config]

Train a model. RECIPE is a YAML file with the sections model, data, optim and train, or the name of a shipped recipe:
{shipped}

examples:
  worldtokens train clip_emoji                                  a shipped recipe
  worldtokens train clip_emoji --help                           its values and what they mean
  worldtokens train clip_emoji --data.train my/images --data.validation null --train.out runs/mine
                                                                your own images with captions
  worldtokens train clip_emoji --optim.lr 5e-4 --model.trunk.depth 6
                                                                change values
  worldtokens train clip_emoji --resume                         continue the run in train.out
  worldtokens train clip_emoji --print_config > mine.yaml       the whole recipe with all defaults, to edit
  worldtokens train mine.yaml                                   your own recipe
  torchrun --nproc-per-node 2 -m worldtokens train clip_emoji   two processes

The checkpoints are in <train.out>/best (best validation metric) and <train.out>/last; wt.load reads both.
Ctrl-C saves <train.out>/last and stops.
"""


def usage() -> str:
    """What `worldtokens train --help` prints."""
    names = textwrap.fill(", ".join(shipped_recipes()), WIDTH, initial_indent="  ", subsequent_indent="  ")
    return USAGE.format(shipped=names)


def describe(recipe: Recipe) -> str:
    """What `worldtokens train RECIPE --help` prints: the values that the recipe gives, and all of optim and train."""
    name = recipe.path.stem if recipe.path.stem in shipped_recipes() else str(recipe.path)
    lines = [f"usage: worldtokens train {name} [--section.key VALUE ...] [--resume] [--print_config]", ""]
    lines += [*_header(recipe), ""]
    lines += ["model (--print_config shows all defaults):", *_model_lines("model", recipe.given["model"]), ""]
    lines += ["data:", *_data_lines(recipe.given["data"]), ""]
    for section, settings in (("optim", recipe.optim), ("train", recipe.train)):
        lines += [f"{section}:", *_settings_lines(section, settings), ""]
    return "\n".join(lines[:-1])


def _header(recipe: Recipe) -> list[str]:
    """The first paragraph of the comment at the top of the file."""
    lines = []
    for line in recipe.path.read_text(encoding="utf-8").splitlines():
        text = line.lstrip("#").strip()
        if not line.startswith("#") or not text:
            break
        lines.append(text)
    return textwrap.wrap(" ".join(lines), WIDTH)


def _model_lines(key: str, node: Any) -> list[str]:
    """One line per class, with its plain arguments; `model` itself has a line per argument."""
    if not _is_class(node):
        if isinstance(node, dict) and any(_is_class(v) for v in node.values()):
            return [line for k, v in node.items() for line in _model_lines(f"{key}.{k}", v)]
        return [_line(key, node)]
    args = node.get("args") or {}
    nested = {k: v for k, v in args.items() if _has_class(v)}
    plain = {k: v for k, v in args.items() if k not in nested}
    name = node["class"].removeprefix("worldtokens.")
    if key == "model":
        lines = [_line(key, name), *(_line(f"{key}.{k}", v) for k, v in plain.items())]
    else:
        lines = [_line(key, f"{name}({', '.join(f'{k}={_flow(v)}' for k, v in plain.items())})")]
    return lines + [line for k, v in nested.items() for line in _model_lines(f"{key}.{k}", v)]


def _data_lines(data: dict[str, Any]) -> list[str]:
    lines = [_line(f"data.{k}", v) for k, v in data.items() if k != "augment"]
    for column, transforms in (data.get("augment") or {}).items():
        for i, transform in enumerate(transforms):
            lines += _model_lines(f"data.augment.{column}.{i}", transform)
    return lines


def _settings_lines(section: str, settings: Any) -> list[str]:
    """`section.key = value` and the first sentence of the key's description."""
    docs = {
        p.arg_name: p.description or "" for p in docstring_parser.parse(type(settings).__doc__ or "").params
    }
    lines = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        meaning = " ".join(docs.get(field.name, "").split()).split(". ")[0].rstrip(".")
        assignment = f"{section}.{field.name} = {_flow(list(value) if isinstance(value, tuple) else value)}"
        lines.append(f"  {assignment:<42}  {meaning}".rstrip())
    return lines


def _is_class(node: Any) -> bool:
    return isinstance(node, dict) and "class" in node


def _has_class(node: Any) -> bool:
    """A class, or a dict that holds one."""
    return _is_class(node) or (isinstance(node, dict) and any(_has_class(v) for v in node.values()))


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _line(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else _flow(value)
    line = f"  {key} = {' '.join(text.split())}"
    return line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."
