"""A step on one mesh: in how many microbatches, and with which forward work done again, within the memory.

In: a traced step, what the user fixed of the two, meshes and the limit. Out: the step as it runs, its plan and assignment. One
microbatch is planned first: the same work in smaller pieces takes no less time, so nothing else is tried where the memory lets it
run as it would without a limit. Where nothing fits, or the limit makes the step `DEAR`, more microbatches and recomputation are
compared: each with rising numbers of microbatches, until a plan is no longer dear, or no faster than the one before.
What can go wrong: a number of microbatches further up that is faster after all; it is not looked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from autopar.avals import itemsize_of
from autopar.errors import ConstraintError, OutOfMemoryError, warn
from autopar.gc_pause import spared_collector
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.planner import PlanRequest, plan_step
from autopar.microbatches.counts import in_microbatches, microbatch_counts, microbatched
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.phases import plan_time
from autopar.plan import Alternative, Plan
from autopar.program.step import TracedStep
from autopar.schedules.schedules import Open, Recompute
from autopar.stages.recompute_layers import recomputed_step

DEAR = 0.2
"""What part of a step's time without limit a limit may cost before other ways to meet it are looked for."""


@dataclass(frozen=True, eq=False)
class OneMeshStep:
    """A step as it runs on one mesh, and its plan."""

    traced: TracedStep
    plan: Plan
    assignment: Assignment

    @property
    def is_dear(self) -> bool:
        """Whether the memory limit costs much time."""
        return self.plan.step_s > (1 + DEAR) * self.plan.unlimited_s


@spared_collector()
def plan_on_one_mesh(
    traced: TracedStep, request: PlanRequest, *, num_microbatches: Open, recompute: Recompute, devices: int
) -> OneMeshStep:
    """The fastest way to run the step that fits. Raises ConstraintError, OutOfMemoryError."""
    search, least = _Search(request), 1 if num_microbatches == "auto" else num_microbatches
    step = _recomputed(traced) if recompute == "layer" else traced
    first = search.tried(in_microbatches(step, least), step is not traced)
    if first is None and state_is_too_large(traced, request, devices):
        raise search.errors[0]
    if first is None or first.is_dear:
        search.climb(_in_more(step, num_microbatches), step is not traced, first)
        again = recomputed_step(traced) if recompute == "auto" else traced
        if again is not traced:
            search.climb(chain([in_microbatches(again, least)], _in_more(again, num_microbatches)), True, None)
    return search.best()


def state_is_too_large(traced: TracedStep, request: PlanRequest, devices: int) -> bool:
    """Whether the state alone, spread evenly over all devices, exceeds the memory: then nothing helps but more of it."""
    held = sum(math.prod(leaf.shape) * itemsize_of(leaf) for leaf in traced.inputs if leaf.role != "batch")
    limit = request.memory_limit_bytes
    return limit is not None and held > limit * devices


def _recomputed(traced: TracedStep) -> TracedStep:
    """The step with layers' forward work done again; a warning where nothing can be."""
    step = recomputed_step(traced)
    if step is traced:
        warn(
            "recompute='layer' finds no layers whose forward work could be done again in the backward pass with less memory; a "
            "scan over layers is one operation: put jax.checkpoint on its body"
        )
    return step


def _in_more(step: TracedStep, num_microbatches: Open) -> Iterator[TracedStep]:
    """The step in two microbatches or more, as far as its batch allows; nothing if it mixes examples or their number is given."""
    for count in microbatch_counts(step)[1:] if num_microbatches == "auto" else ():
        plan = plan_time(step, count)
        if isinstance(plan, MixedExamples):
            return
        yield microbatched(step, plan)


class _Search:
    """What was tried, and the errors of what could not be."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._found: list[OneMeshStep] = []
        self._compared: list[Alternative] = []
        self.errors: list[OutOfMemoryError | ConstraintError] = []

    def tried(self, step: TracedStep, again: bool) -> OneMeshStep | None:
        """The step planned, None if it cannot be; `again`: it does forward work again in backward."""
        row = Alternative(num_stages=1, num_microbatches=step.microbatches, recompute=again)
        try:
            planned = plan_step(step, self._request)
        except (OutOfMemoryError, ConstraintError) as error:
            if isinstance(error, ConstraintError) and not self._compared:
                raise  # of the first way; later, constraints that no slice of so few examples can meet
            self.errors.append(error)
            self._compared.append(row)
            return None
        self._compared.append(replace(row, step_s=planned.plan.step_s))
        self._found.append(OneMeshStep(step, replace(planned.plan, recompute=again), planned.assignment))
        return self._found[-1]

    def climb(self, steps: Iterator[TracedStep], again: bool, before: OneMeshStep | None) -> None:
        """Try steps in rising numbers of microbatches while that may pay; `before`: in the number below the first of them."""
        for step in steps:
            here = self.tried(step, again)
            if here is None and before is None:
                continue
            if here is None or not here.is_dear or (before is not None and here.plan.step_s >= before.plan.step_s):
                return
            before = here

    def best(self) -> OneMeshStep:
        """The fastest; what was compared goes with its plan. Raises the error of the way that needs least if nothing fits."""
        if not self._found:
            raise min(self.errors, key=_needed_bytes) from None
        best = min(self._found, key=lambda one: one.plan.step_s)
        compared = tuple(self._compared) if len(self._compared) > 1 else ()
        return replace(best, plan=replace(best.plan, compared=compared))


def _needed_bytes(error: OutOfMemoryError | ConstraintError) -> float:
    """The limit that the plan of an error would need, infinite if it is not known."""
    needed = error.needed_bytes if isinstance(error, OutOfMemoryError) else None
    return math.inf if needed is None else needed
