"""`Run`: a training loop that loses nothing when it is interrupted.

In: a step, a source of batches, and a folder. Out: the state after a number of steps. The run begins at the last complete
checkpoint in the folder. It saves one after every `every` steps, after the last step, and when it is asked to stop. On the same
plan the result is bit for bit that of a run without interruption. What can go wrong: the loss is not finite; see `Guard`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
from rich.console import Console

from autopar.arguments import check_limit
from autopar.checkpoints import Checkpoints
from autopar.cost_model.hardware import Cluster
from autopar.data import ShardedBatches, sharded
from autopar.data.sources import Position, peek
from autopar.errors import ArgumentError, PlanError, TrainingError
from autopar.execution.published import Places
from autopar.explain import standard_output
from autopar.explain.training_progress import Report, RunStep, Scale
from autopar.program.call import PyTree
from autopar.training.guard import Guard
from autopar.training.stop import StopRequest


class RunnableStep(Protocol):
    """The part of `autopar.ParallelStep` that a run uses."""

    def __call__(self, state: PyTree, batch: PyTree, /) -> tuple[PyTree, ...]:
        """Run one step and return the new state first."""

    def init_state(self, create_fn: Callable[..., PyTree], /, *args: PyTree) -> PyTree:
        """Create the first state on the devices of the plan."""

    def plan(self, *args: PyTree) -> object:
        """Plan the step for these arguments."""

    def last_plan(self) -> object:
        """Return the last plan. Raises PlanError if the step has not been planned."""

    def places(self) -> Places:
        """Return the places of the step's arrays under its last plan."""

    def jax_devices(self) -> list[jax.Device]:
        """Return the devices that the step may run on."""

    def cluster(self) -> Cluster:
        """Return the cluster that these devices make up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """The end of a run.

    Attributes:
        state: the state after the last step, on the devices.
        number: the number of steps made so far, those before interruptions included.
        loss: the loss of the last step of this run; None if it made no step.
        stopped: the signal that ended the run before its last step, such as `"SIGTERM"`; None if it made all steps.
    """

    state: Any
    number: int
    loss: float | None
    stopped: str | None


@dataclasses.dataclass(kw_only=True)
class _Progress:
    """The progress of a run. `pending` is the loss of the last step, not read yet; `behind` the position after its batch."""

    state: PyTree
    number: int
    losses: deque[float]
    pending: jax.Array | None = None
    behind: Position = dataclasses.field(default_factory=dict)
    skipped: set[int] = dataclasses.field(default_factory=set)
    times_back: int = 0
    saved: int = 0
    loss: float | None = None
    settled_at: float = 0.0


class Run:
    """A training run; see `train`. Every process that has devices of the step makes one with the same arguments."""

    def __init__(
        self,
        step: RunnableStep,
        data: ShardedBatches | Iterable[PyTree] | Callable[[], Iterable[PyTree]],
        checkpoint_dir: str | os.PathLike[str] | None,
        *,
        create_state: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        every: int | None = 100,
        keep: int | None = 3,
        wait_for_saves: bool = False,
        resume: bool = True,
        guard: Guard | None = None,
        find_loss: Callable[[PyTree], jax.Array] | None = None,
        on_step: Callable[[RunStep], None] | None = None,
        console: Console | None = None,
        tokens_per_batch: int | None = None,
        name: str | None = None,
    ) -> None:
        """Describe a run; `train` starts it.

        Args:
            step: a step `(state, batch) -> (state, ...)`. A step without a plan takes that of the last checkpoint, or a new one.
            data: batches, made by `autopar.data.sharded`, or a source that it takes.
            checkpoint_dir: the folder of the checkpoints, which is created if it does not exist; None saves nothing.
            create_state: makes the first state, `create_state(*args)`, as for `step.init_state`.
            args: the arguments of `create_state`.
            every: the number of steps between two checkpoints; None saves only at the end, and when the run is stopped.
            keep: the number of checkpoints to keep; None keeps all.
            wait_for_saves: whether steps wait until a checkpoint is complete. Then a kill costs `every` steps at most.
            resume: whether to continue from the last checkpoint in the folder. If False, a folder with checkpoints is refused.
            guard: which losses are bad, and what the run does then; by default a loss that is not finite ends the run.
            find_loss: finds the loss in what the step returns after the state; by default that itself, or its `"loss"`.
            on_step: called with each step once its loss is known.
            console: the stream for progress; by default standard output. Only the first process writes to it.
            tokens_per_batch: the number of tokens in a batch, for the rate; by default the rate counts examples.
            name: the name of the run in messages; by default the name of the step.

        Raises ArgumentError if an argument cannot be used.
        """
        self._step, self._create, self._args = step, create_state, tuple(args)
        self._every, self._wait_for_saves = check_limit("every", every), wait_for_saves
        self._checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir, step, keep=keep)
        self._data = data if isinstance(data, ShardedBatches) else sharded(self._plan(data), step)
        self._resume, self._guard = resume, guard or Guard()
        self._find_loss, self._on_step = find_loss or usual_loss, on_step
        self._scale, self._name = _scale_of(step, tokens_per_batch), name or step.places().name
        self._several, is_first = _place_among_processes(step)
        self._console = (console or standard_output()) if is_first else None
        self._first_position = self._data.position()

    def _plan(
        self, data: Iterable[PyTree] | Callable[[], Iterable[PyTree]]
    ) -> Iterable[PyTree] | Callable[[], Iterable[PyTree]]:
        """Plan the step unless it has a plan. Returns the data with no batch drawn from it."""
        try:
            self._step.last_plan()
        except PlanError:
            first, data = peek(data)
            plan = self._step.plan if self._checkpoints is None else self._checkpoints.plan
            plan(jax.eval_shape(self._create, *self._args), first)
        return data

    def train(self, steps: int) -> Trained:
        """Train until `steps` steps have been made, those of earlier runs in the same folder included.

        SIGTERM and Ctrl-C end the run after a step, with a checkpoint. A second signal ends it at once; the last complete
        checkpoint remains.

        Args:
            steps: the number of steps, counted from the first state.

        Returns:
            The end of the run, with the state on the devices.

        Raises:
            TrainingError: a loss was bad, and the guard says to stop.
            CheckpointError: a checkpoint cannot be written or restored, or another run writes to the folder.
            ArgumentError: the data ended early, or the folder has checkpoints and `resume` is False.
        """
        alone = contextlib.nullcontext() if self._checkpoints is None else self._checkpoints.alone()
        with alone:
            return self._train(steps)

    def _train(self, steps: int) -> Trained:
        now = self._begin()
        stop = StopRequest(several=self._several)
        report = Report(self._console, self._scale, name=self._name, first=now.number, last=steps)
        if now.number:
            report.say(f"goes on from the checkpoint of step {now.number}")
        with contextlib.ExitStack() as stack:
            stack.callback(self._data.close)
            stack.enter_context(stop.listening())
            stack.enter_context(report.showing())
            now.settled_at = time.perf_counter()
            is_stopped = self._make_steps(now, steps, stop, report)
        self._save(now)
        if self._checkpoints is not None:
            self._checkpoints.wait()
        return Trained(state=now.state, number=now.number, loss=now.loss, stopped=stop.name if is_stopped else None)

    def _begin(self) -> _Progress:
        """Return the progress to begin with: the first state, or the last checkpoint."""
        if self._checkpoints is not None:
            self._checkpoints.wait()
        known = self._checkpoints.numbers() if self._checkpoints is not None else []
        if known and not self._resume:
            assert self._checkpoints is not None
            raise ArgumentError(
                f"{self._checkpoints.folder} has checkpoints, of step {known[-1]} the last: go on from it with resume=True, or "
                "name another folder"
            )
        if self._checkpoints is not None:
            self._checkpoints.clear_unfinished()
        return self._restored() if known else self._first()

    def _first(self) -> _Progress:
        self._data.seek(self._first_position)
        state = self._step.init_state(self._create, *self._args)
        return _Progress(state=state, number=0, losses=deque(maxlen=self._guard.window))

    def _restored(self) -> _Progress:
        assert self._checkpoints is not None
        found = self._checkpoints.restore(data=self._data)
        losses = deque(map(float.fromhex, found.about.notes.get("losses", ())), maxlen=self._guard.window)
        number = self._checkpoints.numbers()[-1] if found.about.number is None else found.about.number
        return _Progress(state=found.state, number=number, losses=losses, saved=number)

    def _make_steps(self, now: _Progress, steps: int, stop: StopRequest, report: Report) -> bool:
        """Make steps until all are made, or one of the processes is asked to stop. Returns whether it was asked."""
        while True:
            if now.number >= steps or stop.is_due(now.number):
                if not self._settle(now, report):
                    continue
                return now.number < steps
            batch = self._next_batch(now, steps)
            state, *rest = self._step(now.state, batch)
            launched = self._find_loss(rest[0] if len(rest) == 1 else rest)
            if not self._settle(now, report):
                continue
            now.state, now.number = state, now.number + 1
            now.pending, now.behind = launched, self._data.position()
            if self._every is not None and now.number % self._every == 0 and self._settle(now, report):
                self._save(now)

    def _next_batch(self, now: _Progress, steps: int) -> PyTree:
        while True:
            try:
                batch = next(self._data)
            except StopIteration:
                raise ArgumentError(
                    f"the data ended after {self._data.position()['batches']} batches, and {steps} steps were asked for, of "
                    f"which {now.number} are made: give more data, or an iterable without end"
                ) from None
            if int(self._data.position()["batches"]) not in now.skipped:
                return batch

    def _settle(self, now: _Progress, report: Report) -> bool:
        """Wait for the loss of the step that is under way, and judge it. Returns False if the run has gone back because of it."""
        if now.pending is None:
            return True
        loss, now.pending = float(now.pending), None
        wrong = self._guard.judge([*now.losses], loss)
        if wrong is not None:
            self._go_back(now, wrong, report)
            return False
        ended = time.perf_counter()
        made = RunStep(now.number, loss, ended - now.settled_at)
        now.loss, now.settled_at = loss, ended
        now.losses.append(loss)
        report.tell(made)
        if self._on_step is not None:
            self._on_step(made)
        return True

    def _go_back(self, now: _Progress, wrong: str, report: Report) -> None:
        """Go back to the last checkpoint, or to the first state. Raises TrainingError if the guard says to stop."""
        if self._checkpoints is not None:
            self._checkpoints.wait()
        known = self._checkpoints.numbers() if self._checkpoints is not None else []
        where = f"the checkpoint of step {known[-1]}" if known else "the first state"
        if self._guard.action == "stop" or now.times_back >= self._guard.most:
            raise TrainingError(
                f"step {now.number} of {self._step.places().name}: {wrong}. The last good state is {where}. Lower the learning "
                "rate or look at this batch; Guard(action='skip') goes on without it, and Guard(action='back') after it."
            )
        bad, times_back, skipped = now.behind, now.times_back, now.skipped
        report.say(f"step {now.number}: {wrong}; goes back to {where}")
        again = self._restored() if known else self._first()
        now.state, now.number, now.losses = again.state, again.number, again.losses
        now.times_back, now.saved = times_back + 1, again.saved
        if self._guard.action == "skip":
            skipped.add(int(bad["batches"]))
        else:
            self._data.seek(bad)

    def _save(self, now: _Progress) -> None:
        """Save the state unless it is saved already. Its loss is known to be good."""
        if self._checkpoints is not None and now.number != now.saved:
            notes = {"losses": [loss.hex() for loss in now.losses]}
            self._checkpoints.save(now.number, now.state, data=self._data, notes=notes)
            if self._wait_for_saves:
                self._checkpoints.wait()
            now.times_back, now.saved = 0, now.number


def usual_loss(rest: PyTree) -> jax.Array:
    """Find the loss in what a step returns after the state. Raises ArgumentError if it is not a scalar."""
    found = rest["loss"] if isinstance(rest, Mapping) and "loss" in rest else rest
    if not isinstance(found, jax.Array) or found.shape != ():
        raise ArgumentError(
            "the step returns no scalar after the state, and no mapping with a scalar 'loss': return one of them, or say where "
            "the loss is, with find_loss=lambda rest: ..."
        )
    return found


def _place_among_processes(step: RunnableStep) -> tuple[bool, bool]:
    """Whether several processes have devices of the step, and whether this is the first of them."""
    processes = sorted({device.process_index for device in step.jax_devices()})
    return len(processes) > 1, jax.process_index() == processes[0]


def _scale_of(step: RunnableStep, tokens_per_batch: int | None) -> Scale:
    places = step.places()
    sizes = [leaf.shape[0] for leaf in jax.tree.leaves(places.batch) if leaf.shape]
    device, devices = step.cluster().device, places.num_devices
    ideal_s = sum(flops / device.peak_of(dtype) for dtype, flops in places.flops.items()) / devices
    count, noun = (max(sizes, default=1), "examples") if tokens_per_batch is None else (tokens_per_batch, "tokens")
    return Scale(count=count, noun=noun, ideal_s=ideal_s or None, predicted_s=places.plan.step_s)
