"""The time loop of a step that is to run in stages, for any number of microbatches.

In: a traced step, or one whose scans are split. Out: a `TimeLoop`. What can go wrong: a step that mixes examples has no such loop
and cannot be a pipeline of several microbatches; the error names the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.errors import UnsupportedProgramError
from autopar.microbatches.counts import planned_time
from autopar.microbatches.loop import TimeLoop
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.time_plan import Phase
from autopar.program.program import Equation
from autopar.program.step import TracedStep
from autopar.stages.split_scans import SplitStep


def divided_loop(split: SplitStep, num_microbatches: int) -> TimeLoop:
    """A divided step as prologue, body and epilogue: each part of an operation where the whole one is. Raises as `time_loop`."""
    whole = time_loop(split.whole, num_microbatches)
    if split.step is split.whole:
        return whole
    known = {eqn: whole.plan.phases[origin] for eqn, origin in split.origins.items()}
    return time_loop(split.step, num_microbatches, known=known)


def loops(split: SplitStep, usual: int) -> Callable[[int], TimeLoop]:
    """A divided step in any number of microbatches, its operations in the phases that they have in the usual number of them."""
    first = divided_loop(split, usual)
    return lambda count: first if count == usual else time_loop(split.step, count, known=first.plan.phases)


def time_loop(traced: TracedStep, num_microbatches: int, *, known: Mapping[Equation, Phase] | None = None) -> TimeLoop:
    """The step as prologue, body and epilogue. Raises ArgumentError, UnsupportedProgramError."""
    plan = planned_time(traced, num_microbatches, late_sums=True, known=known)
    if isinstance(plan, MixedExamples):
        raise UnsupportedProgramError(
            f"the step cannot be cut into {num_microbatches} microbatches: {plan}. What one microbatch computes would not be "
            "what the full batch does. Use num_microbatches=1, or normalise, count and compare within an example."
        )
    return TimeLoop(traced, plan)
