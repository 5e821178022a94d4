"""`train`: train a model of the registry on real data under a plan. `demo`: the same, beside plain `jax.jit`.

A run prints the plan, then each step's loss, tokens per second, and measured against predicted step time. Ctrl-C lets
the running step finish, and the run ends with its summary and exit status 130; a second Ctrl-C ends it at once. The
comparison runs the same steps from the same first state, undecorated, on one device. What can go wrong there is chance
in the last bits: curves of long runs drift apart, more so with high learning rates.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import itertools
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeAlias

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autopar.commands.devices import ask_for_virtual_devices, devices_for
from autopar.commands.subject import DEFAULT_DEVICES, built_model, device_count, parallel, shapes_of
from autopar.errors import ArgumentError
from autopar.explain import seconds_text, show, standard_output
from autopar.models import BuiltModel
from autopar.plan import Plan

Log: TypeAlias = Callable[[int, float, float], None]
"""Takes the number of a step, its loss and its seconds."""

INTERRUPTED = 130
LARGEST_DIFFERENCE = 1e-3
"""By how much the losses of the demo's two runs may differ."""

_REPORTS_WITHOUT_TERMINAL = 10
_PROGRESS = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=24),
    MofNCompleteColumn(),
    TextColumn("{task.fields[report]}"),
    TimeRemainingColumn(),
)


@dataclasses.dataclass
class Record:
    """What a run has measured so far: a loss and a time per step."""

    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median step time; the first step, which may wait for compilation, counts only if there is no other."""
        return statistics.median(self.seconds[1:] or self.seconds)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a run; `difference` is the largest of its losses from those of `jax.jit`, if they were compared."""

    record: Record
    difference: float | None
    stopped: bool


class StopRequest:
    """Whether Ctrl-C was pressed since `listening` began; a second time it interrupts as usual."""

    def __init__(self) -> None:
        self.made = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Turn the first SIGINT into a request."""
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.made:
            raise KeyboardInterrupt
        self.made = True


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run: what to run, how often, and where to report."""

    built: BuiltModel
    steps: int
    seed: int
    console: Console
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)

    def batches(self) -> Iterator[Any]:
        """The first batches of the seed, the same ones each time; ArgumentError if there is no such data."""
        endless = self.built.data(self.seed)
        try:
            first = next(endless)
        except (ImportError, RuntimeError, ValueError) as error:
            raise ArgumentError(str(error)) from None
        return itertools.islice(itertools.chain([first], endless), self.steps)

    @property
    def noun(self) -> str:
        """What a batch is counted in."""
        return "tokens" if self.built.tokens_per_batch > self.built.config.batch else "examples"

    def rate(self, seconds: float) -> str:
        """Tokens or examples per second."""
        return f"{self.built.tokens_per_batch / seconds:,.0f} {self.noun}/s"


def train(options: argparse.Namespace) -> int:
    """Train; 0, or 130 after Ctrl-C."""
    return INTERRUPTED if _train(options, compare=options.compare_jit).stopped else 0


def demo(options: argparse.Namespace) -> int:
    """Train with and without autopar; 1 if the loss does not fall or the two runs disagree."""
    jax.config.update("jax_platforms", "cpu")
    outcome = _train(options, compare=True)
    if outcome.stopped or outcome.difference is None:
        return INTERRUPTED
    problems, losses, difference = [], outcome.record.losses, outcome.difference
    if not losses[-1] < losses[0]:
        problems.append(f"the loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}")
    if not difference <= LARGEST_DIFFERENCE:
        problems.append(f"the losses differ by {difference:.1e}, more than {LARGEST_DIFFERENCE:.0e}")
    for problem in problems:
        Console(stderr=True).print(f"autopar demo: {problem}", markup=False)
    return 1 if problems else 0


def _train(options: argparse.Namespace, *, compare: bool) -> Outcome:
    with _log(options.log) as log:
        return _logged(options, log, compare)


def _logged(options: argparse.Namespace, log: Log | None, compare: bool) -> Outcome:
    ask_for_virtual_devices(device_count(options.devices, options.mesh))
    run = Run(built_model(options.model, options.sizes), options.steps, options.seed, standard_output())
    batches = run.batches()
    wanted = options.devices if options.mesh is None else device_count(options.devices, options.mesh)
    step = parallel(run.built.train_step, devices_for(wanted), options)
    shapes = shapes_of(run.built)
    with run.console.status("planning"):
        plan = step.plan(shapes.state, shapes.batch)
    show(plan, run.console, full=options.full)
    with run.console.status("compiling"):
        step.compile(shapes.state, shapes.batch).as_text()
        state = step.init_state(run.built.create_state, jax.random.key(run.seed))
    first_state = jax.device_get(state) if compare else None
    with run.stop.listening():
        record = _steps(run, step, state, batches, title="autopar", predicted_s=plan.step_s, log=log)
        _summarise(run, plan, record)
        difference = _difference(run, record, first_state) if compare and not run.stop.made else None
    return Outcome(record, difference, stopped=run.stop.made)


