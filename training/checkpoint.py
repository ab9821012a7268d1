"""What a run leaves on disk: `<out>/best` and `<out>/last`, both models that `wt.load` reads.

`last` also holds what the run needs to go on: `state.safetensors` (AdamW's moments, averaged weights) and
`state.json` (step, best so far, settings). A folder appears whole or not at all: it is written beside its
place, flushed, and renamed; the one before stays until then. Nothing is pickled.

No random state is saved, since the loop draws each step's from (seed, step): see `loop`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worldtokens.errors import InputError
from worldtokens.parts import WEIGHTS, clean_name, load_strictly
from worldtokens.tasks.base import Task
from worldtokens.training.optim import Average

STATE, TENSORS = "state.json", "state.safetensors"


def write_folder(target: Path, fill: Callable[[Path], Any]) -> None:
    """Replace a folder by one that `fill(folder)` writes; if that fails or is killed, the old one stays."""
    part, old = _beside(target, "part"), _beside(target, "old")
    target.parent.mkdir(parents=True, exist_ok=True)
    recover(target)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        fill(part)
        for path in part.rglob("*"):
            _flush(path)
        _flush(part)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            os.replace(target, old)
        os.replace(part, target)
        _flush(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        recover(target)
    shutil.rmtree(old, ignore_errors=True)


def recover(target: Path) -> None:
    """Put the old folder back if the writer was killed between its two renames."""
    old = _beside(target, "old")
    if old.exists() and not target.exists():
        os.replace(old, target)


def _beside(target: Path, word: str) -> Path:
    return target.with_name(f".{target.name}.{word}")


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # there a folder cannot be opened
        return
    fd = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def claim(out: Path, resume: bool, overwrite: bool, main: bool = True) -> None:
    """Make sure that a new run does not write over another one unasked.

    Raises:
        InputError: `out` holds a run, and neither going on with it nor replacing it was asked for.
    """
    recover(out / "last")
    if resume or not (out / "last").exists():
        return
    if not overwrite:
        raise InputError(
            f"{out} holds a run already: go on with it (--resume), replace it (--train.overwrite true), or give "
            "another train.out"
        )
    if main:
        for name in ("best", "last", "logs"):
            shutil.rmtree(out / name, ignore_errors=True)


def save_best(out: Path, task: Task, figures: dict[str, float], step: int) -> None:
    """`<out>/best`: the model and, in `figures.json`, what it reached and when."""

    def fill(folder: Path) -> None:
        task.save(folder)
        (folder / "figures.json").write_text(json.dumps({"step": step, **figures}, indent=2) + "\n")

    write_folder(out / "best", fill)


def save_last(
    out: Path, task: Task, optimizer: torch.optim.Optimizer, average: Average | None, state: dict[str, Any]
) -> None:
    """`<out>/last`: the model and all that going on needs.

    Args:
        state: plain values, as `json` holds them.
    """
    tensors = {}
    for name, param in _trainable(task).items():
        tensors |= {f"optimizer/{key}/{name}": v for key, v in optimizer.state.get(param, {}).items()}
        if average is not None:  # the model's own file holds the averaged weights then
            tensors[f"weights/{name}"] = param.detach()
            tensors[f"average/{name}"] = average.values[name]

    def fill(folder: Path) -> None:
        from safetensors.torch import save_file

        if average is None:
            task.save(folder)
        else:
            with average.swapped():
                task.save(folder)
        save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, folder / TENSORS)
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n")

    write_folder(out / "last", fill)


def read_state(out: Path) -> dict[str, Any]:
    """The plain part of `<out>/last`.

    Raises:
        InputError: there is nothing to resume.
    """
    recover(out / "last")
    try:
        return json.loads((out / "last" / STATE).read_text())
    except FileNotFoundError as e:
        raise InputError(
            f"nothing to resume: {out / 'last' / STATE} does not exist. Start without resume, or give the `out` "
            "folder of the run to go on with"
        ) from e
    except ValueError as e:
        raise InputError(f"{out / 'last' / STATE} is damaged: {e}") from e


def restore(out: Path, task: Task, optimizer: torch.optim.Optimizer, average: Average | None) -> None:
    """Put model, moments and averaged weights back as `save_last` found them, to the bit.

    Raises:
        InputError: the saved run is of another model, or with or without averaging unlike this one.
    """
    from safetensors import safe_open

    folder = out / "last"
    with safe_open(folder / WEIGHTS, "pt") as f:
        weights = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
        alias = json.loads((f.metadata() or {}).get("alias", "{}"))
    load_strictly(
        task, weights | {name: weights[kept] for name, kept in alias.items()}, str(folder / WEIGHTS)
    )
    with safe_open(folder / TENSORS, "pt") as f:
        tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    if any(k.startswith("average/") for k in tensors) != (average is not None):
        raise InputError(f"{folder} was saved with{'out' * (average is not None)} optim.ema: resume it so")
    params = _trainable(task)
    states: dict[int, dict[str, Tensor]] = {}
    numbers = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    for full, value in tensors.items():
        kind, _, name = full.partition("/")
        if kind == "optimizer":
            key, _, name = name.partition("/")
        if name not in params:
            raise InputError(f"{folder / TENSORS} holds {full}, but {name} is not trained in this run")
        with torch.no_grad():
            if kind == "optimizer":
                like = torch.empty_like(params[name]).copy_(value) if value.ndim else value
                states.setdefault(numbers[id(params[name])], {})[key] = like
            elif kind == "weights":
                params[name].copy_(value)
            else:
                average.values[name].copy_(value)
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _trainable(task: Task) -> dict[str, torch.nn.Parameter]:
    return {clean_name(n): p for n, p in task.named_parameters() if p.requires_grad}
