"""Moments of a run, told to whoever watches: a phase begins, a step starts, an instruction is performed, a file is written.

In: a moment, from whoever has come to it. Out: each observer of this process gets it, in the thread that has come to it. An
observer may raise, and then what was about to happen fails; that is how `autopar.testing.faults` makes faults. Observers are
this process's and not a thread's, as each mesh has a thread of its own.

    phase         planning, compiling and so on; its name
    step          a step is about to start; a `StepRun`, and a list of its leaves, which an observer may change
    launched      it was started; the `StepRun`, and its results
    failed        it was not; the `StepRun`
    instruction   of a pipeline, about to be performed; for a task with a list of what it reads, which may be changed
    waiting       for another process to say what it is about to do; the process
    heard         it has said it, or is not waited for any longer; the process
    gather        arrays are about to be brought to one device; how many
    read          a checkpoint is about to be restored; its path
    write         a file is about to be written; its path
    replace       its content is written beside it, and is about to take its place
    written       it has
    point         of the user's own, for `autopar.testing.faults`; its name

What can go wrong: an observer that takes long, as it holds up what it observes. Without observers a moment costs less than a
tenth of a microsecond.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Moment:
    """What has come. `about` is what it concerns, `values` the arrays; see the module's text for both."""

    kind: str
    about: object
    values: Sequence[object] | None = None

    @property
    def name(self) -> str:
        """What it concerns, in words."""
        return str(self.about)


@dataclass(kw_only=True, eq=False)
class StepRun:
    """One call of a step. All but `wants_timeline` and `timeline` are as they were when the step began.

    Attributes:
        name: the step's.
        plan: a `Plan` or a `PipelinePlan`.
        standing: says where each mesh of this process is, a line for each, which stays the same while the mesh stands still.
        compiled: what runs, a `CompiledStep` or a `CompiledPipeline`.
        is_first: its programs run for the first time, and those of a pipeline are compiled meanwhile.
        wants_timeline: an observer of its beginning sets it, and a pipeline then waits for each task and measures it.
        timeline: what was measured, a `Timeline`.
    """

    name: str
    plan: object
    standing: Callable[[], list[str]]
    compiled: object = None
    is_first: bool = False
    wants_timeline: bool = False
    timeline: object = None

    def __str__(self) -> str:
        """Its name."""
        return self.name


Observer: TypeAlias = Callable[[Moment], None]
_OBSERVERS: list[Observer] = []


def reach(kind: str, about: object, values: Sequence[object] | None = None) -> None:
    """Tell all observers of a moment."""
    if _OBSERVERS:
        moment = Moment(kind, about, values)
        for observer in tuple(_OBSERVERS):
            observer(moment)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """A context in which a function gets every moment of this process."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


@contextlib.contextmanager
def running(run: StepRun, leaves: Sequence[object]) -> Iterator[None]:
    """A context for starting a step: its beginning is told, and whether it failed."""
    reach("step", run, leaves)
    try:
        yield
    except BaseException:
        reach("failed", run)
        raise