def _steps(
    run: Run,
    step: Callable[..., Any],
    state: Any,
    batches: Iterator[Any],
    *,
    title: str,
    predicted_s: float | None = None,
    log: Log | None = None,
) -> Record:
    """Run the steps until they are done or Ctrl-C was pressed."""
    record = Record()
    predicted = "" if predicted_s is None else f", {seconds_text(predicted_s)} predicted"
    run.console.print()
    with Progress(*_PROGRESS, console=run.console, disable=not run.console.is_terminal) as progress:
        task = progress.add_task(title, total=run.steps, report="")
        for batch in batches:
            started = time.perf_counter()
            state, metrics = step(state, batch)
            record.losses.append(float(metrics["loss"]))
            record.seconds.append(time.perf_counter() - started)
            times = f"{run.rate(record.median_s)}  {seconds_text(record.median_s)} per step{predicted}"
            report = f"loss {record.losses[-1]:.4f}  {times}"
            progress.update(task, advance=1, report=report)
            if log is not None:
                log(len(record.losses), record.losses[-1], record.seconds[-1])
            if not run.console.is_terminal and _is_due(len(record.losses), run.steps):
                run.console.print(f"{title}  step {len(record.losses)}/{run.steps}  {report}", markup=False)
            if run.stop.made:
                break
    return record


def _is_due(done: int, steps: int) -> bool:
    """Whether to print a line after this step where there is no terminal for a progress bar."""
    every = max(1, steps // _REPORTS_WITHOUT_TERMINAL)
    return done == 1 or done == steps or done % every == 0


def _summarise(run: Run, plan: Plan, record: Record) -> None:
    done = len(record.losses)
    stopped = "" if done == run.steps else f"stopped by Ctrl-C after {done} of {run.steps} steps: "
    ratio = record.median_s / plan.step_s if plan.step_s else float("inf")
    run.console.print(
        f"{stopped}first loss {record.losses[0]:.4f}, last loss {record.losses[-1]:.4f}; {run.rate(record.median_s)}; "
        f"median step {seconds_text(record.median_s)} measured, {seconds_text(plan.step_s)} predicted "
        f"(measured/predicted {ratio:.2f})",
        markup=False,
        highlight=False,
    )


def _difference(run: Run, record: Record, first_state: Any) -> float | None:
    """Largest difference of the losses from those of `jax.jit` on one device; None if Ctrl-C was pressed meanwhile."""
    on_one_device = jax.device_put(first_state, jax.devices()[0])
    with run.console.status("compiling for jax.jit"):
        lowered = jax.jit(run.built.train_step, donate_argnums=0).lower(on_one_device, run.built.batch_shape())
        reference = lowered.compile()
    serial = _steps(run, reference, on_one_device, run.batches(), title="jax.jit")
    if len(serial.losses) < run.steps:
        run.console.print(f"comparison stopped by Ctrl-C after {len(serial.losses)} of {run.steps} steps")
        return None
    difference = max(abs(a - b) for a, b in zip(record.losses, serial.losses, strict=True))
    run.console.print(
        f"largest difference from jax.jit on one device over {run.steps} steps: {difference:.1e} in the loss; "
        f"jax.jit takes {seconds_text(serial.median_s)} per step",
        markup=False,
        highlight=False,
    )
    return difference


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[Log | None]:
    """A function that writes a line of CSV per step, or None without a path."""
    if path is None:
        yield None
        return
    try:
        stream: TextIO = path.open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from None
    with stream:
        writer = csv.writer(stream)
        writer.writerow(("step", "loss", "seconds"))

        def write(step: int, loss: float, seconds: float) -> None:
            writer.writerow((step, f"{loss:.9g}", f"{seconds:.6f}"))
            stream.flush()

        yield write


def demo_options(options: argparse.Namespace) -> argparse.Namespace:
    """The demo as a run of `train`: the default GPT on 8 devices, everything else as planned."""
    planning: dict[str, Any] = {"mesh": None, "memory_limit": None, "constraint": [], "zero": None, "cluster": "auto"}
    fixed: dict[str, Any] = {"data_parallel": False, "allow_redundant_compute": False, "log": None, "full": False}
    size: dict[str, Any] = {"model": "gpt", "sizes": {}, "devices": DEFAULT_DEVICES}
    return argparse.Namespace(**planning, **fixed, **size, steps=options.steps, seed=options.seed)
