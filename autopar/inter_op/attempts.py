"""The ways to run a step on one mesh that have been planned, and what each takes.

In: steps, each in its number of microbatches and with its recomputation. Out: the fastest plan, or `Slower`. What can go wrong:
nothing fits; the error of the way that needs the least memory says so.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from autopar.avals import itemsize_of
from autopar.errors import ConstraintError, OutOfMemoryError
from autopar.inter_op.candidates.tuning import Tuning
from autopar.intra_op.choices.allowed_values import allowed_inputs
from autopar.intra_op.planner import far_excess, least_excess, plan_way
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.intra_op.shared_search import Beaten, SharedSearch
from autopar.layouts.mesh import LogicalMesh
from autopar.plan import Alternative
from autopar.program.step import Leaf, TracedStep
from autopar.progress import Progress, enter, report
from autopar.stages.recompute_layers import Repeated


@dataclass(frozen=True)
class Slower:
    """No way on one mesh was found to be faster than the time to beat; `compared`: those that were looked at."""

    compared: tuple[Alternative, ...]


class Attempts:
    """The ways that have been planned, what each takes, and the errors of those that cannot be."""

    def __init__(self, request: PlanRequest, shared: SharedSearch, *, tuning: Tuning) -> None:
        self._request, self.shared, self._tuning = request, shared, tuning
        self._found: list[PlannedStep] = []
        self._has_beaten = self.has_skipped = False
        self._compared: list[Alternative] = []
        self.late_looks = iter((True,))
        self._took_s = 0.0
        self._last: OutOfMemoryError | ConstraintError | None = None
        self._smallest: tuple[TracedStep, Repeated | None] | None = None
        self.errors: dict[OutOfMemoryError | ConstraintError, Alternative] = {}
        self._refused: dict[Hashable, OutOfMemoryError | ConstraintError] = {}
        self._beaten: dict[Hashable, Beaten] = {}
        self._wanted = 1.0

    def prefer(self, meshes: Sequence[LogicalMesh]) -> None:
        """From now on, look at these meshes before the others."""
        others = tuple(mesh for mesh in self._request.meshes if mesh not in meshes)
        first = tuple(mesh for mesh in meshes if mesh in self._request.meshes)
        self._request = replace(self._request, meshes=(*first, *others))

    @property
    def is_over(self) -> bool:
        """Whether there is a plan, of this step on one mesh or in stages, and no time to look at another way."""
        budget = self._request.budget
        is_too_late = budget.is_over or budget.seconds_left < self._tuning.begun * self._took_s
        return math.isfinite(self.shared.best_s) and is_too_late

    @property
    def is_early(self) -> bool:
        """Whether less than half of the time is used, so that a way that promises little may be looked at."""
        return self._request.budget.used < 0.5

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """A context in which one way is cut and planned: another one takes about as long."""
        started = time.monotonic()
        yield
        self._took_s = time.monotonic() - started

    @property
    def is_late(self) -> bool:
        """Whether the time is over, and nothing fits so far."""
        return not math.isfinite(self.shared.best_s) and self._request.budget.is_over

    @property
    def has_none(self) -> bool:
        """Whether there is no plan so far, on one mesh or in stages."""
        return not self._found and math.isinf(self.shared.best_s)

    def goes_on(self) -> bool:
        """Whether to plan another way: in time, and once more if nothing fits when the time is over."""
        return not self.is_late or next(self.late_looks, False)

    @property
    def has_too_few_examples(self) -> bool:
        """Whether the last way could not meet the constraints, which an earlier one with more examples at once could."""
        return isinstance(self._last, ConstraintError)

    def fastest(self) -> PlannedStep | None:
        """The fastest way so far; None if none fits."""
        return min(self._found, key=lambda one: one.plan.step_s, default=None)

    def plan(self, step: TracedStep, repeated: Repeated | None) -> PlannedStep | Beaten | None:
        """Plan one way and note it; None if nothing fits. `repeated`: the forward work that its backward does again."""
        row = Alternative(num_stages=1, num_microbatches=step.microbatches, **_fields(repeated))
        if (known := self._refused.get(self._key(step, repeated))) is not None:
            self._last = known
            return None
        if (beaten := self._beaten.get(self._key(step, repeated))) is not None:
            return beaten  # the time to beat has not risen
        if excess := self._sure_excess(step):
            self._leave_out(step, repeated, excess)
            return None
        enter("planning on one mesh" + (f" in {step.microbatches} microbatches" if step.microbatches > 1 else ""))
        try:
            self._last = None
            planned = plan_way(step, self._request, self.shared)
        except (OutOfMemoryError, ConstraintError) as error:
            self._last = error
            if isinstance(error, OutOfMemoryError):
                self._smallest = (step, repeated)
            if isinstance(error, ConstraintError) and not self._compared:
                raise  # later ways have microbatches, whose few examples may not meet the constraints
            self.errors[error] = row
            self._refused[self._key(step, repeated)] = error
            self._note(replace(row, obstacle=Alternative.obstacle_of(error)))
            return None
        if isinstance(planned, Beaten):
            self._has_beaten = True
            self._beaten[self._key(step, repeated)] = planned
            estimate_s = planned.at_least_s if planned.step_s is None else None
            self._note(replace(row, step_s=planned.step_s, estimate_s=estimate_s))
            return planned
        self._note(replace(row, step_s=planned.plan.step_s, peak_bytes=planned.plan.peak_bytes))
        self._found.append(replace(planned, plan=replace(planned.plan, **_fields(repeated))))
        report(Progress(best_s=min(one.plan.step_s for one in self._found)), is_news=True)
        return self._found[-1]

    def _note(self, row: Alternative) -> None:
        """Note what a way takes, in place of what was known of it."""
        self._compared = [*(one for one in self._compared if _way_of(one) != _way_of(row)), row]

    def _key(self, step: TracedStep, repeated: Repeated | None) -> Hashable:
        """What decides whether a way is refused: where there are others, it is left after less work."""
        return step.microbatches, repeated, self.shared.has_other_ways

    def plan_first(
        self, step: TracedStep, repeated: Repeated | None, excess: float | None
    ) -> PlannedStep | Beaten | None:
        """As `plan`; what is far too large is noted as such, without a plan. `excess`: see `far_excess`."""
        if excess is None:
            excess = far_excess(step, self._request) if self.shared.has_other_ways else 0.0
        if not excess:
            return self.plan(step, repeated)
        self.shared.first, self._wanted = step, excess
        self._leave_out(step, repeated, excess)
        return None

    def _sure_excess(self, step: TracedStep) -> float:
        """See `least_excess`, of a way in fewer microbatches than the first one asks for, or that is too late; 0 of others.

        It takes a fifth of what a search takes to find out.
        """
        is_doubtful = self.is_late or step.microbatches < self._wanted
        if not self.shared.has_other_ways or math.isfinite(self.shared.best_s) or not is_doubtful:
            return 0.0
        return least_excess(step, self._request)

    def _leave_out(self, step: TracedStep, repeated: Repeated | None, excess: float) -> None:
        """Note a way as too large, without a plan."""
        self._smallest, self.shared.excess, self._last = (step, repeated), excess, None
        row = Alternative(num_stages=1, num_microbatches=step.microbatches, **_fields(repeated))
        self._note(replace(row, obstacle="memory"))

    def is_dear(self) -> bool:
        """Whether nothing fits so far, or the memory limit costs much of the step's time."""
        if not self._found:
            return True
        least_s = min(one.plan.unlimited_s for one in self._found)
        return self.shared.best_s > (1 + self._tuning.dear) * least_s

    def may_recompute(self) -> bool:
        """Whether forward work done again may pay: in fewer microbatches, as these hold more then.

        Where the memory asked for many, what each of them gathers and exchanges, and products that are small, are no cost of the
        limit to `is_dear`, which knows the time without a limit in as many. So the time is compared with that of the work alone.
        """
        work_s = self.shared.work_s or self.shared.evenly_divided_s
        needs_more = self._smallest is not None
        return self.is_dear() or (needs_more and self.shared.best_s > work_s / (1 - self._tuning.repeated_share))

    def is_far_slower(self) -> bool:
        """Whether the fastest way takes far longer than the work, so that ways that were left early may be worth more work."""
        work_s, best_s = self.shared.work_s or self.shared.evenly_divided_s, self.shared.best_s
        return work_s > 0 and self._tuning.far_slower * work_s < best_s < math.inf

    def was_left_early(self, count: int, repeated: Repeated | None) -> bool:
        """Whether a way in so many microbatches was left after little work, or was not looked at."""
        key = count, repeated, True
        error = self._refused.get(key)
        is_open = error is None or (isinstance(error, OutOfMemoryError) and not error.is_settled)
        is_planned = any(_way_of(row) == (count, *_fields(repeated).values()) and row.step_s for row in self._compared)
        return is_open and not is_planned and key not in self._beaten

    @contextlib.contextmanager
    def insisting(self) -> Iterator[None]:
        """A context in which a way is searched as if there were no other."""
        before, self.shared.has_other_ways = self.shared.has_other_ways, False
        try:
            yield
        finally:
            self.shared.has_other_ways = before

    def _explain(self) -> OutOfMemoryError | ConstraintError:
        """The error that needs the least memory; if the clock has left ways out, it says so."""
        error = min(self.errors, key=_needed_bytes)
        if not isinstance(error, OutOfMemoryError):
            return error
        words = [str(error)]
        words += [_of_ways(self.errors[error], len(self._compared))] if len(self._compared) > 1 else []
        words += ["planning_seconds were over before all numbers were tried: give more."] if self.is_late else []
        is_settled = error.is_settled and not self.is_late
        return OutOfMemoryError(
            "\n".join(words),
            needed_bytes=error.needed_bytes,
            bound_bytes=error.bound_bytes,
            tensors=error.tensors,
            is_settled=is_settled,
        )

    def best(self) -> PlannedStep | Slower:
        """The fastest way, with all that was compared in its plan. If none fits, raises the error that needs the least memory."""
        if not self._found and (self._has_beaten or math.isfinite(self.shared.best_s)):
            return Slower(tuple(self._compared))
        if not self._found and self._smallest is not None and self.shared.has_other_ways:
            self.shared.has_other_ways = False  # every way has failed at little cost: the last one again, at any
            self.plan(*self._smallest)
        if not self._found:
            raise self._explain() from None
        best = min(self._found, key=lambda one: one.plan.step_s)
        compared = tuple(self._compared) if len(self._compared) > 1 else ()
        left = ("more microbatches and recomputation",) if self.is_over else ()
        left = (*best.plan.not_compared, *(left if self.is_dear() or self.has_skipped else ()))
        plan = replace(best.plan, compared=compared, not_compared=left, ended_early=bool(left))
        return replace(best, plan=plan)


