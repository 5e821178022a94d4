"""A training run as the command line sees it: its data, what it measures of its steps, and the same steps under `jax.jit`."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
from rich.console import Console

from autopar.commands.arguments.own_step import PyTree
from autopar.commands.arguments.subject import Trainee
from autopar.commands.terminal.interruption import interruptible
from autopar.cost_model.calibration.probe import probe_products
from autopar.cost_model.hardware import PRESETS
from autopar.errors import ArgumentError
from autopar.explain.training_progress import Report, RunStep, Scale
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.training.run import usual_loss

Observe: TypeAlias = Callable[[str, RunStep], None]
"""Takes the title of a run and a step that it has made."""
AUTOPAR, JIT = "autopar", "jax.jit"
"""Titles of the two runs."""
_FAR = 1.3
"""Measured over predicted seconds of a step, or the inverse, above which the machine is taken to be another one."""


@dataclasses.dataclass
class Record:
    """What a run has measured so far: the loss and the seconds of each step behind the `first` ones, which were made before."""

    first: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def add(self, step: RunStep) -> None:
        """A step was made."""
        self.losses.append(step.loss)
        self.seconds.append(step.seconds)

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


def ignore(title: str, step: RunStep) -> None:
    """Observe nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A training run.

    Attributes:
        trainee: The step and its data.
        steps: How many steps to run.
        console: Where to report.
        observe: Called after each step.
    """

    trainee: Trainee
    steps: int
    console: Console
    observe: Observe = ignore

    def batches(self) -> Iterator[PyTree]:
        """The first batches, the same ones each time; ArgumentError if there is no such data."""
        endless = iter(self.trainee.batches())
        try:
            first = list(itertools.islice(endless, 1))
        except (ImportError, RuntimeError, ValueError) as error:
            raise ArgumentError(str(error)) from None
        return itertools.islice(itertools.chain(first, endless), self.steps)

    def check_data(self) -> None:
        """Raise ArgumentError if there is no such data, before anything is planned or compiled."""
        self.batches()

    @property
    def tokens_per_batch(self) -> int | None:
        """How many there are, if the model is fed with text; other batches are counted in examples."""
        return self.trainee.tokens_per_batch

    @property
    def scale(self) -> Scale:
        """The size of one step, however it is run."""
        tokens = self.trainee.tokens_per_batch
        if tokens is not None:
            return Scale(count=tokens, noun="tokens")
        return Scale(count=self.trainee.examples_per_batch, noun="examples")


def run_jit(training: Training, first_state: PyTree) -> Record | None:
    """Make the same steps with `jax.jit` on one device; None if Ctrl-C was pressed meanwhile."""
    record = Record()
    subject = training.trainee.subject
    report = Report(training.console, training.scale, name=JIT, first=0, last=training.steps)
    with interruptible(lambda: True) as interruption:
        state = jax.device_put(first_state, jax.devices()[0])
        with training.console.status("compiling for jax.jit"):
            lowered = jax.jit(subject.step, donate_argnums=0).lower(state, subject.batch)
            step = lowered.compile()
        training.console.print()
        with report.showing():
            for number, batch in enumerate(training.batches(), 1):
                started = time.perf_counter()
                state, *rest = step(state, batch)
                loss = float(usual_loss(rest[0] if len(rest) == 1 else rest))
                made = RunStep(number, loss, time.perf_counter() - started)
                record.add(made)
                report.tell(made)
                training.observe(JIT, made)
                if interruption.number is not None:
                    break
    if record.done < training.steps:
        training.console.print(f"comparison stopped by Ctrl-C after {record.done} of {training.steps} steps")
        return None
    return record


def doubt_machine(plan: Plan | PipelinePlan, median_s: float) -> Iterator[str]:
    """Say why steps take far longer, or less, than was predicted for a preset, and what to do: machines differ so much.

    This process's devices are measured for a second: processes need not agree on whether to do it.
    """
    ratio = median_s / plan.step_s if plan.step_s and median_s else 1.0
    if plan.cluster in PRESETS and max(ratio, 1 / ratio) > _FAR:
        speed = probe_products(jax.local_devices()[: plan.num_devices], PRESETS[plan.cluster].device)
        if speed is not None:
            yield (
                f"this machine multiplies matrices at {speed.measured / 1e9:,.3g} GFLOP/s per device, {speed.ratio:.2f} of the "
                f"{speed.priced / 1e9:,.3g} that the preset {plan.cluster} has, for which the step is predicted"
            )
        yield (
            "`autopar calibrate -o machine.json` measures all that the cost model has to know, and --cluster machine.json "
            "plans for this machine"
        )
