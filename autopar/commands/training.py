"""`train`: train a model of the registry on real data under a plan. `demo`: the same, beside plain `jax.jit`, twice: on one
mesh and as a pipeline.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeAlias

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autopar.api import ParallelStep
from autopar.commands.devices import ask_for_virtual_devices, devices_for
from autopar.commands.planning import planned, show_plan
from autopar.commands.recording import Recorder
from autopar.commands.subject import DEFAULT_DEVICES, Subject, built_model, device_count, parallel, shapes_of
from autopar.errors import ArgumentError
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.explain import seconds_text, standard_output
from autopar.models import BuiltModel
from autopar.pipeline_plan import PipelinePlan
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

    def difference(self, other: Record) -> float:
        """Largest difference of the losses of two runs with equally many steps."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a run; `reference` is what `jax.jit` made of the same steps, if they were compared to the end."""

    record: Record
    reference: Record | None
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


def demo(parts: Sequence[argparse.Namespace]) -> int:
    """Train with autopar in each of the ways of `parts` and once without; 1 if a loss does not fall or runs disagree.

    All parts have the same model, steps and seed, so that one run of `jax.jit` serves all.
    """
    jax.config.update("jax_platforms", "cpu")
    problems: list[str] = []
    reference: Record | None = None
    for options in parts:
        standard_output().rule(options.title, align="left")
        outcome = _train(options, compare=True, reference=reference)
        reference = outcome.reference
        if outcome.stopped or reference is None:
            return INTERRUPTED
        problems += [f"{options.title}: {problem}" for problem in _problems(outcome.record, reference)]
    for problem in problems:
        Console(stderr=True).print(f"autopar demo: {problem}", markup=False)
    return 1 if problems else 0


def _problems(record: Record, reference: Record) -> Iterator[str]:
    first, last, difference = record.losses[0], record.losses[-1], record.difference(reference)
    if not last < first:
        yield f"the loss did not fall: {first:.4f} to {last:.4f}"
    if not difference <= LARGEST_DIFFERENCE:
        yield f"the losses differ by {difference:.1e}, more than {LARGEST_DIFFERENCE:.0e}"


def _train(options: argparse.Namespace, *, compare: bool, reference: Record | None = None) -> Outcome:
    """A run; if it is to be compared, with `reference`, or with a run of `jax.jit`."""
    with _log(options.log) as log:
        return _logged(options, log, compare=compare, reference=reference)


def _logged(options: argparse.Namespace, log: Log | None, *, compare: bool, reference: Record | None) -> Outcome:
    asked = device_count(options)
    ask_for_virtual_devices(asked)
    run = Run(built_model(options.model, options.sizes), options.steps, options.seed, standard_output())
    batches = run.batches()
    step = parallel(run.built.train_step, devices_for(options.devices if options.mesh is None else asked), options)
    shapes = shapes_of(run.built)
    with run.console.status("planning"):
        plan = planned(step, shapes, options)
    show_plan(plan, run.console, full=options.full)
    with run.console.status("compiling"):
        compiled = _compiled(step, shapes)
        recorder = Recorder.of(compiled, options.timeline, steps=run.steps) if options.timeline else None
        state = step.init_state(run.built.create_state, jax.random.key(run.seed))
    first_state = jax.device_get(state) if compare and reference is None else None
    with run.stop.listening():
        record = _steps(run, recorder or step, state, batches, title="autopar", predicted_s=plan.step_s, log=log)
        _summarise(run, plan, record)
        if recorder is not None:
            recorder.write(options.timeline, run.console)
        if compare and reference is None and not run.stop.made:
            reference = _with_jit(run, first_state)
        if compare and reference is not None and not run.stop.made:
            _compare(run, record, reference)
    return Outcome(record, reference, stopped=run.stop.made)


def _compiled(step: ParallelStep, shapes: Subject) -> CompiledStep | CompiledPipeline:
    """The compiled step. XLA compiles that of one mesh now, and the tasks of a pipeline when they first run."""
    compiled = step.compile(shapes.state, shapes.batch)
    if isinstance(compiled, CompiledStep):
        compiled.as_text()
    return compiled


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


def _summarise(run: Run, plan: Plan | PipelinePlan, record: Record) -> None:
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


def _with_jit(run: Run, first_state: Any) -> Record | None:
    """The same steps with `jax.jit` on one device; None if Ctrl-C was pressed meanwhile."""
    on_one_device = jax.device_put(first_state, jax.devices()[0])
    with run.console.status("compiling for jax.jit"):
        lowered = jax.jit(run.built.train_step, donate_argnums=0).lower(on_one_device, run.built.batch_shape())
        reference = lowered.compile()
    serial = _steps(run, reference, on_one_device, run.batches(), title="jax.jit")
    if len(serial.losses) < run.steps:
        run.console.print(f"comparison stopped by Ctrl-C after {len(serial.losses)} of {run.steps} steps")
        return None
    return serial


def _compare(run: Run, record: Record, reference: Record) -> None:
    run.console.print(
        f"largest difference from jax.jit on one device over {run.steps} steps: {record.difference(reference):.1e} in the "
        f"loss; jax.jit takes {seconds_text(reference.median_s)} per step",
        markup=False,
        highlight=False,
    )


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


def demo_options(options: argparse.Namespace) -> tuple[argparse.Namespace, argparse.Namespace]:
    """The demo as two runs of `train`: the default GPT on 8 devices as one mesh, and as 2 stages of 4 devices."""
    planning: dict[str, Any] = {"mesh": None, "memory_limit": None, "constraint": [], "zero": None, "cluster": "auto"}
    fixed: dict[str, Any] = {"data_parallel": False, "allow_redundant_compute": False, "log": None, "full": False}
    fixed["planning_processes"] = 1
    size: dict[str, Any] = {"model": "gpt", "sizes": {}, "devices": DEFAULT_DEVICES, "timeline": None}
    shared = {**planning, **fixed, **size, "steps": options.steps, "seed": options.seed, "schedule": "auto"}
    one: dict[str, Any] = {"title": "one mesh", "stages": 1, "microbatches": None, "virtual_stages": 1}
    two = {**one, "title": "pipeline", "stages": 2, "microbatches": 4}
    return argparse.Namespace(**shared, **one), argparse.Namespace(**{**shared, **two})
