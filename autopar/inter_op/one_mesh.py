"""A step on one mesh: in how many microbatches, and with which forward work done again, within the memory.

In: a traced step, what the user fixed of the two, the meshes and the memory limit. Out: the `PlannedStep` that is fastest. One
microbatch is planned first: the same work in smaller pieces takes no less time, so nothing else is tried if the step fits and
the limit costs little. If nothing fits, or the limit makes the step dear (`Tuning.dear`), more microbatches are planned, and
recomputation if these are dear as well, or take far longer than their work alone. It comes first, as it needs fewer microbatches,
where these would have fewer examples than there are devices, and stages are planned. If it wins, less of it is tried in as many
microbatches: all but the values that the user named, and of the first layers only, as many as the rest needs to fit. The first
number is the one in which the temporaries of the plan without a limit should fit. From there it rises until a plan fits, and on
while plans are dear and become faster; if the clock ends this before anything fits, one more number is planned. If nothing fits,
the leanest way is planned last. Where one microbatch is far too large (`far_excess`), others may be as well: a way in fewer
microbatches than that asks for is left out if even its evenly divided temporaries do not fit (`least_excess`). All ways share
what is known of the meshes (`SharedSearch`). What can go wrong: another number may be faster after all; nobody looks for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import ArgumentError, ConstraintError, OutOfMemoryError, warn
from autopar.inter_op.attempts import Attempts, Slower, bytes_held, least_held, least_of_leaves
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.intra_op.memory import tuning as memory_tuning
from autopar.intra_op.out_of_memory import state_does_not_fit
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.intra_op.shared_search import Beaten, SharedSearch
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.counts import cut_into_microbatches, loop_over_microbatches, microbatch_counts
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.phases import plan_time
from autopar.program.step import TracedStep
from autopar.schedules.schedules import Open, Recompute
from autopar.stages.recompute_layers import Recomputation, Repeated, find_recomputation, names_values


@dataclass(frozen=True)
class Promising:
    """A way that looks best by the sum of layers: microbatches, meshes, whether forward work is done again, and seconds."""

    microbatches: int
    meshes: tuple[LogicalMesh, ...]
    recompute: bool = False
    step_s: float = math.inf


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
    attempts = Attempts(request, SharedSearch(best_s=beat_s, has_other_ways=has_other_ways), tuning=tuning)
    least = 1 if num_microbatches == "auto" else num_microbatches
    counts = microbatch_counts(traced) if num_microbatches == "auto" else (num_microbatches,)
    step, repeated = _recompute_as_asked(traced, recompute)
    if state_is_too_large(traced, request, devices) or _keeps_too_much(traced, request):
        raise _state_error(traced, request)
    with attempts.timed():
        first = attempts.plan_first(cut_into_microbatches(step, least), repeated, excess if step is traced else None)
    far = attempts.shared.excess
    if first is None and promising is not None and promising.microbatches in counts[1:]:
        _plan_promising(attempts, step, counts[1:], repeated, promising, is_last=beat_s < math.inf)
    if not attempts.is_dear() or (isinstance(first, Beaten) and first.step_s is None):
        return attempts.best()
    roomier = 1.0 if beat_s == math.inf else tuning.roomier_mesh
    ways = plain = _Ways(attempts, step, counts[1:], repeated)
    again = functools.partial(_plan_recomputed, attempts, traced, counts, excess=far, roomier=roomier, tuning=tuning)
    again_first = recompute == "auto" and beat_s < math.inf and plain.have_too_few_examples(roomier * far, devices)
    if again_first:
        ways = again() or plain
    if not again_first or not attempts.is_over:
        plain.find_first(far, roomier=roomier)
    if recompute != "auto" or attempts.is_dear() or not attempts.may_recompute():
        plain.refine()
    if recompute == "auto" and not again_first and attempts.may_recompute() and not attempts.is_over:
        ways = again() or plain
    plain.refine()
    if attempts.has_none and counts[1:]:
        ways.plan_leanest(devices)
    return attempts.best()


def _plan_promising(
    attempts: Attempts,
    step: TracedStep,
    counts: Sequence[int],
    repeated: Repeated | None,
    promising: Promising,
    *,
    is_last: bool,
) -> None:
    """Plan the way that looks best, and then fewer microbatches as long as they are faster: sums may have too many.

    They are planned early, or while there is time if one mesh is the last to be planned (`is_last`). Where the way does forward
    work again, and `repeated` does not say how, that is all of it.
    """
    attempts.prefer(promising.meshes)
    if promising.recompute and repeated is None:
        repeated = Repeated()
        step = repeated.apply(step)
    for count in reversed([count for count in counts if count <= promising.microbatches]):
        _Ways(attempts, step, (count,), repeated).explore(1.0)
        fastest = attempts.fastest()
        has_time = not attempts.is_over if is_last else attempts.is_early
        if fastest is None or fastest.plan.num_microbatches != count or not has_time:
            return


def state_is_too_large(traced: TracedStep, request: PlanRequest, devices: int) -> bool:
    """Whether the state alone, spread evenly over all devices, exceeds the memory: then only more memory helps."""
    limit = request.memory_limit_bytes
    return limit is not None and bytes_held(leaf for leaf in traced.inputs if leaf.role != "batch") > limit * devices


def _keeps_too_much(traced: TracedStep, request: PlanRequest) -> bool:
    """Whether the state alone exceeds the memory on every mesh, divided as far as the constraints allow."""
    limit, held = request.memory_limit_bytes, [least_held(traced, request, mesh) for mesh in request.meshes]
    return limit is not None and all(limit < bytes_ < math.inf for bytes_ in held)


def _state_error(traced: TracedStep, request: PlanRequest) -> OutOfMemoryError | ConstraintError:
    """Of a step whose state alone is too large, on the mesh where it takes the least."""
    mesh = min(request.meshes, key=lambda mesh: least_held(traced, request, mesh))
    try:
        held = least_of_leaves(traced, request, mesh)
    except ConstraintError as error:
        return error
    limit = request.memory_limit_bytes or 0
    return state_does_not_fit(
        held, devices=mesh.size, limit_bytes=limit, is_constrained=bool(request.constraints.rules)
    )


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


def _plan_recomputed(
    attempts: Attempts, traced: TracedStep, counts: Sequence[int], *, excess: float, roomier: float, tuning: Tuning
) -> _Ways | None:
    """Plan the step with the forward work of all layers done again, then of fewer; None if no layer's can be."""
    found = find_recomputation(traced)
    if not found.layers:
        return None
    ways = _Ways(attempts, found.apply(traced), counts, Repeated())
    if not attempts.is_late:
        ways.explore(excess * found.kept_share, roomier=roomier)
        ways.insist()
    _repeat_less(attempts, traced, found, tuning)
    return ways


