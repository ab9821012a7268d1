"""The training loop: trains a task on rows and writes checkpoints.

Notable here:

- The gradient of a step is the weighted mean over all its rows, across micro-batches and processes, also when
  micro-batches differ in size: never a mean of means.
- Every step seeds the random generators from (seed, step, rank), and a batch depends on (seed, number) alone. So a
  run that is interrupted and resumed equals the uninterrupted run bit for bit.
- The device is synchronised only at progress lines, every `log_every` steps. A step with a NaN or infinite loss or
  gradient is skipped and counted on the device.

Devices and processes are managed by accelerate; several processes:
`torchrun --nproc-per-node 2 -m worldtokens train RECIPE`.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.tasks.base import Task
from worldtokens.tokenizers.base import Batch
from worldtokens.training import checkpoint
from worldtokens.training.data import Augment, Batches, BatchPlan, combine_seeds, iterate_batches, seed_all
from worldtokens.training.meters import AverageMeters, Throughput
from worldtokens.training.optim import EMA, OptimSettings, lr_at, make_optimizer, optimizer_step
from worldtokens.training.progress import Progress, format_metrics, format_seconds
from worldtokens.training.settings import TrainReport, TrainSettings, autocast_type


class _LossModule(nn.Module):
    """`task.loss` as a forward method, which DistributedDataParallel wraps."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.task.loss(batch)


class _SignalHandler:
    """Context in which the first Ctrl-C or SIGTERM is recorded in `signal`; a second one acts as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _SignalHandler:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        self.signal = number
        self.__exit__()

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def reraise(self) -> None:
        """Raise what the signal stands for: KeyboardInterrupt, or SystemExit with SIGTERM's exit status."""
        if self.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt


def train(
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    validation_rows: Sequence[Mapping[str, Any]] | None = None,
    *,
    train: TrainSettings,
    optim: OptimSettings | None = None,
    augment: Augment | None = None,
) -> TrainReport:
    """Train a task on rows; write the checkpoints `<out>/best` (if there are validation rows) and `<out>/last`.

    Args:
        task: trained in place; ends in eval mode with the last weights (EMA weights with `optim.ema`).
        rows: map-style sequence of dicts by column: `len(rows)`, `rows[i]`.
        validation_rows: rows for `task.evaluate`, which runs on rank 0.
        train: length, batch size, evaluation, devices and output.
        optim: optimizer and learning-rate schedule.
        augment: by column, a transform of the raw tensor in training; it may draw from the global generator of torch,
            NumPy or Python.

    Returns:
        Metrics, steps and throughput of the run.

    Raises:
        InputError: settings that contradict each other or the data, a batch of which no row can be read, a loss that
            stays NaN or infinite.
        KeyboardInterrupt, SystemExit: on Ctrl-C or SIGTERM, after `<out>/last` is saved.
    """
    return _Run(task, rows, validation_rows, train, optim or OptimSettings(), augment).run()


