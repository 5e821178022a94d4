"""A training run: its steps, what it measures of them, and how Ctrl-C ends it.

Ctrl-C lets the running step finish, and the run ends with its summary; a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TypeAlias

import jax
from rich.console import Console
from rich.progress import Progress

from autopar.checkpoints import Checkpoints
from autopar.commands.subject import PyTree
from autopar.errors import ArgumentError
from autopar.explain import seconds_text
from autopar.explain.progress_bar import BAR_COLUMNS, REPORTS_WITHOUT_TERMINAL
from autopar.models import BuiltModel
from autopar.models.data import NumpyBatch

StepResult: TypeAlias = tuple[PyTree, Mapping[str, jax.Array]]
"""The new state, and metrics with "loss"."""
TrainStep: TypeAlias = Callable[[PyTree, PyTree], StepResult]
Observe: TypeAlias = Callable[[str, int, float, float], None]
"""Takes the title of a run, the number of a step, its loss and its seconds."""


@dataclasses.dataclass
class Record:
    """What a run has measured so far: the loss and the seconds of each step behind the `first` ones, which were made before."""

    first: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> int:
        """The steps that are made, those of earlier runs included."""
        return self.first + len(self.losses)

    @property
    def median_s(self) -> float:
        """Median step time; the first step, which may wait for compilation, counts only if there is no other."""
        return statistics.median(self.seconds[1:] or self.seconds)

    def difference(self, other: Record) -> float:
        """Largest difference of the losses of two runs with equally many steps."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


class StopRequest:
    """Whether Ctrl-C was pressed, or SIGTERM came, since `listening` began. A second one interrupts as Ctrl-C usually does."""

    def __init__(self) -> None:
        self.made, self.what = False, "Ctrl-C"

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Turn the first signal into a request."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.made:
            raise KeyboardInterrupt
        self.made, self.what = True, "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@dataclasses.dataclass(frozen=True)
class Keeper:
    """Saves the state every so many steps, and at the end; the run began with a checkpoint of the step `first`."""

    checkpoints: Checkpoints
    every: int | None
    first: int = 0

    def after(self, number: int, state: PyTree, *, is_last: bool) -> None:
        """A step was made."""
        if self.every is not None and (is_last or number % self.every == 0):
            self.checkpoints.save(number, state)
        if is_last:
            self.checkpoints.wait()


def ignore(title: str, step: int, loss: float, seconds: float) -> None:
    """Observe nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run.

    Attributes:
        built: The model.
        steps: How many steps to run.
        seed: That of the data.
        console: Where to report.
        stop: Whether Ctrl-C was pressed.
        observe: Called after each step.
    """

    built: BuiltModel
    steps: int
    seed: int
    console: Console
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)
    observe: Observe = ignore

    def batches(self) -> Iterator[NumpyBatch]:
        """The first batches of the seed, the same ones each time; ArgumentError if there is no such data."""
        endless = self.built.data(self.seed)
        try:
            first = next(endless)
        except (ImportError, RuntimeError, ValueError) as error:
            raise ArgumentError(str(error)) from None
        return itertools.islice(itertools.chain([first], endless), self.steps)

    def check_data(self) -> None:
        """Raise ArgumentError if there is no such data, before anything is planned or compiled."""
        self.batches()

    @property
    def noun(self) -> str:
        """What a batch is counted in."""
        return "tokens" if self.built.tokens_per_batch > self.built.config.batch else "examples"

    def rate(self, seconds: float) -> str:
        """Tokens or examples per second."""
        return f"{self.built.tokens_per_batch / seconds:,.0f} {self.noun}/s"


def run_steps(
    run: Run,
    step: TrainStep,
    state: PyTree,
    *,
    title: str,
    predicted_s: float | None = None,
    keeper: Keeper | None = None,
) -> Record:
    """Run the steps until they are done or Ctrl-C was pressed."""
    record = Record(0 if keeper is None else keeper.first)
    predicted = "" if predicted_s is None else f", {seconds_text(predicted_s)} predicted"
    run.console.print()
    with Progress(*BAR_COLUMNS, console=run.console, disable=not run.console.is_terminal) as progress:
        task = progress.add_task(title, total=run.steps, completed=record.first, report="")
        for batch in itertools.islice(run.batches(), record.first, None):
            started = time.perf_counter()
            state, metrics = step(state, batch)
            record.losses.append(float(metrics["loss"]))
            record.seconds.append(time.perf_counter() - started)
            times = f"{run.rate(record.median_s)}  {seconds_text(record.median_s)} per step{predicted}"
            report = f"loss {record.losses[-1]:.4f}  {times}"
            progress.update(task, advance=1, report=report)
            run.observe(title, record.done, record.losses[-1], record.seconds[-1])
            if not run.console.is_terminal and _is_due(record.done, run.steps):
                run.console.print(f"{title}  step {record.done}/{run.steps}  {report}", markup=False)
            if keeper is not None:
                keeper.after(record.done, state, is_last=run.stop.made or record.done == run.steps)
            if run.stop.made:
                break
    return record


def _is_due(done: int, steps: int) -> bool:
    """Whether to print a line after this step where there is no terminal for a progress bar."""
    every = max(1, steps // REPORTS_WITHOUT_TERMINAL)
    return done == 1 or done == steps or done % every == 0