def _repeat_less(attempts: Attempts, traced: TracedStep, found: Recomputation, tuning: Tuning) -> None:
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
        if (enough - count) / layers * tuning.repeated_share < tuning.worth:
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


class _Ways:
    """One step in several numbers of microbatches, ascending; `repeated`: the forward work that its backward does again."""

    def __init__(self, attempts: Attempts, step: TracedStep, counts: Sequence[int], repeated: Repeated | None) -> None:
        self._attempts, self._step, self._counts, self._repeated = attempts, step, tuple(counts), repeated
        self._mixes_examples = False
        self._tried: set[int] = set()
        self._fitting: int | None = None
        self._next, self._has_gap = 0, False

    def have_too_few_examples(self, count: float, devices: int) -> bool:
        """Whether a microbatch has fewer examples than there are devices, if there are so many microbatches."""
        return bool(self._counts) and self._counts[-1] // self._counts[self._place_of(count)] < devices

    def plan_leanest(self, devices: int) -> None:
        """Plan the largest number of microbatches with an example for each device, unless it was."""
        self._attempts.has_skipped = self._attempts.is_late
        count = max((c for c in self._counts if self._counts[-1] // c >= devices), default=self._counts[-1])
        place = self._place_of(count)
        if place not in self._tried and isinstance(self._plan(place), PlannedStep):
            self._fitting, self._next = place, place + 1
            self.refine()

    def insist(self) -> None:
        """Plan numbers that were left early once more, fewest first up to one that fits, and those that were skipped on the way.

        How much the fastest choice exceeds the memory tells how many microbatches are needed where results of examples take it.
        Copies of weights take as much in any number: a choice that keeps none of them may fit in few, and nobody has looked.
        """
        first = min(self._tried, default=len(self._counts))
        for place in range(first, len(self._counts)):
            fastest = self._attempts.fastest()
            is_more = fastest is not None and self._counts[place] >= fastest.plan.num_microbatches
            if is_more or self._attempts.is_over or not self._attempts.is_far_slower():
                return
            if self._attempts.was_left_early(self._counts[place], self._repeated):
                with self._attempts.insisting():
                    found = self._plan(place)
                if isinstance(found, PlannedStep):
                    return

    def explore(self, excess: float, *, roomier: float = 1.0) -> None:
        """Plan the first number that fits, see `find_first`, and those around it."""
        self.find_first(excess, roomier=roomier)
        self.refine()

    def find_first(self, excess: float, *, roomier: float = 1.0) -> None:
        """Plan the number in which plans without a limit should fit, and go on to the first that does, as long as there is time.

        `excess`: how many times the memory that is left for temporaries those of the step in one microbatch take. `roomier`:
        begin with so many times more, unless that is beaten.
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
        usual = self._place_of(excess)
        if isinstance(here, Beaten) and usual < last and usual not in self._tried:
            here, last = self._plan(usual), usual
        if isinstance(here, PlannedStep):
            self._fitting, self._next, self._has_gap = last, place, last > failed + 1

    def refine(self) -> None:
        """Plan numbers around the first that fitted, once: fewer that were left out on the way, and more while they pay."""
        place, self._fitting = self._fitting, None
        if place is not None:
            self._descend(place, fits=self._has_gap)
            self._climb(self._next)

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
        with self._attempts.timed():
            return self._plan_count(count)

    def _plan_count(self, count: int) -> PlannedStep | Beaten | None:
        if count == 1:
            return self._attempts.plan(self._step, self._repeated)
        plan = plan_time(self._step, count)
        if isinstance(plan, MixedExamples):
            self._mixes_examples = True
            return None
        return self._attempts.plan(loop_over_microbatches(self._step, plan), self._repeated)
