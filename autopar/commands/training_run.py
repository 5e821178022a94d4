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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autopar.commands.subject import PyTree
from autopar.errors import ArgumentError
from autopar.explain import seconds_text
from autopar.models import BuiltModel
from autopar.models.data import NumpyBatch

StepResult: TypeAlias = tuple[PyTree, Mapping[str, jax.Array]]
"""The new state, and metrics with "loss"."""
TrainStep: TypeAlias = Callable[[PyTree, PyTree], StepResult]
Observe: TypeAlias = Callable[[str, int, float, float], None]
"""Takes the title of a run, the number of a step, its loss and its seconds."""

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
    """What a run has measured so far: the loss and the seconds of each step."""

    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median step time; the first step, which may wait for compilation, counts only if there is no other."""
        return statistics.median(self.seconds[1:] or self.seconds)

    def difference(self, other: Record) -> float:
        """Largest difference of the losses of two runs with equally many steps."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


class StopRequest:
    """Whether Ctrl-C was pressed since `listening` began. A second Ctrl-C interrupts as usual."""

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
) -> Record:
    """Run the steps until they are done or Ctrl-C was pressed."""
    record = Record()
    predicted = "" if predicted_s is None else f", {seconds_text(predicted_s)} predicted"
    run.console.print()
    with Progress(*_PROGRESS, console=run.console, disable=not run.console.is_terminal) as progress:
        task = progress.add_task(title, total=run.steps, report="")
        for batch in run.batches():
            started = time.perf_counter()
            state, metrics = step(state, batch)
            record.losses.append(float(metrics["loss"]))
            record.seconds.append(time.perf_counter() - started)
            times = f"{run.rate(record.median_s)}  {seconds_text(record.median_s)} per step{predicted}"
            report = f"loss {record.losses[-1]:.4f}  {times}"
            progress.update(task, advance=1, report=report)
            run.observe(title, len(record.losses), record.losses[-1], record.seconds[-1])
            if not run.console.is_terminal and _is_due(len(record.losses), run.steps):
                run.console.print(f"{title}  step {len(record.losses)}/{run.steps}  {report}", markup=False)
            if run.stop.made:
                break
    return record


def _is_due(done: int, steps: int) -> bool:
    """Whether to print a line after this step where there is no terminal for a progress bar."""
    every = max(1, steps // _REPORTS_WITHOUT_TERMINAL)
    return done == 1 or done == steps or done % every == 0
