"""A step on one mesh: in how many microbatches, and with which forward work done again, within the memory.

In: a traced step, what the user fixed of the two, the meshes and the memory limit. Out: the `PlannedStep` that is fastest. One
microbatch is planned first: the same work in smaller pieces takes no less time, so nothing else is tried if the step fits and
the limit costs little. If nothing fits, or the limit makes the step dear (`Tuning.dear`), more microbatches are planned, and
recomputation if these are dear as well. If that wins, less of it is tried in as many microbatches: all but the values that the
user named, and of the first layers only, as many as the rest needs to fit. The first number is the one in which the temporaries
of the plan without a limit should fit. From there it rises until a plan fits, and on while plans are dear and become faster; if
the clock ends this before anything fits, one more number is planned, and then the leanest way. All ways share what is known of
the meshes (`SharedSearch`). What can go wrong: another number may be faster after all; nobody looks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from autopar.avals import itemsize_of
from autopar.errors import ArgumentError, ConstraintError, OutOfMemoryError, warn
from autopar.inter_op.tuning import TUNING, Tuning
from autopar.intra_op.choices.allowed_values import allowed_inputs
from autopar.intra_op.compare_meshes import Beaten, SharedSearch
from autopar.intra_op.memory import tuning as memory_tuning
from autopar.intra_op.planner import far_excess, plan_way
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.counts import cut_into_microbatches, loop_over_microbatches, microbatch_counts
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.phases import plan_time
from autopar.plan import Alternative
from autopar.program.step import Leaf, TracedStep
from autopar.progress import Progress, enter, report
from autopar.schedules.schedules import Open, Recompute
from autopar.stages.recompute_layers import Recomputation, Repeated, find_recomputation, names_values

_REPEATED_SHARE = 0.25
"""Of a step that does all forward work again, the part that this takes: forward is a third of the rest."""


@dataclass(frozen=True)
class Promising:
    """A number of microbatches and meshes that look best by the sum of layers."""

    microbatches: int
    meshes: tuple[LogicalMesh, ...]


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
    excess: float | None = None,
    promising: Promising | None = None,
    tuning: Tuning = TUNING,
) -> PlannedStep | Slower:
    """The fastest way to run the step that fits. Raises ConstraintError, OutOfMemoryError.

    `beat_s`: seconds of the step in stages; `Slower` if no way on one mesh takes less, which cannot be without such a time.
    `excess`: what `far_excess` says of the step, if that is known. `promising`: planned first if one microbatch is too few.
    """
    has_other_ways = num_microbatches == "auto" or recompute == "auto"
    attempts = _Attempts(request, SharedSearch(best_s=beat_s, has_other_ways=has_other_ways), tuning=tuning)
    least = 1 if num_microbatches == "auto" else num_microbatches
    counts = microbatch_counts(traced) if num_microbatches == "auto" else (num_microbatches,)
    step, repeated = _recompute_as_asked(traced, recompute)
    if state_is_too_large(traced, request, devices) or _keeps_too_much(traced, request):
        attempts.narrow_to_least_state(traced)
        attempts.plan(cut_into_microbatches(step, least), repeated)
        if attempts.errors:
            raise attempts.errors[0]
        return attempts.best()
    first = attempts.plan_first(cut_into_microbatches(step, least), repeated, excess if step is traced else None)
    far = attempts.shared.excess
    if first is None and promising is not None and promising.microbatches in counts:
        attempts.prefer(promising.meshes)
        _Ways(attempts, step, (promising.microbatches,), repeated).explore(1.0)
    if not attempts.is_dear() or (isinstance(first, Beaten) and first.step_s is None):
        return attempts.best()
    ways, roomier = _Ways(attempts, step, counts[1:], repeated), 1.0 if beat_s == math.inf else tuning.roomier_mesh
    ways.explore(far, roomier=roomier)
    if recompute == "auto" and attempts.is_dear() and not attempts.is_over:
        found = find_recomputation(traced)
        if found.layers:
            ways = _Ways(attempts, found.apply(traced), counts, Repeated())
            if not attempts.is_late:
                ways.explore(far * found.kept_share, roomier=roomier)
            _repeat_less(attempts, traced, found, tuning)
    if attempts.is_late:
        ways.plan_leanest(devices)
    return attempts.best()


def state_is_too_large(traced: TracedStep, request: PlanRequest, devices: int) -> bool:
    """Whether the state alone, spread evenly over all devices, exceeds the memory: then only more memory helps."""
    limit = request.memory_limit_bytes
    return limit is not None and bytes_held(leaf for leaf in traced.inputs if leaf.role != "batch") > limit * devices


def _keeps_too_much(traced: TracedStep, request: PlanRequest) -> bool:
    """Whether the state alone exceeds the memory on every mesh, divided as far as the constraints allow."""
    limit = request.memory_limit_bytes
    return limit is not None and all(_least_held(traced, request, mesh) > limit for mesh in request.meshes)


def _least_held(traced: TracedStep, request: PlanRequest, mesh: LogicalMesh) -> float:
    """Bytes of the state on each device in the layouts that take the least; infinite if the mesh cannot meet the constraints."""
    try:
        allowed = allowed_inputs(traced, mesh, request.constraints)
    except ConstraintError:
        return math.inf
    pairs = ((leaf, of_leaf) for leaf, of_leaf in zip(traced.inputs, allowed, strict=True) if leaf.role != "batch")
    return sum(
        bytes_held([leaf]) / mesh.size
        if of_leaf is None
        else min(layout.local_bytes(leaf.shape, itemsize_of(leaf), mesh) for layout in of_leaf)
        for leaf, of_leaf in pairs
    )


def bytes_held(leaves: Iterable[Leaf]) -> int:
    """Bytes of these leaves, each counted once."""
    return sum(math.prod(leaf.shape) * itemsize_of(leaf) for leaf in leaves)


def _recompute_as_asked(traced: TracedStep, recompute: Recompute) -> tuple[TracedStep, Repeated | None]:
    """The step with its layers' forward work done again in backward, if that was asked for; warns if no layer's can be."""
    if recompute in ("auto", "none"):
        return traced, None
    repeated = Repeated(keeps_named=recompute == "named")
    if repeated.keeps_named and not names_values(traced):
        raise ArgumentError(
            "recompute='named' keeps the values that jax.ad_checkpoint.checkpoint_name names, and the step names none; name "
            "some, or use recompute='layer'"
        )
    step = repeated.apply(traced)
    if step is traced:
        warn(
            f"recompute={recompute!r} finds no layers whose forward work could be done again in the backward pass with less "
            "memory; a scan over layers is one operation: put jax.checkpoint on its body"
        )
        return traced, None
    return step, repeated


def _repeat_less(attempts: _Attempts, traced: TracedStep, found: Recomputation, tuning: Tuning) -> None:
    """If the fastest way repeats all layers' forward work, try less of it, as far as the memory allows and it may pay."""
    best = attempts.fastest()
    if best is None or not best.plan.recompute or attempts.is_over:
        return
    counts = (best.plan.num_microbatches,)
    if names_values(traced):
        with_names = Repeated(keeps_named=True)
        _Ways(attempts, with_names.apply(traced), counts, with_names).explore(1.0)
    layers = len(found.layers)
    too_few, enough, count = 0, layers, max(1, _layers_to_repeat(best, found))
    while too_few < count < enough and not attempts.is_over:
        if (enough - count) / layers * _REPEATED_SHARE < tuning.worth:
            return
        _Ways(attempts, found.apply(traced, count), counts, Repeated(layers=count)).explore(1.0)
        fastest = attempts.fastest()
        if fastest is not None and fastest.plan.recomputed_layers == count:
            enough = count
        else:
            too_few = count
        count = (too_few + enough) // 2


