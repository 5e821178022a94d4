"""`train`: train a model of the registry on real data, or a step of the user's own, under a plan.

A run prints the plan, then each step's loss, tokens per second, and measured against predicted step time; after Ctrl-C the exit
status is 130. The comparison runs the same steps from the same first state, undecorated, on one device. What can go wrong there
is chance in the last bits: the curves of long runs drift apart, more so with high learning rates.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import jax

import autopar
from autopar.api import ParallelStep
from autopar.checkpoints import Checkpoints
from autopar.commands.arguments.devices import ask_for_virtual_devices, find_devices
from autopar.commands.arguments.own_step import PyTree
from autopar.commands.arguments.subject import Subject, find_trainee
from autopar.commands.plans.parallel import count_devices, make_parallel
from autopar.commands.plans.plan import plan_step
from autopar.commands.terminal.interruption import interruptible
from autopar.commands.terminal.printing import print_json, reports
from autopar.commands.training.recording import Recorder
from autopar.commands.training.training_run import AUTOPAR, Observe, Record, Training, doubt_machine, ignore, run_jit
from autopar.errors import ArgumentError
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.explain import seconds_text
from autopar.explain.training_progress import RunStep
from autopar.files.loss_log import LossLog
from autopar.live_line import show_progress
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.reports.report import show

INTERRUPTED = 130


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saves:
    """The checkpoints of a run.

    Attributes:
        folder: Where they are; the run goes on from the last one. None: it makes none.
        every: After how many steps there is one; None: at the end alone.
        waits: Whether no step is made while one is written.
    """

    folder: Path | None = None
    every: int | None = None
    waits: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Saves:
        """As the command line says. Raises ArgumentError if the run is to wait for saves and makes none."""
        if options.wait_for_saves and options.save_every is None:
            raise ArgumentError(
                "--wait-for-saves is about the saves during a run: say with --save-every N how often it saves"
            )
        keeps = options.save_every is not None or options.resume
        return cls(
            folder=options.checkpoints if keeps else None, every=options.save_every, waits=options.wait_for_saves
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run.

    Attributes:
        plan: What it ran by.
        record: Its losses and seconds.
        reference: What `jax.jit` made of the same steps, if they were compared to the end.
        stopped_by: What stopped the run before its last step; None if it came to its end.
        is_compared: Whether a comparison that was asked for came to its end.
    """

    plan: Plan | PipelinePlan
    record: Record
    reference: Record | None
    stopped_by: str | None
    is_compared: bool

    @property
    def stopped(self) -> bool:
        """Whether the run, or its comparison, was stopped."""
        return self.stopped_by is not None or not self.is_compared

    def document(self) -> dict[str, object]:
        """The run as JSON; of a run without a step the median is None."""
        both = self.record.losses and self.reference is not None
        return {
            "step_s": self.plan.step_s,
            **_document(self.record),
            "first_step": self.record.first + 1,
            "stopped_by": self.stopped_by,
            "jit": None if self.reference is None else _document(self.reference),
            "largest_difference": self.record.difference(self.reference) if both and self.reference else None,
        }


def _document(record: Record) -> dict[str, object]:
    measured = {"losses": record.losses, "seconds": record.seconds}
    return {**measured, "median_step_s": record.median_s if record.seconds else None}


def train(options: argparse.Namespace, *, observe: Observe = ignore) -> int:
    """Run the command; 0, or 130 after Ctrl-C.

    Args:
        options: Those of the command line.
        observe: Called after each step.
    """
    with _open_log(options.log, observe) as log:
        outcome = train_model(options, compare=options.compare_jit, observe=log)
    if options.json:
        print_json({"model": options.model, **outcome.document()})
    return INTERRUPTED if outcome.stopped else 0


def train_model(
    options: argparse.Namespace,
    *,
    compare: bool,
    reference: Record | None = None,
    observe: Observe = ignore,
) -> Outcome:
    """Plan, train, and report; compare with `reference` or, without one, with a run of `jax.jit`."""
    saves = Saves.of(options)
    asked = count_devices(options)
    ask_for_virtual_devices(asked)
    training = Training(
        trainee=find_trainee(options.model, options.sizes, options.seed),
        steps=options.steps,
        console=reports(as_json=options.json),
        observe=observe,
    )
    training.check_data()
    devices = find_devices(options.devices if options.mesh is None and options.nodes is None else asked)
    shapes = training.trainee.subject
    step = make_parallel(shapes.step, devices, options)
    first = _first_number(options, saves, step, whole=compare or options.timeline is not None)
    with show_progress(options.verbose), interruptible(step.stop_planning) as interruption:
        plan = plan_step(step, shapes, options, is_trained=True)
    if not options.json:
        show(plan, training.console, full=options.full)
    interruption.finish()
    with show_progress(options.verbose):
        _compile(step, shapes)
    recorder = Recorder(step) if options.timeline else None
    first_state = first_state_of(training, step) if compare and reference is None else None
    record = Record(first)
    with contextlib.nullcontext() if recorder is None else recorder.recording():
        stopped = run_steps(training, step, record, first_state, saves=saves)
    summarise(training, plan, record, stopped)
    if recorder is not None:
        recorder.write(options.timeline, training.console)
    if compare and reference is None and stopped is None:
        reference = run_jit(training, first_state)
    if compare and reference is not None and stopped is None:
        compare_with_jit(training, record, reference)
    return Outcome(
        plan=plan,
        record=record,
        reference=reference,
        stopped_by=stopped,
        is_compared=not compare or reference is not None,
    )