class _Run:
    def __init__(self, task, rows, validation_rows, train, optim, augment) -> None:
        self.task, self.validation_rows = task, validation_rows
        self.settings, self.optim = train, optim
        self.out = Path(train.out)
        self.accelerator = acc = Accelerator(
            cpu=train.device == "cpu",
            mixed_precision="no",  # the recipe sets autocast, not the launcher
            # a batch may lack a column; then its front-end gets no gradient
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.device, self.ranks = acc.device, acc.num_processes
        self.plan = BatchPlan(
            len(rows),
            train.batch_size,
            train.gradient_accumulation_steps,
            self.ranks,
            acc.process_index,
            train.seed,
        )
        self.steps = train.steps or max(1, round(train.epochs * self.plan.steps_per_epoch))
        self.batches = Batches(
            task, rows, self.plan, augment, train.cache_mb * 2**20 // max(1, train.workers)
        )
        checkpoint.prepare_output(self.out, train.resume, train.overwrite, acc.is_main_process)
        task.train().to(self.device)
        self.params = [p for p in task.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(task, optim)
        self.average = EMA(task, optim.ema) if optim.ema is not None else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=train.precision == "fp16")
        self.report = TrainReport()
        self.first = self._resume() if train.resume else 0
        # find_unused_parameters=True makes DDP warn when a step has no unused parameter
        warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified")
        self.model = acc.prepare_model(_LossModule(task))

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """What the row order and the seeds depend on; a resumed run must have the same values."""
        return {"seed": self.plan.seed, "batch_size": self.plan.batch, "rows": self.plan.rows}

    def _resume(self) -> int:
        state = checkpoint.read_state(self.out)
        for name, value in self._identity().items():
            if state["run"][name] != value:
                raise InputError(
                    f"{self.out / 'last'} was trained with {name} = {state['run'][name]}, now it is {value}: the run cannot "
                    "be resumed. Restore the old value, or start a new run in another folder"
                )
        checkpoint.restore(self.out, self.task, self.optimizer, self.average)
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        r = self.report
        r.best, r.best_step, r.skipped_steps = state["best"], state["best_step"], state["skipped_steps"]
        r.metrics = state["metrics"]
        return state["step"]

    def _save_last(self, step: int) -> None:
        if self.accelerator.is_main_process:
            r = self.report
            epoch, index = divmod(step, self.plan.steps_per_epoch)
            state = {
                "step": step,
                "epoch": epoch,
                "rows_into_epoch": index * self.plan.batch,
                "run": self._identity(),
                "steps": self.steps,
                "best": r.best,
                "best_step": r.best_step,
                "metrics": r.metrics,
                "skipped_steps": r.skipped_steps,
                "scaler": self.scaler.state_dict(),
            }
            checkpoint.save_last(self.out, self.task, self.optimizer, self.average, state)
        self.accelerator.wait_for_everyone()

    # ---- the loop ----------------------------------------------------------------------------------------

    def run(self) -> TrainReport:
        s, r = self.settings, self.report
        began = time.monotonic()
        r.steps = self.first
        if self.validation_rows is not None and len(self.validation_rows) == 0:
            raise InputError("validation_rows is empty: pass None, or at least one row")
        main = self.accelerator.is_main_process
        batches = iterate_batches(
            self.batches,
            self.first * s.gradient_accumulation_steps,
            self.steps * s.gradient_accumulation_steps,
            s.workers,
            pin=self.device.type == "cuda",
        )
        meters = AverageMeters(self.device, self.ranks)
        logs = self.out / "logs" if s.tensorboard else None
        with Progress(self.steps, self.first, main, logs) as progress, _SignalHandler() as stop:
            throughput = Throughput(self.plan.batch)
            for step in range(self.first, self.steps):
                self._step(step, batches, meters)
                done = r.steps = step + 1
                if self.average is not None:
                    self.average.update(step)
                last = done == self.steps
                log = done % s.log_every == 0 or last
                if log:
                    self._log(done, meters, progress, throughput)
                if last or (s.eval_every and done % s.eval_every == 0):
                    with throughput.paused():
                        self._evaluate(done, progress)
                        self._save_last(done)
                if self._should_stop(stop, log):
                    if not log:
                        self._log(done, meters, progress, throughput)
                    self._save_last(done)
                    progress.print(
                        f"stopped at step {done}/{self.steps}; checkpoint: {self.out / 'last'}. Continue with the "
                        "same command and --resume (or train.resume: true)"
                    )
                    self._print_skipped(progress)
                    stop.reraise()
            if self.average is not None:
                self.average.copy_to_model()
            self.task.eval()
            r.samples_per_second, r.seconds = throughput.overall(), time.monotonic() - began
            if self.ranks > 1:
                gathered: list[Any] = [None] * self.ranks
                torch.distributed.all_gather_object(gathered, r.bad_rows)
                r.bad_rows = {i: m for each in gathered for i, m in each.items()}
            self._print_skipped(progress)
            best = f", {self.out / 'best'} (step {r.best_step})" if r.best_step else ""
            progress.print(
                f"trained {r.steps} steps in {format_seconds(r.seconds)}, {r.samples_per_second:,.0f} samples/s; "
                f"checkpoints: {self.out / 'last'}{best}"
            )
        return r

    def _step(self, step: int, batches: Any, meters: AverageMeters) -> None:
        """One optimizer step over `gradient_accumulation_steps` micro-batches."""
        s = self.settings
        window = [self._next(batches) for _ in range(s.gradient_accumulation_steps)]
        weights = [float(b["weight"]) for b in window]
        count: Any = sum(weights)
        if self.ranks > 1:
            count = self.accelerator.reduce(torch.tensor(count, device=self.device), "sum")
            count = count.clamp(min=1e-30)
        else:
            count = max(count, 1e-30)
        seed_all(combine_seeds(s.seed, 4, step, self.plan.rank))
        for i, (batch, weight) in enumerate(zip(window, weights, strict=True)):
            batch = batch.to(self.device, non_blocking=True)
            more = i + 1 < len(window)  # only the last micro-batch's backward pass reduces gradients
            with self.accelerator.no_sync(self.model) if more else contextlib.nullcontext():
                with self._autocast():
                    out = self.model(batch)
                loss = out["loss"]
                if i == 0 and not loss.requires_grad:
                    raise InputError(
                        f"{type(self.task).__name__}'s loss has no gradient: all parameters that it depends on are frozen"
                    )
                # DDP averages over processes: multiply by their number to get the sum
                self.scaler.scale(loss * (weight / count) * self.ranks).backward()
            meters.add(out, weight)
        _, taken = optimizer_step(
            self.optimizer,
            self.params,
            lr_at(step, self.steps, self.optim),
            self.optim.max_grad_norm,
            meters.step_loss(),
            self.scaler,
        )
        meters.end_step(taken)

    def _next(self, batches: Any) -> Batch:
        batch, bad = next(batches)
        self.report.bad_rows.update(bad)
        if batch is None:
            first = "; ".join(f"row {i}: {m}" for i, m in bad[:3])
            raise InputError(
                f"none of the {len(bad)} rows tried for a batch could be used ({first}): check data.columns and the files"
            )
        return batch

    def _autocast(self) -> Any:
        dtype = autocast_type(self.settings.precision, self.device)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def _log(self, done: int, meters: AverageMeters, progress: Progress, throughput: Throughput) -> None:
        """Report averages since the last call; the only place in training that waits for the device."""
        averages, skipped, in_a_row = meters.read()
        self.report.skipped_steps += skipped
        if "loss" in averages:
            self.report.loss = averages["loss"]
        if in_a_row >= self.settings.max_nonfinite_steps:
            raise InputError(
                f"the loss or the gradient was NaN or infinite in {in_a_row} steps in a row, the last being step {done}; "
                f"{self.report.skipped_steps} steps were skipped in all. Lower optim.lr, raise optim.warmup, set "
                "train.precision to fp32, or look for NaN in the data"
            )
        shown = {**averages, "lr": lr_at(done - 1, self.steps, self.optim)}
        if self.report.skipped_steps:
            shown["skipped"] = self.report.skipped_steps
        samples_per_second = throughput.since_last(done - self.first)
        eta = (self.steps - done) * self.plan.batch / max(samples_per_second, 1e-9)
        progress.update(done, shown, samples_per_second, eta)

    def _evaluate(self, done: int, progress: Progress) -> None:
        if self.validation_rows is None:
            return
        if self.accelerator.is_main_process:
            weights = self.average.swapped() if self.average is not None else contextlib.nullcontext()
            with weights, torch.no_grad(), self._autocast():
                metrics = self.task.evaluate(self.validation_rows, batch_size=self.settings.eval_batch_size)
                metrics = {k: float(v) for k, v in metrics.items()}
                self.report.metrics = metrics
                key, mode = self.task.metric
                if key not in metrics:
                    raise InputError(
                        f"{type(self.task).__name__}.metric is {key!r}, but evaluate returned {sorted(metrics)}"
                    )
                best = self.report.best.get(key)
                better = math.isfinite(metrics[key]) and (
                    best is None or (metrics[key] > best if mode == "max" else metrics[key] < best)
                )
                if better:
                    self.report.best, self.report.best_step = metrics, done
                    checkpoint.save_best(self.out, self.task, metrics, done)
            self.task.train()
            progress.log("validation", metrics, done)
            # a task may return dozens of metrics: the line shows those named as the deciding one, TensorBoard all
            kind = key.rpartition("/")[2]
            shown = {k: v for k, v in metrics.items() if k.rpartition("/")[2] == kind}
            best_mark = "  (best)" if better else ""
            progress.print(f"step {done}/{self.steps}  validation: {format_metrics(shown)}{best_mark}")
        self.accelerator.wait_for_everyone()

    def _should_stop(self, stop: _SignalHandler, log: bool) -> bool:
        """Whether a signal arrived. Several processes agree on it at progress lines, where they wait anyway."""
        if self.ranks == 1:
            return stop.signal is not None
        if not log:
            return False
        own = torch.tensor([float(stop.signal or 0)], device=self.device)
        received = int(self.accelerator.gather(own).max())
        stop.signal = received or None
        return received > 0

    def _print_skipped(self, progress: Progress) -> None:
        r = self.report
        if r.skipped_steps:
            progress.print(
                f"{r.skipped_steps} steps were skipped: their loss or gradient was NaN or infinite"
            )
        if r.bad_rows:
            progress.print(
                f"{len(r.bad_rows):,} of {self.plan.rows:,} rows could not be used and were replaced by others:"
            )
            for i, message in list(r.bad_rows.items())[:5]:
                progress.print(f"  row {i}: {message}")
            if len(r.bad_rows) > 5:
                progress.print(f"  ... and {len(r.bad_rows) - 5:,} more")