def _layers_to_repeat(best: PlannedStep, found: Recomputation) -> int:
    """Of how many layers, if the temporaries grow evenly with the layers whose results are kept, and state stays as it is."""
    plan, limit = best.plan, best.plan.memory_limit_bytes
    if limit is None:
        return 0
    kept = sum(value.bytes_per_device for value in plan.inputs if value.role != "batch")
    least = max(plan.peak_bytes - kept, 0) / memory_tuning.TUNING.temporaries_margin
    most = least / found.kept_share
    if most <= least:
        return 0
    return math.ceil(len(found.layers) * (kept + most - limit) / (most - least))


class _Attempts:
    """The ways that have been planned, what each takes, and the errors of those that cannot be."""

    def __init__(self, request: PlanRequest, shared: SharedSearch, *, tuning: Tuning) -> None:
        self._request, self.shared, self._tuning = request, shared, tuning
        self._found: list[PlannedStep] = []
        self._has_beaten = self.has_skipped = False
        self._compared: list[Alternative] = []
        self.late_looks = iter((True,))
        self._last: OutOfMemoryError | ConstraintError | None = None
        self._smallest: tuple[TracedStep, Repeated | None] | None = None
        self.errors: list[OutOfMemoryError | ConstraintError] = []

    def prefer(self, meshes: Sequence[LogicalMesh]) -> None:
        """From now on, look at these meshes before the others."""
        others = tuple(mesh for mesh in self._request.meshes if mesh not in meshes)
        first = tuple(mesh for mesh in meshes if mesh in self._request.meshes)
        self._request = replace(self._request, meshes=(*first, *others))

    def narrow_to_least_state(self, traced: TracedStep) -> None:
        """Look at one mesh alone, that on which the state takes the least: what does not fit there fits nowhere."""
        least = min(self._request.meshes, key=lambda mesh: _least_held(traced, self._request, mesh))
        self._request = replace(self._request, meshes=(least,))

    @property
    def is_over(self) -> bool:
        """Whether the time is over, and there is a plan, of this step on one mesh or in stages."""
        return math.isfinite(self.shared.best_s) and self._request.budget.is_over

    @property
    def is_late(self) -> bool:
        """Whether the time is over, and nothing fits so far."""
        return not math.isfinite(self.shared.best_s) and self._request.budget.is_over

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
            self.errors.append(error)
            self._compared.append(replace(row, obstacle=Alternative.obstacle_of(error)))
            return None
        if isinstance(planned, Beaten):
            self._has_beaten = True
            estimate_s = planned.at_least_s if planned.step_s is None else None
            self._compared.append(replace(row, step_s=planned.step_s, estimate_s=estimate_s))
            return planned
        self._compared.append(replace(row, step_s=planned.plan.step_s, peak_bytes=planned.plan.peak_bytes))
        self._found.append(replace(planned, plan=replace(planned.plan, **_fields(repeated))))
        report(Progress(best_s=min(one.plan.step_s for one in self._found)), is_news=True)
        return self._found[-1]

    def plan_first(
        self, step: TracedStep, repeated: Repeated | None, excess: float | None
    ) -> PlannedStep | Beaten | None:
        """As `plan`; what is far too large is noted as such, without a plan. `excess`: see `far_excess`."""
        if excess is None:
            excess = far_excess(step, self._request) if self.shared.has_other_ways else 0.0
        if not excess:
            return self.plan(step, repeated)
        self.shared.first, self.shared.excess = step, excess
        self._smallest = (step, repeated)
        row = Alternative(num_stages=1, num_microbatches=step.microbatches, **_fields(repeated))
        self._compared.append(replace(row, obstacle="memory"))
        return None

    def is_dear(self) -> bool:
        """Whether nothing fits so far, or the memory limit costs much of the step's time."""
        if not self._found:
            return True
        least_s = min(one.plan.unlimited_s for one in self._found)
        return self.shared.best_s > (1 + self._tuning.dear) * least_s

    def _explain(self) -> OutOfMemoryError | ConstraintError:
        """The error that needs the least memory; if the clock has left ways out, it says so."""
        error = min(self.errors, key=_needed_bytes)
        if not (self.is_late and isinstance(error, OutOfMemoryError)):
            return error
        words = f"{error}\nplanning_seconds were over before all numbers of microbatches were tried: give more."
        return OutOfMemoryError(words, needed_bytes=error.needed_bytes, tensors=error.tensors, is_settled=False)

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
        left = () if not self._request.budget.is_over else ("more microbatches and recomputation",)
        left = (*best.plan.not_compared, *(left if self.is_dear() or self.has_skipped else ()))
        plan = replace(best.plan, compared=compared, not_compared=left, ended_early=bool(left))
        return replace(best, plan=plan)