def _first_number(options: argparse.Namespace, saves: Saves, step: ParallelStep, *, whole: bool) -> int:
    """After how many steps the run begins. Raises ArgumentError if the folder of its checkpoints does not fit the options.

    With `whole` it has to begin with the first one.
    """
    if saves.folder is None:
        return 0
    known = Checkpoints(saves.folder, step).numbers()
    if not known:
        return 0
    if not options.resume:
        raise ArgumentError(
            f"{options.checkpoints} has checkpoints, of step {known[-1]} the last: go on from it with --resume, or name another "
            "folder with --checkpoints"
        )
    if known[-1] >= options.steps:
        raise ArgumentError(
            f"{options.checkpoints} has the state of step {known[-1]}, and --steps is {options.steps}: give more"
        )
    if whole:
        raise ArgumentError(
            f"--compare-jit and --timeline are for runs from the first step, and this one goes on from step {known[-1]}"
        )
    return known[-1]


def first_state_of(training: Training, step: ParallelStep) -> PyTree:
    """The state with which both of two runs that are compared begin, on the host."""
    return jax.device_get(step.init_state(training.trainee.create_state, *training.trainee.args))


def run_steps(
    training: Training,
    step: ParallelStep,
    record: Record,
    first_state: PyTree | None,
    *,
    saves: Saves | None = None,
) -> str | None:
    """Train; returns what stopped the run before its last step, if something did.

    Args:
        training: What is trained, and how long.
        step: The step, planned.
        record: Takes losses and seconds.
        first_state: The state to begin with; None makes it.
        saves: Its checkpoints; None: it makes none.
    """
    saves = saves or Saves()

    def note(made: RunStep) -> None:
        record.add(made)
        training.observe(AUTOPAR, made)

    run = autopar.Run(
        step,
        training.batches,
        saves.folder,
        create_state=training.trainee.create_state if first_state is None else lambda given: given,
        args=training.trainee.args if first_state is None else (first_state,),
        every=saves.every,
        keep=None if saves.every is None else 3,
        wait_for_saves=saves.waits,
        on_step=note,
        console=training.console,
        tokens_per_batch=training.tokens_per_batch,
        name=AUTOPAR,
    )
    training.console.print()
    stopped = run.train(training.steps).stopped
    return "Ctrl-C" if stopped == signal.SIGINT.name else stopped


def _compile(step: ParallelStep, shapes: Subject) -> CompiledStep | CompiledPipeline:
    """Compile the step. XLA compiles that of one mesh now, and the tasks of a pipeline when they first run."""
    compiled = step.compile(shapes.state, shapes.batch)
    if isinstance(compiled, CompiledStep):
        compiled.as_text()
    return compiled


def summarise(training: Training, plan: Plan | PipelinePlan, record: Record, stopped: str | None) -> None:
    """Print how the run ended: losses, and measured beside predicted seconds."""
    if not record.losses:
        training.console.print(f"stopped by {stopped} before the first step")
        return
    words = "" if stopped is None else f"stopped by {stopped} after {record.done} of {training.steps} steps: "
    ratio = record.median_s / plan.step_s if plan.step_s else float("inf")
    training.console.print(
        f"{words}first loss {record.losses[0]:.4f}, last loss {record.losses[-1]:.4f}; {training.scale.rate(record.median_s)}; "
        f"median step {seconds_text(record.median_s)} measured, {seconds_text(plan.step_s)} predicted "
        f"(measured/predicted {ratio:.2f})",
        markup=False,
        highlight=False,
    )
    for doubt in doubt_machine(plan, record.median_s):
        training.console.print(doubt, markup=False, highlight=False)


def compare_with_jit(training: Training, record: Record, reference: Record) -> None:
    """Print by how much the losses of both runs differ, and what jax.jit takes."""
    training.console.print(
        f"largest difference from jax.jit on one device over {training.steps} steps: {record.difference(reference):.1e} in the "
        f"loss; jax.jit takes {seconds_text(reference.median_s)} per step",
        markup=False,
        highlight=False,
    )


@contextlib.contextmanager
def _open_log(path: Path | None, observe: Observe) -> Iterator[Observe]:
    """Yield a function that adds a row to the file of losses for each step of autopar's run, and then calls `observe`."""
    if path is None:
        yield observe
        return
    with contextlib.closing(LossLog(path)) as log:

        def write(title: str, step: RunStep) -> None:
            if title == AUTOPAR:
                log.add(step.number, step.loss, step.seconds)
            observe(title, step)

        yield write
