"""A step on one mesh: in how many microbatches, and with which forward work done again, within the memory.

In: a traced step, what the user fixed of the two, the meshes and the memory limit. Out: the `PlannedStep` that is fastest. One
microbatch is planned first: the same work in smaller pieces takes no less time, so nothing else is tried if the step fits and
the limit costs little. If nothing fits, or the limit makes the step dear (`Tuning.dear`), more microbatches are planned, and
recomputation if these are dear as well. The first number is the one in which the temporaries of the plan without a limit should
fit. From there the number rises until a plan fits, and on while plans are dear and become faster. All ways share what is
known of the meshes (`SharedSearch`). What can go wrong: another number may be faster after all; nobody looks for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.avals import itemsize_of
from autopar.errors import ConstraintError, OutOfMemoryError, warn
from autopar.inter_op.tuning import TUNING, Tuning
from autopar.intra_op.compare_meshes import Beaten, SharedSearch
from autopar.intra_op.planner import plan_way
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.microbatches.counts import cut_into_microbatches, loop_over_microbatches, microbatch_counts
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.phases import plan_time
from autopar.plan import Alternative
from autopar.program.step import TracedStep
from autopar.progress import Progress, enter, report
from autopar.schedules.schedules import Open, Recompute
from autopar.stages.recompute_layers import find_recomputation, recompute_layers


@dataclass(frozen=True)
class Slower:
    """No way on one mesh was found to be faster than the time to beat; `compared`: those that were looked at."""

    compared: tuple[Alternative, ...]


def plan_on_one_mesh(
    traced: TracedStep,
    request: PlanRequest,
    *,
    num_microbatches: Open,
    recompute: Recompute,
    devices: int,
    beat_s: float = math.inf,
    tuning: Tuning = TUNING,
) -> PlannedStep | Slower:
    """The fastest way to run the step that fits. Raises ConstraintError, OutOfMemoryError.

    `beat_s`: seconds of the step in stages; `Slower` if no way on one mesh takes less, which cannot be without such a time.
    """
    has_other_ways = num_microbatches == "auto" or recompute == "auto"
    attempts = _Attempts(request, SharedSearch(best_s=beat_s, has_other_ways=has_other_ways), tuning=tuning)
    least = 1 if num_microbatches == "auto" else num_microbatches
    counts = microbatch_counts(traced) if num_microbatches == "auto" else (num_microbatches,)
    step = _recompute_layers(traced) if recompute == "layer" else traced
    first = attempts.plan(cut_into_microbatches(step, least), recompute=step is not traced)
    if first is None and state_is_too_large(traced, request, devices):
        raise attempts.errors[0]
    if not attempts.is_dear() or (isinstance(first, Beaten) and first.step_s is None):
        return attempts.best()
    excess = attempts.excess
    ways = _Ways(attempts, step, counts[1:], recompute=step is not traced)
    ways.explore(excess)
    if recompute == "auto" and attempts.is_dear() and not attempts.is_over:
        found = find_recomputation(traced)
        if found.layers:
            ways = _Ways(attempts, found.apply(traced), counts, recompute=True)
            ways.explore(excess * found.kept_share)
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


class _Attempts:
    """The ways that have been planned, what each takes, and the errors of those that cannot be."""

    def __init__(self, request: PlanRequest, shared: SharedSearch, *, tuning: Tuning) -> None:
        self._request, self._shared, self._tuning = request, shared, tuning
        self._found: list[PlannedStep] = []
        self._has_beaten = False
        self._compared: list[Alternative] = []
        self.errors: list[OutOfMemoryError | ConstraintError] = []

    @property
    def excess(self) -> float:
        """See `SharedSearch`."""
        return self._shared.excess

    @property
    def is_over(self) -> bool:
        """Whether the time is over, and there is a plan, of this step on one mesh or in stages."""
        return math.isfinite(self._shared.best_s) and self._request.budget.is_over

    def plan(self, step: TracedStep, *, recompute: bool) -> PlannedStep | Beaten | None:
        """Plan one way and note it; None if nothing fits. `recompute`: its backward does forward work again."""
        row = Alternative(num_stages=1, num_microbatches=step.microbatches, recompute=recompute)
        enter(
            f"planning on one mesh in {step.microbatches} microbatches"
            if step.microbatches > 1
            else "planning on one mesh"
        )
        try:
            planned = plan_way(step, self._request, self._shared)
        except (OutOfMemoryError, ConstraintError) as error:
            if isinstance(error, ConstraintError) and not self._compared:
                raise  # later ways have microbatches, whose few examples may not meet the constraints
            self.errors.append(error)
            self._compared.append(row)
            return None
        if isinstance(planned, Beaten):
            self._has_beaten = True
            estimate_s = planned.at_least_s if planned.step_s is None else None
            self._compared.append(replace(row, step_s=planned.step_s, estimate_s=estimate_s))
            return planned
        self._compared.append(replace(row, step_s=planned.plan.step_s))
        self._found.append(replace(planned, plan=replace(planned.plan, recompute=recompute)))
        report(Progress(best_s=min(one.plan.step_s for one in self._found)), is_news=True)
        return self._found[-1]

    def is_dear(self) -> bool:
        """Whether nothing fits so far, or the memory limit costs much of the step's time."""
        if not self._found:
            return True
        least_s = min(one.plan.unlimited_s for one in self._found)
        return self._shared.best_s > (1 + self._tuning.dear) * least_s

    def best(self) -> PlannedStep | Slower:
        """The fastest way, with all that was compared in its plan. If none fits, raises the error that needs the least memory."""
        if not self._found and self._has_beaten:
            return Slower(tuple(self._compared))
        if not self._found:
            raise min(self.errors, key=_needed_bytes) from None
        best = min(self._found, key=lambda one: one.plan.step_s)
        compared = tuple(self._compared) if len(self._compared) > 1 else ()
        left = () if not self._request.budget.is_over else ("more microbatches and recomputation",)
        left = (*best.plan.not_compared, *(left if self.is_dear() else ()))
        plan = replace(best.plan, compared=compared, not_compared=left, ended_early=bool(left))
        return replace(best, plan=plan)


