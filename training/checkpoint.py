"""Checkpoints of a run: `<out>/best` and `<out>/last`, both loadable with `wt.load`.

`last` also holds what a resumed run needs: `state.safetensors` (AdamW's moments, EMA weights) and `state.json`
(step, best metrics, settings). Folders are replaced atomically: the new one is written beside the target, flushed
and renamed; the old one stays until then. Nothing is pickled.

No random state is saved, because the loop seeds each step from (seed, step): see `loop`.
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
from worldtokens.training.optim import EMA

STATE, TENSORS = "state.json", "state.safetensors"


def replace_folder(target: Path, fill: Callable[[Path], Any]) -> None:
    """Replace a folder atomically by what `fill(folder)` writes; if that fails or is killed, the old folder stays."""
    part, old = _sibling(target, "part"), _sibling(target, "old")
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
    """Restore the old folder if the writer was killed between its two renames."""
    old = _sibling(target, "old")
    if old.exists() and not target.exists():
        os.replace(old, target)


def _sibling(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{suffix}")


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder
        return
    fd = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def prepare_output(out: Path, resume: bool, overwrite: bool, main: bool = True) -> None:
    """Check that a new run does not overwrite an existing one; with `overwrite`, delete that one.

    Args:
        main: this is rank 0, which deletes.

    Raises:
        InputError: `out` holds a run, and neither `resume` nor `overwrite` is set.
    """
    recover(out / "last")
    if resume or not (out / "last").exists():
        return
    if not overwrite:
        raise InputError(
            f"{out} already holds a run: continue it (--resume), replace it (--train.overwrite true), or set another "
            "train.out"
        )
    if main:
        for name in ("best", "last", "logs"):
            shutil.rmtree(out / name, ignore_errors=True)


def save_best(out: Path, task: Task, metrics: dict[str, float], step: int) -> None:
    """Write `<out>/best`: the model, and its step and metrics in `metrics.json`."""

    def fill(folder: Path) -> None:
        task.save(folder)
        (folder / "metrics.json").write_text(json.dumps({"step": step, **metrics}, indent=2) + "\n")

    replace_folder(out / "best", fill)


def save_last(
    out: Path, task: Task, optimizer: torch.optim.Optimizer, average: EMA | None, state: dict[str, Any]
) -> None:
    """Write `<out>/last`: the model, the optimizer's moments and the state of the run.

    Args:
        state: JSON-serialisable values.
    """
    tensors = {}
    for name, param in _trainable(task).items():
        tensors |= {f"optimizer/{key}/{name}": v for key, v in optimizer.state.get(param, {}).items()}
        if average is not None:  # then the model's own file holds the averaged weights
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

    replace_folder(out / "last", fill)


def read_state(out: Path) -> dict[str, Any]:
    """Read `<out>/last/state.json`.

    Raises:
        InputError: there is no run to resume, or the file is damaged.
    """
    recover(out / "last")
    try:
        return json.loads((out / "last" / STATE).read_text())
    except FileNotFoundError as e:
        raise InputError(
            f"nothing to resume: {out / 'last' / STATE} does not exist. Start without resume, or set train.out to the "
            "folder of the run to resume"
        ) from e
    except ValueError as e:
        raise InputError(f"{out / 'last' / STATE} is damaged: {e}") from e


def restore(out: Path, task: Task, optimizer: torch.optim.Optimizer, average: EMA | None) -> None:
    """Load weights, moments and EMA weights as `save_last` wrote them, bit for bit.

    Raises:
        InputError: the checkpoint belongs to another model, or only one of the two runs uses `optim.ema`.
    """
    from safetensors import safe_open

    folder = out / "last"
    with safe_open(folder / WEIGHTS, "pt") as f:
        weights = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
        alias = json.loads((f.metadata() or {}).get("alias", "{}"))
    load_strictly(
        task, weights | {name: weights[first] for name, first in alias.items()}, str(folder / WEIGHTS)
    )
    with safe_open(folder / TENSORS, "pt") as f:
        tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    if any(k.startswith("average/") for k in tensors) != (average is not None):
        raise InputError(
            f"{folder} was saved with{'out' * (average is not None)} optim.ema: resume it with the same setting"
        )
    params = _trainable(task)
    states: dict[int, dict[str, Tensor]] = {}
    indices = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    for full, value in tensors.items():
        kind, _, name = full.partition("/")
        if kind == "optimizer":
            key, _, name = name.partition("/")
        if name not in params:
            raise InputError(f"{folder / TENSORS} holds {full}, but {name} is not trainable in this run")
        with torch.no_grad():
            if kind == "optimizer":
                moment = torch.empty_like(params[name]).copy_(value) if value.ndim else value
                states.setdefault(indices[id(params[name])], {})[key] = moment
            elif kind == "weights":
                params[name].copy_(value)
            else:
                average.values[name].copy_(value)
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _trainable(task: Task) -> dict[str, torch.nn.Parameter]:
    return {clean_name(n): p for n, p in task.named_parameters() if p.requires_grad}
