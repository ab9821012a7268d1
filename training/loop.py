"""The training loop: rows and a task in, a model folder out.

Notable here:

- A step's gradient is the sum over all its rows divided by their count, over the whole accumulation and all
  processes, whatever the parts' sizes are: never a mean of means.
- Every step seeds the random generators from (seed, step, rank), and what a batch holds depends on (seed,
  number) alone. So a run that is killed and resumed is, to the bit, the run that was not.
- Nothing waits for the device but the figures shown every `log_every` steps. A step whose loss or gradient
  is not finite is left out on the device and counted there.

Devices and processes are accelerate's: one process as it is, several with
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
from worldtokens.training.data import Augment, Batches, Plan, mix, seed_all, stream
from worldtokens.training.meters import Speed, Tally
from worldtokens.training.optim import Average, OptimSettings, make_optimizer, rate, update
from worldtokens.training.progress import Show, figures_text
from worldtokens.training.settings import TrainReport, TrainSettings, autocast_type


class _Loss(nn.Module):
    """`task.loss` as a forward, which is what the parallel wrappers know how to call."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.task.loss(batch)


class _Stop:
    """Within, a first Ctrl-C or SIGTERM is remembered, and a second one acts as always."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._kept[number] = signal.signal(number, self._heard)
        return self

    def _heard(self, number: int, frame: Any) -> None:
        self.signal = number
        self.__exit__()

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)
        self._kept = {}

    def leave(self) -> None:
        """Go on as the signal would have: KeyboardInterrupt, or the exit status that SIGTERM gives."""
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
    """Train a task on rows; leave `<out>/best` (with validation rows) and `<out>/last`.

    Args:
        task: changed in place; ends in eval mode with the last weights (averaged ones with `optim.ema`).
        rows: dicts by column, map-style: `len(rows)`, `rows[i]`.
        validation_rows: for `task.evaluate`, on the first process.
        train: how the run goes.
        optim: how weights are updated.
        augment: by column, what to do with a raw tensor in training; it may draw from torch's, NumPy's or
            Python's global generator.

    Raises:
        InputError: settings that cannot be met, rows of which a whole batch cannot be read, a loss that stays NaN
            or infinite.
        KeyboardInterrupt, SystemExit: on Ctrl-C or SIGTERM, once `<out>/last` is saved.
    """
    return _Run(task, rows, validation_rows, train, optim or OptimSettings(), augment).go()


class _Run:
    def __init__(self, task, rows, validation_rows, train, optim, augment) -> None:
        self.task, self.validation_rows = task, validation_rows
        self.set, self.optim = train, optim
        self.out = Path(train.out)
        self.accelerator = acc = Accelerator(
            cpu=train.device == "cpu",
            mixed_precision="no",  # autocast is the recipe's choice, not the launcher's
            # a batch may lack a column, and then a whole front-end gets no gradient
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.device, self.ranks = acc.device, acc.num_processes
        self.plan = Plan(
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
        checkpoint.claim(self.out, train.resume, train.overwrite, acc.is_main_process)
        task.train().to(self.device)
        self.params = [p for p in task.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(task, optim)
        self.average = Average(task, optim.ema) if optim.ema is not None else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=train.precision == "fp16")
        self.report = TrainReport()
        self.first = self._resume() if train.resume else 0
        # DDP is asked to bear unused parameters, and warns of the cost whenever there happen to be none
        warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified")
        self.model = acc.prepare_model(_Loss(task))
        self.paused = 0.0

    # ---- starting and going on ---------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """What order and draws depend on: a resumed run must agree."""
        return {"seed": self.plan.seed, "batch_size": self.plan.batch, "rows": self.plan.rows}

    def _resume(self) -> int:
        state = checkpoint.read_state(self.out)
        for name, value in self._identity().items():
            if state["run"][name] != value:
                raise InputError(
                    f"{self.out / 'last'} was trained with {name} = {state['run'][name]}, now it is {value}: the "
                    "run could not go on where it stopped. Set it back, or start a new run in another folder"
                )
        checkpoint.restore(self.out, self.task, self.optimizer, self.average)
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        r = self.report
        r.best, r.best_step, r.skipped_steps = state["best"], state["best_step"], state["skipped_steps"]
        r.figures = state["figures"]
        return state["step"]

    def _save_last(self, step: int) -> None:
        if self.accelerator.is_main_process:
            r = self.report
            epoch, at = divmod(step, self.plan.steps_per_epoch)
            state = {
                "step": step,
                "epoch": epoch,
                "rows_into_epoch": at * self.plan.batch,
                "run": self._identity(),
                "steps": self.steps,
                "best": r.best,
                "best_step": r.best_step,
                "figures": r.figures,
                "skipped_steps": r.skipped_steps,
                "scaler": self.scaler.state_dict(),
            }
            checkpoint.save_last(self.out, self.task, self.optimizer, self.average, state)
        self.accelerator.wait_for_everyone()

    # ---- the loop ----------------------------------------------------------------------------------------

    def go(self) -> TrainReport:
        s, r = self.set, self.report
        began = time.monotonic()
        r.steps = self.first
        if self.validation_rows is not None and len(self.validation_rows) == 0:
            raise InputError("there are validation rows, but 0 of them: give some, or none at all")
        main = self.accelerator.is_main_process
        parts = stream(
            self.batches,
            self.first * s.gradient_accumulation_steps,
            self.steps * s.gradient_accumulation_steps,
            s.workers,
            pin=self.device.type == "cuda",
        )
        tally = Tally(self.device, self.ranks)
        logs = self.out / "logs" if s.tensorboard else None
        with Show(self.steps, self.first, main, logs) as show, _Stop() as stop:
            speed = Speed(self.plan.batch)
            for step in range(self.first, self.steps):
                made = self._step(step, parts, tally)
                done = r.steps = step + 1
                if self.average is not None:
                    self.average.update(step)
                last = done == self.steps
                look = done % s.log_every == 0 or last
                if look:
                    self._look(done, tally, show, speed)
                if last or (s.eval_every and done % s.eval_every == 0):
                    with speed.paused():
                        self._evaluate(done, show)
                        self._save_last(done)
                if self._stopping(stop, look, made):
                    if not look:
                        self._look(done, tally, show, speed)
                    self._save_last(done)
                    show.say(
                        f"stopped at step {done}/{self.steps}; {self.out / 'last'} is saved. To go on: the same "
                        "command with --resume (or train.resume: true)"
                    )
                    self._say_skipped(show)
                    stop.leave()
            if self.average is not None:
                self.average.copy_to_model()
            self.task.eval()
            r.samples_per_second, r.seconds = speed.overall(), time.monotonic() - began
            if self.ranks > 1:
                parts: list[Any] = [None] * self.ranks
                torch.distributed.all_gather_object(parts, r.bad_rows)
                r.bad_rows = {i: m for part in parts for i, m in part.items()}
            self._say_skipped(show)
        return r

    def _step(self, step: int, parts: Any, tally: Tally) -> Tensor:
        """One optimizer step from `accumulation` parts."""
        s = self.set
        window = [self._next(parts) for _ in range(s.gradient_accumulation_steps)]
        weights = [float(b["weight"]) for b in window]
        count: Any = sum(weights)
        if self.ranks > 1:
            count = self.accelerator.reduce(torch.tensor(count, device=self.device), "sum")
            count = count.clamp(min=1e-30)
        else:
            count = max(count, 1e-30)
        seed_all(mix(s.seed, 4, step, self.plan.rank))
        for i, (batch, weight) in enumerate(zip(window, weights, strict=True)):
            batch = batch.to(self.device, non_blocking=True)
            more = i + 1 < len(window)  # only the last part's backward pass exchanges gradients
            with self.accelerator.no_sync(self.model) if more else contextlib.nullcontext():
                with self._autocast():
                    out = self.model(batch)
                loss = out["loss"]
                if i == 0 and not loss.requires_grad:
                    raise InputError(
                        f"{type(self.task).__name__}'s loss has no gradient: all that it reads is frozen"
                    )
                # DDP averages over processes, so its division is undone here
                self.scaler.scale(loss * (weight / count) * self.ranks).backward()
            tally.add(out, weight)
        _, made = update(
            self.optimizer,
            self.params,
            rate(step, self.steps, self.optim),
            self.optim.clip,
            tally.step_loss(),
            self.scaler,
        )
        tally.close(made)
        return made

    def _next(self, parts: Any) -> Batch:
        batch, bad = next(parts)
        self.report.bad_rows.update(bad)
        if batch is None:
            first = "; ".join(f"row {i}: {m}" for i, m in bad[:3])
            raise InputError(
                f"not one of {len(bad)} rows tried for a batch could be used ({first}): check data.columns and "
                "the files"
            )
        return batch

    def _autocast(self) -> Any:
        dtype = autocast_type(self.set.precision, self.device)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def _look(self, done: int, tally: Tally, show: Show, speed: Speed) -> None:
        """The one place that waits for the device: averages since the last look."""
        figures, skipped, in_a_row = tally.read()
        self.report.skipped_steps += skipped
        if "loss" in figures:
            self.report.loss = figures["loss"]
        if in_a_row >= self.set.patience:
            raise InputError(
                f"loss or gradient was NaN or infinite in {in_a_row} steps in a row, the last being step {done}; "
                f"{self.report.skipped_steps} steps were left out in all. Lower optim.lr, lengthen optim.warmup, "
                "set train.precision to fp32, or look for NaN in the data"
            )
        shown = {**figures, "rate": rate(done - 1, self.steps, self.optim)}
        if self.report.skipped_steps:
            shown["skipped"] = self.report.skipped_steps
        per_second = speed.since(done - self.first)
        left = (self.steps - done) * self.plan.batch / max(per_second, 1e-9)
        show.step(done, shown, per_second, left)

    def _evaluate(self, done: int, show: Show) -> None:
        if self.validation_rows is None:
            return
        if self.accelerator.is_main_process:
            held = self.average.swapped() if self.average is not None else contextlib.nullcontext()
            with held, torch.no_grad(), self._autocast():
                figures = self.task.evaluate(self.validation_rows, batch_size=self.set.eval_batch_size)
                figures = {k: float(v) for k, v in figures.items()}
                self.report.figures = figures
                key, sense = self.task.metric
                if key not in figures:
                    raise InputError(
                        f"{type(self.task).__name__}.metric is {key!r}, but evaluate gave {sorted(figures)}"
                    )
                best = self.report.best.get(key)
                better = math.isfinite(figures[key]) and (
                    best is None or (figures[key] > best if sense == "max" else figures[key] < best)
                )
                if better:
                    self.report.best, self.report.best_step = figures, done
                    checkpoint.save_best(self.out, self.task, figures, done)
            self.task.train()
            show.curves("validation", figures, done)
            # a task may give dozens of figures: a line shows those of the deciding kind, TensorBoard all
            kind = key.rpartition("/")[2]
            shown = {k: v for k, v in figures.items() if k.rpartition("/")[2] == kind}
            show.say(f"step {done}  validation: {figures_text(shown)}{'  (best)' if better else ''}")
        self.accelerator.wait_for_everyone()

    def _stopping(self, stop: _Stop, look: bool, made: Tensor) -> bool:
        """Whether to stop here; several processes agree on it, and only where they wait anyway."""
        if self.ranks == 1:
            return stop.signal is not None
        if not look:
            return False
        heard = torch.tensor(float(stop.signal or 0), device=self.device)
        heard = int(self.accelerator.gather(heard[None]).max())
        stop.signal = heard or None
        return heard > 0

    def _say_skipped(self, show: Show) -> None:
        r = self.report
        if r.skipped_steps:
            show.say(f"{r.skipped_steps} steps were left out: their loss or gradient was NaN or infinite")
        if r.bad_rows:
            show.say(
                f"{len(r.bad_rows):,} of {self.plan.rows:,} rows could not be used and others took their place:"
            )
            for i, message in list(r.bad_rows.items())[:5]:
                show.say(f"  row {i}: {message}")
            if len(r.bad_rows) > 5:
                show.say(f"  ... and {len(r.bad_rows) - 5:,} more")