class _Ways:
    """One step in several numbers of microbatches, ascending; `recompute`: its backward does forward work again."""

    def __init__(self, attempts: _Attempts, step: TracedStep, counts: Sequence[int], *, recompute: bool) -> None:
        self._attempts, self._step, self._counts, self._recompute = attempts, step, tuple(counts), recompute
        self._mixes_examples = False

    def explore(self, excess: float) -> None:
        """Plan the number in which plans without a limit should fit, and go on from there while that may pay.

        `excess`: how many times the memory that is left for temporaries those of the step in one microbatch take.
        """
        place = self._place_of(excess)
        here = None
        while place < len(self._counts) and here is None:
            here = self._plan(place)
            if self._mixes_examples or self._attempts.is_over:
                return
            further = self._counts[place] * self._attempts.excess
            place = max(place + 1, self._place_of(further) if math.isfinite(further) else place + 1)
        if isinstance(here, PlannedStep):
            self._climb(place)

    def _climb(self, place: int) -> None:
        """More microbatches, as long as each number is faster than the one before and the limit still costs much."""
        while place < len(self._counts) and self._attempts.is_dear() and not self._attempts.is_over:
            if not isinstance(self._plan(place), PlannedStep):
                return
            place += 1

    def _place_of(self, count: float) -> int:
        """The place of the first number that is not below `count`, or of the last."""
        place = next((i for i, c in enumerate(self._counts) if c >= count), len(self._counts) - 1)
        return max(place, 0)

    def _plan(self, place: int) -> PlannedStep | Beaten | None:
        count = self._counts[place]
        if count == 1:
            return self._attempts.plan(self._step, recompute=self._recompute)
        plan = plan_time(self._step, count)
        if isinstance(plan, MixedExamples):
            self._mixes_examples = True
            return None
        return self._attempts.plan(loop_over_microbatches(self._step, plan), recompute=self._recompute)


def _needed_bytes(error: OutOfMemoryError | ConstraintError) -> float:
    """The memory limit that would do, as far as an error knows; infinite if it does not."""
    needed = error.needed_bytes if isinstance(error, OutOfMemoryError) else None
    return math.inf if needed is None else needed
