"""The time loop of a step that is to run in stages, for any number of microbatches.

In: a traced step, or one whose scans are split. Out: a `TimeLoop`. What can go wrong: a step that mixes examples has no such
loop, so it cannot run as a pipeline of several microbatches. The error names the operation that mixes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from autopar.compat import source_line
from autopar.errors import UnsupportedProgramError
from autopar.microbatches.counts import not_cut, plan_phases
from autopar.microbatches.loop import TimeLoop
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.time_plan import Phase, TimePlan
from autopar.program.program import Equation
from autopar.program.step import TracedStep
from autopar.stages.segments import first_call
from autopar.stages.split_scans import SplitStep


def make_divided_loop(split: SplitStep, num_microbatches: int) -> TimeLoop:
    """A divided step as prologue, body and epilogue. Each part of an operation is in the phase of the whole operation.

    Raises as `make_time_loop`.
    """
    whole = make_time_loop(split.whole, num_microbatches)
    if split.step is split.whole:
        return whole
    known = {eqn: whole.plan.phases[origin] for eqn, origin in split.origins.items()}
    finite = whole.plan.is_of_finite
    return make_time_loop(split.step, num_microbatches, known=known, finite=finite, pieces=split.pieces)


def make_loops(split: SplitStep, usual: int) -> Callable[[int], TimeLoop]:
    """A function from a number of microbatches to the loop of a divided step, with the phases of `usual` microbatches."""
    first = make_divided_loop(split, usual)

    def loop_of(count: int) -> TimeLoop:
        if count == usual:
            return first
        return make_time_loop(split.step, count, known=first.plan.phases, like=first.plan, pieces=first.pieces)

    return loop_of


def make_time_loop(
    traced: TracedStep,
    num_microbatches: int,
    *,
    known: Mapping[Equation, Phase] | None = None,
    like: TimePlan | None = None,
    finite: bool = False,
    pieces: frozenset[Equation] = frozenset(),
) -> TimeLoop:
    """The step as prologue, body and epilogue. Raises ArgumentError, UnsupportedProgramError."""
    plan = plan_phases(traced, num_microbatches, late_sums=True, known=known, like=like, finite=finite)
    if isinstance(plan, MixedExamples):
        raise not_cut(plan, num_microbatches)
    if like is not None:
        plan = dataclasses.replace(plan, taken_from=like.microbatches)
    for eqn in plan.of_phase("prologue"):
        call = first_call(eqn)
        if call is not None:
            raise UnsupportedProgramError(
                f"the step calls Python once, with {call.primitive.name} at {source_line(call)}, for what the microbatches of "
                "pipeline stages need: each stage would call it. Use num_stages=1, or call it outside and pass on its results."
            )
    return TimeLoop(traced, plan, pieces=pieces)
