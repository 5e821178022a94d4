"""Numbers of microbatches: which ones divide the batch, and the step cut into one of them.

In: a traced step and a number. Out: the step as a loop over its microbatches. What can go wrong: a number that divides no leaf of
the batch is an ArgumentError; a step that mixes examples is refused with the operation that does.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Mapping, Sequence

from autopar.errors import ArgumentError, UnsupportedProgramError
from autopar.microbatches.loop import TimeLoop
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.phases import plan_time
from autopar.microbatches.time_plan import Phase, TimePlan
from autopar.program.program import Equation
from autopar.program.step import Leaf, TracedStep
from autopar.program.trace import retrace
from autopar.progress import Progress, report


def cut_into_microbatches(traced: TracedStep, count: int) -> TracedStep:
    """The step in `count` microbatches. Raises ArgumentError, UnsupportedProgramError if it mixes examples."""
    if count == 1:
        return traced
    plan = plan_phases(traced, count)
    if isinstance(plan, MixedExamples):
        raise not_cut(plan, count)
    return loop_over_microbatches(traced, plan)


def not_cut(why: MixedExamples, count: int) -> UnsupportedProgramError:
    """The error of a step that mixes examples and is to run in this number of microbatches."""
    return UnsupportedProgramError(
        f"the step cannot be cut into {count} microbatches: {why}. What one microbatch computes would not be what the full batch "
        "does. Use num_microbatches=1, or on one mesh 'auto'; or normalise, count and compare within an example or a fixed group "
        "of examples; or let batch normalisation have the statistics of a microbatch: batch_statistics='microbatch'."
    )


def plan_phases(
    traced: TracedStep,
    count: int,
    *,
    late_sums: bool = False,
    known: Mapping[Equation, Phase] | None = None,
    like: TimePlan | None = None,
    finite: bool = False,
) -> TimePlan | MixedExamples:
    """As `plan_time`. Raises ArgumentError if the number divides no leaf of the batch, or not all that must be cut.

    A leaf that it does not divide, such as a key or the weights of classes, stays whole if the step allows it.
    """
    leaves = _batch_leaves(traced)
    uneven = [leaf for leaf in leaves if leaf.shape[0] % count]
    if leaves and len(uneven) == len(leaves):
        raise ArgumentError(_does_not_divide(traced, count, uneven))
    plan: TimePlan | MixedExamples | None = None
    is_free, refused, key = known is None and like is None, _REFUSED.setdefault(traced, {}), (count, late_sums, finite)
    if is_free:
        plan = refused.get(key)
    if plan is None:
        plan = plan_time(traced, count, late_sums=late_sums, known=known, like=like, finite=finite)
    if is_free and isinstance(plan, MixedExamples):
        refused[key] = plan
    if uneven and isinstance(plan, MixedExamples):
        raise ArgumentError(_does_not_divide(traced, count, uneven))
    return plan


_REFUSED: weakref.WeakKeyDictionary[TracedStep, dict[tuple[int, bool, bool], MixedExamples]] = (
    weakref.WeakKeyDictionary()
)
"""Why a step cannot be cut into a number of microbatches, by the options of `plan_phases`: several searches ask for it."""


def _does_not_divide(traced: TracedStep, count: int, uneven: Sequence[Leaf]) -> str:
    listed = ", ".join(f"{leaf.path} has {leaf.shape[0]} (shape {leaf.shape})" for leaf in uneven[:4])
    return (
        f"num_microbatches={count} does not divide the examples of the batch: {listed}. Numbers that do: "
        f"{', '.join(map(str, microbatch_counts(traced)))}."
    )


def _batch_leaves(traced: TracedStep) -> list[Leaf]:
    return [leaf for leaf in traced.inputs if leaf.role == "batch" and leaf.shape]


def microbatch_counts(traced: TracedStep) -> tuple[int, ...]:
    """The numbers of microbatches that divide every leaf of the batch, ascending; (1,) without a batch.

    Leaves that all examples share, such as a key, a scale or the weights of classes, do not count if the step can be cut without
    cutting them.
    """
    leaves = _batch_leaves(traced)
    every = math.gcd(*(leaf.shape[0] for leaf in leaves))
    large = math.gcd(*(leaf.shape[0] for leaf in leaves if not leaf.shared))
    if large != every and isinstance(plan_time(traced, large), MixedExamples):
        large = every
    return tuple(m for m in range(1, large + 1) if large % m == 0) or (1,)


def loop_over_microbatches(traced: TracedStep, plan: TimePlan) -> TracedStep:
    """The step as one program with the loop inside; see the module's text."""
    report(Progress(at=f"the loop over {plan.microbatches} microbatches"))
    loop = TimeLoop(traced, plan)
    looped = dataclasses.replace(
        retrace(traced, loop.inputs(), loop.run), microbatches=plan.microbatches, assumed_finite=plan.assumed_finite
    )
    _CUT_BY[looped] = plan
    return looped


_CUT_BY: weakref.WeakKeyDictionary[TracedStep, TimePlan] = weakref.WeakKeyDictionary()


def cut_by(looped: TracedStep) -> TimePlan | None:
    """The phases by which `loop_over_microbatches` made a step; None if it did not make it."""
    return _CUT_BY.get(looped)