def _way_of(row: Alternative) -> Hashable:
    return row.num_microbatches, row.recompute, row.recomputed_layers, row.keeps_named


def _of_ways(row: Alternative, ways: int) -> str:
    """Of which way an error speaks, where several were looked at."""
    parts = "1 microbatch" if row.num_microbatches == 1 else f"{row.num_microbatches} microbatches"
    again = " with forward work done again" if row.recompute else ""
    return f"This is of the step in {parts}{again}, the leanest of {ways} ways that were looked at."


def _fields(repeated: Repeated | None) -> _RepeatedFields:
    """What a plan says of it."""
    if repeated is None:
        return {"recompute": False, "recomputed_layers": None, "keeps_named": False}
    return {"recompute": True, "recomputed_layers": repeated.layers, "keeps_named": repeated.keeps_named}


class _RepeatedFields(TypedDict):
    recompute: bool
    recomputed_layers: int | None
    keeps_named: bool


def least_held(traced: TracedStep, request: PlanRequest, mesh: LogicalMesh) -> float:
    """Bytes of the state on each device in the layouts that take the least; infinite if the mesh cannot meet the constraints."""
    try:
        return sum(least_of_leaves(traced, request, mesh).values())
    except ConstraintError:
        return math.inf


def least_of_leaves(traced: TracedStep, request: PlanRequest, mesh: LogicalMesh) -> dict[str, float]:
    """Bytes of each leaf of the state on a device, by its path, in the layout that takes the least.

    Raises ConstraintError if the mesh cannot meet the constraints.
    """
    allowed = allowed_inputs(traced, mesh, request.constraints)
    return {
        leaf.path: bytes_held([leaf]) / mesh.size
        if of_leaf is None
        else min(layout.local_bytes(leaf.shape, itemsize_of(leaf), mesh) for layout in of_leaf)
        for leaf, of_leaf in zip(traced.inputs, allowed, strict=True)
        if leaf.role != "batch"
    }


def bytes_held(leaves: Iterable[Leaf]) -> int:
    """Bytes of these leaves, each counted once."""
    return sum(math.prod(leaf.shape) * itemsize_of(leaf) for leaf in leaves)


def _needed_bytes(error: OutOfMemoryError | ConstraintError) -> tuple[float, float]:
    """The memory limit that would do, and that below which nothing does, as far as an error knows; infinite if it does not."""
    if not isinstance(error, OutOfMemoryError):
        return math.inf, math.inf
    return error.needed_bytes or math.inf, error.bound_bytes or math.inf
