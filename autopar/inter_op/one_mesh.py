"""A step on one mesh: in how many microbatches, and with which forward work done again, within the memory.

In: a traced step, what the user fixed of the two, the meshes and the memory limit. Out: the `PlannedStep` that is fastest. One
microbatch is planned first: the same work in smaller pieces takes no less time, so nothing else is tried if the step fits and
the limit costs little. If nothing fits, or the limit makes the step dear (`Tuning.dear`), more microbatches and recomputation
are compared. For each of the two ways the number of microbatches rises until a plan is no longer dear, or no faster than the
one before. What can go wrong: a larger number of microbatches may be faster after all; nobody looks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from autopar.avals import itemsize_of
from autopar.errors import ConstraintError, OutOfMemoryError, warn
from autopar.inter_op.tuning import TUNING, Tuning
from autopar.intra_op.planner import PlannedStep, PlanRequest, plan_step
from autopar.microbatches.counts import cut_into_microbatches, loop_over_microbatches, microbatch_counts
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.phases import plan_time
from autopar.plan import Alternative
from autopar.program.step import TracedStep
from autopar.progress import Progress, enter, report
from autopar.schedules.schedules import Open, Recompute
from autopar.stages.recompute_layers import recompute_layers


def plan_on_one_mesh(
    traced: TracedStep,
    request: PlanRequest,
    *,
    num_microbatches: Open,
    recompute: Recompute,
    devices: int,
    tuning: Tuning = TUNING,
) -> PlannedStep:
    """The fastest way to run the step that fits. Raises ConstraintError, OutOfMemoryError."""
    attempts = _Attempts(request, dear=tuning.dear)
    least = 1 if num_microbatches == "auto" else num_microbatches
    step = _recompute_layers(traced) if recompute == "layer" else traced
    first = attempts.plan(cut_into_microbatches(step, least), recompute=step is not traced)
    if first is None and state_is_too_large(traced, request, devices):
        raise attempts.errors[0]
    if first is None or attempts.is_dear(first):
        attempts.climb(_in_more_microbatches(step, num_microbatches), recompute=step is not traced, before=first)
        again = recompute_layers(traced) if recompute == "auto" else traced
        if again is not traced:
            steps = chain([cut_into_microbatches(again, least)], _in_more_microbatches(again, num_microbatches))
            attempts.climb(steps, recompute=True, before=None)
    return attempts.best()


def state_is_too_large(traced: TracedStep, request: PlanRequest, devices: int) -> bool:
    """Whether the state alone, spread evenly over all devices, exceeds the memory: then only more memory helps."""
    held = sum(math.prod(leaf.shape) * itemsize_of(leaf) for leaf in traced.inputs if leaf.role != "batch")
    limit = request.memory_limit_bytes
    return limit is not None and held > limit * devices


def _recompute_layers(traced: TracedStep) -> TracedStep:
    """The step with its layers' forward work done again in backward; warns if no layer's can be."""
    step = recompute_layers(traced)
    if step is traced:
        warn(
            "recompute='layer' finds no layers whose forward work could be done again in the backward pass with less memory; a "
            "scan over layers is one operation: put jax.checkpoint on its body"
        )
    return step


def _in_more_microbatches(step: TracedStep, num_microbatches: Open) -> Iterator[TracedStep]:
    """The step in two microbatches or more, as far as its batch allows; nothing if it mixes examples or the number is given."""
    for count in microbatch_counts(step)[1:] if num_microbatches == "auto" else ():
        plan = plan_time(step, count)
        if isinstance(plan, MixedExamples):
            return
        yield loop_over_microbatches(step, plan)


class _Attempts:
    """The ways that have been planned, what each takes, and the errors of those that cannot be."""

    def __init__(self, request: PlanRequest, *, dear: float) -> None:
        self._request, self._dear = request, dear
        self._found: list[PlannedStep] = []
        self._compared: list[Alternative] = []
        self.errors: list[OutOfMemoryError | ConstraintError] = []

    def plan(self, step: TracedStep, *, recompute: bool) -> PlannedStep | None:
        """Plan one way and note it; None if there is no plan. `recompute`: its backward does forward work again."""
        row = Alternative(num_stages=1, num_microbatches=step.microbatches, recompute=recompute)
        enter(
            f"planning on one mesh in {step.microbatches} microbatches"
            if step.microbatches > 1
            else "planning on one mesh"
        )
        try:
            planned = plan_step(step, self._request)
        except (OutOfMemoryError, ConstraintError) as error:
            if isinstance(error, ConstraintError) and not self._compared:
                raise  # later ways have microbatches, whose few examples may not meet the constraints
            self.errors.append(error)
            self._compared.append(row)
            return None
        self._compared.append(replace(row, step_s=planned.plan.step_s))
        self._found.append(replace(planned, plan=replace(planned.plan, recompute=recompute)))
        report(Progress(best_s=min(one.plan.step_s for one in self._found)), is_news=True)
        return self._found[-1]

    def is_dear(self, planned: PlannedStep) -> bool:
        """Whether the memory limit costs much of the step's time."""
        return planned.plan.step_s > (1 + self._dear) * planned.plan.unlimited_s

    def climb(self, steps: Iterator[TracedStep], *, recompute: bool, before: PlannedStep | None) -> None:
        """Plan steps in rising numbers of microbatches while that may pay; `before` is the plan with the number below."""
        for step in steps:
            here = self.plan(step, recompute=recompute)
            if here is None and before is None:
                continue
            if here is None or not self.is_dear(here):
                return
            if before is not None and here.plan.step_s >= before.plan.step_s:
                return
            before = here

    def best(self) -> PlannedStep:
        """The fastest way, with all that was compared in its plan. If none fits, raises the error that needs the least memory."""
        if not self._found:
            raise min(self.errors, key=_needed_bytes) from None
        best = min(self._found, key=lambda one: one.plan.step_s)
        compared = tuple(self._compared) if len(self._compared) > 1 else ()
        return replace(best, plan=replace(best.plan, compared=compared))


def _needed_bytes(error: OutOfMemoryError | ConstraintError) -> float:
    """The memory limit that would do, as far as an error knows; infinite if it does not."""
    needed = error.needed_bytes if isinstance(error, OutOfMemoryError) else None
    return math.inf if needed is None else needed
