"""Settings and report of a training run: plain values, for Python and for a recipe's `train:` section."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch

from worldtokens.errors import InputError


def autocast_type(precision: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype of a `precision` on a device; None for float32 throughout.

    ``auto`` selects bfloat16 where the device multiplies it in hardware, and float32 elsewhere: a CPU without it
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
    """Length, batch size, evaluation, devices and output of a training run.

    Args:
        out: output folder. It receives the checkpoints `best` and `last`, and TensorBoard's `logs`.
        steps: optimizer steps of the whole run. Give this or `epochs`.
        epochs: passes over the training rows. Give this or `steps`.
        batch_size: rows per optimizer step. Counted over all processes and all micro-batches: the same recipe makes the
            same steps on one process or on eight.
        gradient_accumulation_steps: micro-batches per optimizer step. More of them need less memory.
        eval_every: steps between evaluations. Each is followed by saving; null: at the end only.
        eval_batch_size: rows per batch in an evaluation.
        seed: seed of the row order, of augmentation and of dropout.
        workers: data-loading processes. 0 reads in the main process.
        cache_mb: megabytes of decoded rows kept in memory. Counted over all workers.
        precision: fp32, bf16, fp16, or auto. Weights stay float32, bf16 and fp16 are autocast; `auto`: see
            `autocast_type`.
        device: auto or cpu. ``auto`` uses an accelerator where there is one.
        resume: continue from `<out>/last`.
        overwrite: start a new run in a folder that holds one.
        log_every: steps between progress lines.
        tensorboard: write curves to `<out>/logs`.
        max_nonfinite_steps: steps in a row with a NaN or infinite loss before the run fails. Each of them is skipped.
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
    max_nonfinite_steps: int = 20

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both"
            raise InputError(
                f"train.steps or train.epochs sets the length of the run: found {found}, give one"
            )
        for name in ("steps", "epochs", "log_every", "eval_every", "eval_batch_size", "max_nonfinite_steps"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise InputError(f"train.{name} is {value}, expected more than 0")
        for name in ("workers", "cache_mb"):
            if getattr(self, name) < 0:
                raise InputError(f"train.{name} is {getattr(self, name)}, expected 0 or more")
        if self.precision not in ("auto", "fp32", "bf16", "fp16"):
            raise InputError(f"train.precision is {self.precision!r}, expected auto, fp32, bf16 or fp16")


@dataclasses.dataclass
class TrainReport:
    """Result of a training run.

    Args:
        steps: optimizer steps done, including those before a resume.
        loss: mean training loss since the last progress line.
        metrics: of the last evaluation.
        best: metrics of the best evaluation, by the task's `metric`.
        best_step: the step of that evaluation.
        skipped_steps: steps skipped because the loss or the gradient was NaN or infinite.
        bad_rows: row number -> why the row could not be used.
        samples_per_second: training throughput, without evaluation and saving.
        seconds: wall time of this process.
    """

    steps: int = 0
    loss: float = math.nan
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    best: dict[str, float] = dataclasses.field(default_factory=dict)
    best_step: int | None = None
    skipped_steps: int = 0
    bad_rows: dict[int, str] = dataclasses.field(default_factory=dict)
    samples_per_second: float = 0.0
    seconds: float = 0.0
