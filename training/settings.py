"""What a run is told and what it tells: plain values, for Python and for a recipe's `train:` section."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch

from worldtokens.errors import InputError


def autocast_type(precision: str, device: torch.device) -> torch.dtype | None:
    """The type that a precision means on a device, or None for float32 throughout.

    ``auto`` takes bfloat16 where the device multiplies it in hardware, and float32 elsewhere: a CPU without it
    emulates bfloat16 and gets slower.
    """
    if precision == "auto":
        if device.type == "cpu":
            cpu = torch.backends.cpu.get_cpu_capability()
            fast = getattr(torch.cpu, "_is_amx_tile_supported", bool)() or "AVX512_BF16" in cpu.upper()
        elif device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = False
        precision = "bf16" if fast else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How a run goes.

    Args:
        out: folder for `best`, `last` and TensorBoard's `logs`.
        steps: optimizer steps of the whole run; give this or `epochs`.
        epochs: passes over the rows; give this or `steps`.
        batch_size: rows of one optimizer step, over all processes and the gradient_accumulation_steps: the same recipe makes
            the same steps on one process or on eight.
        gradient_accumulation_steps: parts that a step's rows are worked through in, to save memory.
        eval_every: steps between evaluations, each followed by saving; null: at the end alone.
        eval_batch_size: rows at a time in an evaluation.
        seed: of the order, the draws and dropout.
        workers: processes that read ahead; 0 reads between steps.
        cache_mb: megabytes of read and decoded raws to keep in memory, over all workers.
        precision: ``fp32``; autocast to ``bf16`` or ``fp16``; or ``auto``, see `autocast_type`.
        device: ``auto`` takes an accelerator where there is one.
        resume: go on from `<out>/last`.
        overwrite: start anew in a folder that holds a run.
        log_every: steps between the figures shown.
        tensorboard: write curves to `<out>/logs`.
        patience: steps in a row that may fail with a loss or gradient that is not finite.
    """

    out: str = "runs/last"
    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 64
    gradient_accumulation_steps: int = 1
    eval_every: int | None = None
    eval_batch_size: int = 64
    seed: int = 0
    workers: int = 0
    cache_mb: int = 0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    device: Literal["auto", "cpu"] = "auto"
    resume: bool = False
    overwrite: bool = False
    log_every: int = 20
    tensorboard: bool = True
    patience: int = 20

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both"
            raise InputError(f"train.steps or train.epochs says how long to train: found {found}, give one")
        for name in ("steps", "epochs", "log_every", "eval_every", "eval_batch_size", "patience"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise InputError(f"train.{name} is {value}, expected more than 0")
        for name in ("workers", "cache_mb"):
            if getattr(self, name) < 0:
                raise InputError(f"train.{name} is {getattr(self, name)}, expected 0 or more")
        if self.precision not in ("auto", "fp32", "bf16", "fp16"):
            raise InputError(f"train.precision is {self.precision!r}, expected auto, fp32, bf16 or fp16")


@dataclasses.dataclass
class TrainReport:
    """What a run came to.

    Args:
        steps: optimizer steps done, those before a resume included.
        loss: mean loss of the last steps shown.
        figures: of the last evaluation.
        best: of the evaluation that the task's metric calls the best, and its step.
        skipped_steps: left out since the loss or the gradient was not finite.
        bad_rows: number -> why it could not be used, of the rows met.
        samples_per_second: in training, evaluations and saving not counted.
        seconds: in all, since this start.
    """

    steps: int = 0
    loss: float = math.nan
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    best: dict[str, float] = dataclasses.field(default_factory=dict)
    best_step: int | None = None
    skipped_steps: int = 0
    bad_rows: dict[int, str] = dataclasses.field(default_factory=dict)
    samples_per_second: float = 0.0
    seconds: float = 0.0
