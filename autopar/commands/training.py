"""`train`: train a model of the registry on real data under a plan.

A run prints the plan, then each step's loss, tokens per second, and measured against predicted step time; after Ctrl-C the exit
status is 130. The comparison runs the same steps from the same first state, undecorated, on one device. What can go wrong there
is chance in the last bits: the curves of long runs drift apart, more so with high learning rates.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax

from autopar.api import ParallelStep
from autopar.checkpoints import Checkpoints
from autopar.commands.devices import ask_for_virtual_devices, find_devices
from autopar.commands.planning import plan_step, show_plan
from autopar.commands.planning_options import count_devices, make_parallel
from autopar.commands.recording import Recorder
from autopar.commands.subject import PyTree, Subject, build_model, find_shapes
from autopar.commands.terminal.interruption import interruptible
from autopar.commands.terminal.live_line import live_line
from autopar.commands.training_run import Keeper, Observe, Record, Run, StopRequest, ignore, run_steps
from autopar.errors import ArgumentError
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.explain import seconds_text, standard_output
from autopar.files.loss_log import LossLog
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan

INTERRUPTED = 130
AUTOPAR, JIT = "autopar", "jax.jit"
"""Titles of the two runs."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run. `reference` is what `jax.jit` made of the same steps, if they were compared to the end."""

    record: Record
    reference: Record | None
    stopped: bool


def train(options: argparse.Namespace, *, stop: StopRequest | None = None, observe: Observe = ignore) -> int:
    """Run the command; 0, or 130 after Ctrl-C.

    Args:
        options: Those of the command line.
        stop: What Ctrl-C sets.
        observe: Called after each step.
    """
    with _open_log(options.log, observe) as log:
        outcome = train_model(options, compare=options.compare_jit, stop=stop, observe=log)
    return INTERRUPTED if outcome.stopped else 0


def train_model(
    options: argparse.Namespace,
    *,
    compare: bool,
    reference: Record | None = None,
    stop: StopRequest | None = None,
    observe: Observe = ignore,
) -> Outcome:
    """Plan, train, and report; compare with `reference` or, without one, with a run of `jax.jit`."""
    asked = count_devices(options)
    ask_for_virtual_devices(asked)
    run = Run(
        built=build_model(options.model, options.sizes),
        steps=options.steps,
        seed=options.seed,
        console=standard_output(),
        stop=stop or StopRequest(),
        observe=observe,
    )
    run.check_data()
    devices = find_devices(options.devices if options.mesh is None else asked)
    step, shapes = make_parallel(run.built.train_step, devices, options), find_shapes(run.built)
    with live_line(options.verbose), interruptible(step.stop_planning) as interruption:
        plan = plan_step(step, shapes, options)
    show_plan(plan, run.console, full=options.full)
    interruption.finish()
    with live_line(options.verbose):
        compiled = _compile(step, shapes)
        recorder = Recorder.of(compiled, options.timeline, steps=run.steps) if options.timeline else None
        state, keeper = _first_state(run, step, options)
    if keeper is not None and keeper.first:
        _refuse_comparison(options, compare=compare, first=keeper.first)
        run.console.print(f"goes on from the checkpoint of step {keeper.first}", markup=False, highlight=False)
    first_state = jax.device_get(state) if compare and reference is None else None
    with run.stop.listening():
        record = run_steps(run, recorder or step, state, title=AUTOPAR, predicted_s=plan.step_s, keeper=keeper)
        _summarise(run, plan, record)
        if recorder is not None:
            recorder.write(options.timeline, run.console)
        if compare and reference is None and not run.stop.made:
            reference = _run_jit(run, first_state)
        if compare and reference is not None and not run.stop.made:
            _compare(run, record, reference)
    return Outcome(record, reference, stopped=run.stop.made)


def _first_state(run: Run, step: ParallelStep, options: argparse.Namespace) -> tuple[PyTree, Keeper | None]:
    """The state to begin with, and what saves it; the last checkpoint's if the run is to go on from there and there is one."""
    if options.save_every is None and not options.resume:
        return step.init_state(run.built.create_state, jax.random.key(run.seed)), None
    checkpoints = Checkpoints(options.checkpoints, step)
    known = checkpoints.numbers()
    if known and not options.resume:
        raise ArgumentError(
            f"{options.checkpoints} has checkpoints, of step {known[-1]} the last: go on from it with --resume, or name another "
            "folder with --checkpoints"
        )
    if not known:
        state = step.init_state(run.built.create_state, jax.random.key(run.seed))
        return state, Keeper(checkpoints, options.save_every)
    if known[-1] >= run.steps:
        raise ArgumentError(
            f"{options.checkpoints} has the state of step {known[-1]}, and --steps is {run.steps}: give more"
        )
    checkpoints.clear_unfinished()
    return checkpoints.restore().state, Keeper(checkpoints, options.save_every, known[-1])


def _refuse_comparison(options: argparse.Namespace, *, compare: bool, first: int) -> None:
    """Raise ArgumentError if a run that goes on is to be compared, or timed, from its first step."""
    if compare or options.timeline:
        raise ArgumentError(
            f"--compare-jit and --timeline are for runs from the first step, and this one goes on from step {first}"
        )


def _compile(step: ParallelStep, shapes: Subject) -> CompiledStep | CompiledPipeline:
    """Compile the step. XLA compiles that of one mesh now, and the tasks of a pipeline when they first run."""
    compiled = step.compile(shapes.state, shapes.batch)
    if isinstance(compiled, CompiledStep):
        compiled.as_text()
    return compiled


def _summarise(run: Run, plan: Plan | PipelinePlan, record: Record) -> None:
    done = record.done
    stopped = "" if done == run.steps else f"stopped by {run.stop.what} after {done} of {run.steps} steps: "
    ratio = record.median_s / plan.step_s if plan.step_s else float("inf")
    run.console.print(
        f"{stopped}first loss {record.losses[0]:.4f}, last loss {record.losses[-1]:.4f}; {run.rate(record.median_s)}; "
        f"median step {seconds_text(record.median_s)} measured, {seconds_text(plan.step_s)} predicted "
        f"(measured/predicted {ratio:.2f})",
        markup=False,
        highlight=False,
    )


def _run_jit(run: Run, first_state: PyTree) -> Record | None:
    """Run the same steps with `jax.jit` on one device; None if Ctrl-C was pressed meanwhile."""
    on_one_device = jax.device_put(first_state, jax.devices()[0])
    with run.console.status("compiling for jax.jit"):
        lowered = jax.jit(run.built.train_step, donate_argnums=0).lower(on_one_device, run.built.batch_shape())
        reference = lowered.compile()
    serial = run_steps(run, reference, on_one_device, title=JIT)
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
def _open_log(path: Path | None, observe: Observe) -> Iterator[Observe]:
    """Yield a function that adds a row to the file of losses for each step of autopar's run, and then calls `observe`."""
    if path is None:
        yield observe
        return
    with contextlib.closing(LossLog(path)) as log:

        def write(title: str, step: int, loss: float, seconds: float) -> None:
            if title == AUTOPAR:
                log.add(step, loss, seconds)
            observe(title, step, loss, seconds)

        yield write