def _fields(repeated: Repeated | None) -> _RepeatedFields:
    """What a plan says of it."""
    if repeated is None:
        return {"recompute": False, "recomputed_layers": None, "keeps_named": False}
    return {"recompute": True, "recomputed_layers": repeated.layers, "keeps_named": repeated.keeps_named}


class _RepeatedFields(TypedDict):
    recompute: bool
    recomputed_layers: int | None
    keeps_named: bool


class _Ways:
    """One step in several numbers of microbatches, ascending; `repeated`: the forward work that its backward does again."""

    def __init__(self, attempts: _Attempts, step: TracedStep, counts: Sequence[int], repeated: Repeated | None) -> None:
        self._attempts, self._step, self._counts, self._repeated = attempts, step, tuple(counts), repeated
        self._mixes_examples = False
        self._tried: set[int] = set()

    def plan_leanest(self, devices: int) -> None:
        """Plan the largest number of microbatches with an example for each device, unless it was."""
        self._attempts.has_skipped = True
        self._attempts.late_looks = iter(())
        count = max((c for c in self._counts if self._counts[-1] // c >= devices), default=self._counts[-1])
        if self._place_of(count) not in self._tried:
            self.explore(count)

    def explore(self, excess: float, *, roomier: float = 1.0) -> None:
        """Plan the number in which plans without a limit should fit, and go on while that may pay and there is time.

        `excess`: how many times the memory that is left for temporaries those of the step in one microbatch take. `roomier`:
        begin with so many times more.
        """
        place, last = self._place_of(roomier * excess), self._place_of(excess) - 1
        here, is_first = None, True
        while place < len(self._counts) and here is None and (is_first or self._attempts.goes_on()):
            failed, last = last, place
            here, is_first = self._plan(place), False
            if self._mixes_examples or self._attempts.is_over:
                return
            if here is None and self._attempts.has_too_few_examples:
                self._descend(place)
                return
            further = self._counts[place] * self._attempts.shared.excess
            place = max(place + 1, self._place_of(further) if math.isfinite(further) else place + 1)
        if isinstance(here, PlannedStep):
            self._descend(last, fits=last > failed + 1)
            self._climb(place)

    def _descend(self, place: int, *, fits: bool = False) -> None:
        """Fewer microbatches, down to a number that did not fit, until examples meet the constraints or as long as `fits`."""
        fewer = iter(range(place - 1, max((tried for tried in self._tried if tried < place), default=-1), -1))
        attempts = self._attempts
        while (fits or attempts.has_too_few_examples) and not attempts.is_over and (place := next(fewer, -1)) >= 0:
            fits = isinstance(self._plan(place), PlannedStep) and fits

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
        self._tried.add(place)
        if count == 1:
            return self._attempts.plan(self._step, self._repeated)
        plan = plan_time(self._step, count)
        if isinstance(plan, MixedExamples):
            self._mixes_examples = True
            return None
        return self._attempts.plan(loop_over_microbatches(self._step, plan), self._repeated)


def _needed_bytes(error: OutOfMemoryError | ConstraintError) -> float:
    """The memory limit that would do, as far as an error knows; infinite if it does not."""
    return (isinstance(error, OutOfMemoryError) and error.needed_bytes) or math.inf
