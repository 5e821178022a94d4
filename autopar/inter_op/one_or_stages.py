"""One mesh or pipeline stages, if the user leaves that open: the faster of the two by prediction.

In: a traced step, what is left open of a pipeline, the planner's request, the number of devices. Out: a `PlannedStep` or a
`PlannedPipeline`. The mesh comes first where it nearly always wins: on one node, and across nodes that have room for the state
and reduce gradients in less time than they work (`Tuning.held`, `Tuning.reduced`). Stages are then searched only if they may pay.
Elsewhere they are searched first: the search prices one stage too, and if that is far slower, one mesh is not planned. So it is
where a step is far too large to run as it is, however it is divided (`far_excess`, `Tuning.many`, `many_across`): one mesh needs
many microbatches then, each number of which takes as long to plan as all stages, and has what the stages leave of the clock.
One stage may promise most there by the sum of its layers, and not keep it: several stages that promise about as much are planned
before one mesh (`squeezed`).

When stages may pay:

    A pipeline divides the work among the same devices. Of the one mesh's step T = c + communication it saves at most the
    communication and the work that several devices repeat (5 devices and 64 examples), which leaves d of c. It idles for a
    third of a microbatch at least (two stages, zb-h1). With m microbatches
        gain <= T - d (1 + 1 / 3m)

The bound on the gain must be a good part of the step, and repay the search in a run of some length. The search stops once none
of its estimates is near T. What can go wrong: the bound leaves out work that takes less time in stages than on the mesh, such
as products that are too thin to be efficient there; such a step stays on one mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable

from autopar.errors import ConstraintError, OutOfMemoryError, UnsupportedProgramError
from autopar.inter_op.attempts import Slower, bytes_held
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.describe_pipeline import PlannedPipeline, bound_stages
from autopar.inter_op.dynamic_program.submeshes import machine_shape
from autopar.inter_op.one_mesh import Promising, plan_on_one_mesh, state_is_too_large
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.inter_op.search_pipeline import OneStage, SearchedPipeline, search_pipeline
from autopar.inter_op.stage_seconds import repeated_s
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.planner import far_excess
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.microbatches.counts import microbatch_counts
from autopar.plan import Alternative, Plan
from autopar.program.step import TracedStep
from autopar.progress import Progress, report
from autopar.solver.budget import LateError

REPEATED_FORWARD = 4 / 3
"""Work of a step that does forward work again in backward, over that of one that keeps it: forward is a third of the latter."""

_ONE_MESH_MAY = (ConstraintError, OutOfMemoryError, UnsupportedProgramError)
"""What stages cannot be planned for, and one mesh may be: its plan reports what neither can do."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _OneOrStages:
    """A step to plan both ways, and for what."""

    traced: TracedStep
    wishes: PipelineWishes
    request: PlanRequest
    devices: int
    tuning: Tuning

    def plan_on_one_mesh(self, promising: Promising | None = None) -> PlannedStep:
        planned = self.plan_mesh_below(math.inf, promising)
        assert isinstance(planned, PlannedStep), "there is nothing that it has to beat"
        return planned

    @functools.cached_property
    def excess(self) -> float | None:
        """See `far_excess`; None if the step cannot run as it is anyway."""
        if self.wishes.num_microbatches != "auto" or self.wishes.recompute not in ("auto", "none"):
            return None
        report(Progress(at="the least memory on one mesh"))
        return far_excess(self.traced, self.request)

    def has_time_for_one_mesh(self, stages_s: float) -> bool:
        """Whether the clock leaves a good part of what all stages took to plan, and as long as it takes to find the excess."""
        budget, started = self.request.budget, time.monotonic()
        if budget.is_over or budget.seconds_left < self.tuning.begun * stages_s:
            return False
        return self.excess is None or budget.seconds_left > time.monotonic() - started

    def plan_mesh_below(self, beat_s: float, promising: Promising | None = None) -> PlannedStep | Slower:
        return plan_on_one_mesh(
            self.traced,
            self.request,
            num_microbatches=self.wishes.num_microbatches,
            recompute=self.wishes.recompute,
            devices=self.devices,
            beat_s=beat_s,
            excess=self.excess,
            promising=promising,
            tuning=self.tuning,
        )

    def plan_several(
        self, none_found: OneStage, *, beat_s: float, worth_s: float = math.inf, instead: PlannedStep | None = None
    ) -> SearchedPipeline | OneStage:
        """The best of several stages, where one stage promises more; `instead`: the plan that they have to beat.

        `beat_s`: see `search_pipeline`. `worth_s`: stages that promise to take longer are not planned as wholes.
        """
        if none_found.several is None:
            return OneStage()
        try:
            return none_found.several(beat_s, worth_s, instead is not None)
        except _ONE_MESH_MAY:
            return OneStage()

    def search_stages(self, *, beat_s: float | None = None) -> SearchedPipeline | OneStage:
        """The best pipeline of several stages; `OneStage` if there is none, or none better than one stage.

        One mesh may meet constraints that a stage cannot, which sees the examples of one microbatch. So errors are left to the
        plan of one mesh, which reports what neither can do.
        """
        if state_is_too_large(self.traced, self.request, self.devices):
            return OneStage()
        try:
            return search_pipeline(
                self.traced, self.wishes, self.request, devices=self.devices, beat_s=beat_s, tuning=self.tuning
            )
        except _ONE_MESH_MAY:
            return OneStage()


def plan_one_or_stages(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, *, devices: int, tuning: Tuning = TUNING
) -> PlannedStep | PlannedPipeline:
    """The faster of the two, with a bound of both.

    Raises OutOfMemoryError if neither fits, and what `plan_on_one_mesh` raises.
    """
    comparison = _OneOrStages(traced=traced, wishes=wishes, request=request, devices=devices, tuning=tuning)
    found = _plan_mesh_first(comparison) if _is_for_one_mesh(comparison) else _plan_stages_first(comparison)
    if isinstance(found, PlannedPipeline):
        return found  # what bounds stages bounds one mesh
    one_mesh_s = found.plan.lower_bound_s
    bound_s = min(one_mesh_s, bound_stages(traced, request, devices))
    plan = dataclasses.replace(found.plan, lower_bound_s=bound_s, one_mesh_bound_s=one_mesh_s)
    return dataclasses.replace(found, plan=plan)


def _is_for_one_mesh(comparison: _OneOrStages) -> bool:
    """Whether one mesh probably wins: if it needs few microbatches, and its nodes, if it has several, exchange little."""
    nodes, per_node = machine_shape(comparison.request.cluster, comparison.devices)
    if nodes > 1 and not _nodes_exchange_little(comparison, nodes, per_node):
        return False  # and so the excess, which takes seconds for a deep model, need not be known
    return _needs_few_microbatches(comparison)


def _needs_few_microbatches(comparison: _OneOrStages) -> bool:
    """Whether the temporaries of one mesh exceed its memory by little, so that it is soon planned."""
    nodes, _ = machine_shape(comparison.request.cluster, comparison.devices)
    most = comparison.tuning.many if nodes == 1 else comparison.tuning.many_across
    return (comparison.excess or 0.0) <= most


def _nodes_exchange_little(comparison: _OneOrStages, nodes: int, per_node: int) -> bool:
    """Whether nodes have room for the state, and reduce gradients in little time."""
    traced, request, devices = comparison.traced, comparison.request, comparison.devices
    state = [leaf for leaf in traced.inputs if leaf.role != "batch"]
    limit = request.memory_limit_bytes
    if limit is not None and bytes_held(state) > comparison.tuning.held * limit * per_node:
        return False
    in_each = bytes_held([leaf for leaf in state if leaf.use == "parameter"] or state) / per_node
    reduced_s = request.cluster.mesh_costs((nodes, per_node)).all_reduce_s(in_each, (0,))
    return reduced_s <= comparison.tuning.reduced * bound_stages(traced, request, devices)


def _plan_stages_first(comparison: _OneOrStages) -> PlannedStep | PlannedPipeline:
    match comparison.search_stages():
        case SearchedPipeline() as found:
            return _compare_with_one_mesh(comparison, found, _promising_on_one_mesh(found, comparison.tuning))
        case OneStage(promising=None) as none_found:
            return _faster(comparison.plan_on_one_mesh(), none_found)
        case OneStage() as none_found:
            return _plan_as_one_stage(comparison, none_found)


def _compare_with_one_mesh(
    comparison: _OneOrStages, found: SearchedPipeline, promising: Promising | None
) -> PlannedStep | PlannedPipeline:
    """Stages, or one mesh if that is faster and there is time to plan it."""
    if _is_surely_slower(found, comparison):
        return found.pipeline
    if not comparison.has_time_for_one_mesh(found.took_s):
        plan = found.pipeline.plan
        told = dataclasses.replace(plan, ended_early=True, not_compared=(*plan.not_compared, "one mesh"))
        return dataclasses.replace(found.pipeline, plan=told)
    try:
        one = comparison.plan_mesh_below(found.pipeline.plan.step_s, promising)
    except OutOfMemoryError:
        return found.pipeline
    if isinstance(one, PlannedStep):
        return _faster(one, found)
    plan = dataclasses.replace(found.pipeline.plan, compared=(*one.compared, *found.compared))
    return dataclasses.replace(found.pipeline, plan=plan)


def _plan_as_one_stage(comparison: _OneOrStages, none_found: OneStage) -> PlannedStep | PlannedPipeline:
    """One mesh, which promised to beat several stages; or these, if it takes longer than promised, or does not fit as a whole.

    Where it needs many microbatches to fit, it may take the whole clock and keep no promise; stages that promise about as much
    are planned before it then.
    """
    promising, tuning = none_found.promising, comparison.tuning
    assert promising is not None
    if not _needs_few_microbatches(comparison):
        worth_s = (1 + tuning.squeezed) * promising.step_s
        found = comparison.plan_several(none_found, beat_s=promising.step_s, worth_s=worth_s)
        if isinstance(found, SearchedPipeline):
            return _compare_with_one_mesh(comparison, found, promising)
    try:
        one = comparison.plan_on_one_mesh(promising)
    except OutOfMemoryError:
        with contextlib.suppress(LateError):
            found = comparison.plan_several(none_found, beat_s=math.inf)
            if isinstance(found, SearchedPipeline):
                return found.pipeline
        raise
    if one.plan.step_s <= (1 + tuning.squeezed) * promising.step_s:
        return _faster(one, none_found)
    return _compare_with_stages(
        one, comparison, lambda beat_s: comparison.plan_several(none_found, beat_s=beat_s, instead=one)
    )


def _promising_on_one_mesh(found: SearchedPipeline, tuning: Tuning) -> Promising | None:
    """The number of microbatches in which one stage beats the stages well by the sum of its layers, as far as that is known."""
    least_s: dict[int, float] = dict([found.alone_fits] if found.alone_fits is not None else [])
    for row in found.compared:
        if row.num_stages == 1 and row.estimate_s is not None:
            least_s[row.num_microbatches] = min(row.estimate_s, least_s.get(row.num_microbatches, math.inf))
    best = min(least_s, key=least_s.__getitem__, default=None)
    if best is None or least_s[best] * (1 + tuning.worth) >= found.pipeline.plan.step_s:
        return None
    return Promising(best, ())


def _is_surely_slower(found: SearchedPipeline, comparison: _OneOrStages) -> bool:
    """Whether one mesh takes far longer than stages by the sum of its layers.

    If these do not fit the memory together, as a whole may that is planned within it, what they take in as many microbatches as
    the temporaries exceed the memory is little enough to be compared as it is.
    """
    step_s = found.pipeline.plan.step_s
    if math.isfinite(found.one_stage_s):
        return found.one_stage_s > comparison.tuning.surely_slower * step_s
    is_slower = {m: found.alone_s[m] > step_s for m in sorted(found.alone_s)}
    if len(set(is_slower.values())) == 1 or comparison.request.budget.is_over:
        return all(is_slower.values())
    enough = [m for m in is_slower if m >= (comparison.excess or 1.0)]
    return is_slower[enough[0] if enough else max(is_slower)]


def _plan_mesh_first(comparison: _OneOrStages) -> PlannedStep | PlannedPipeline:
    try:
        one = comparison.plan_on_one_mesh()
    except OutOfMemoryError:
        found = comparison.search_stages()
        if isinstance(found, OneStage):
            raise
        return found.pipeline
    cluster, together_s = comparison.request.cluster, repeated_s(one.assignment)
    moving_s = one.plan.compute_s - _computed_s(one.assignment) - cluster.dispatch_s(len(comparison.traced.inputs))
    most = _most_microbatches(comparison.traced, comparison.wishes)
    equations = sum(1 for _ in comparison.traced.program.walk())
    if not stages_may_pay(one.plan, together_s + moving_s, most, equations, comparison.tuning):
        return one
    return _compare_with_stages(one, comparison, lambda beat_s: comparison.search_stages(beat_s=beat_s))


def _compare_with_stages(
    one: PlannedStep, comparison: _OneOrStages, plan_stages: Callable[[float], SearchedPipeline | OneStage]
) -> PlannedStep | PlannedPipeline:
    """One mesh, or several stages if these are faster and there is time to plan them."""
    if not comparison.request.budget.is_over:
        with contextlib.suppress(LateError):
            return _faster(one, plan_stages(one.plan.step_s / (1 + comparison.tuning.worth)))
    left = (*one.plan.not_compared, "pipeline stages")
    return dataclasses.replace(one, plan=dataclasses.replace(one.plan, ended_early=True, not_compared=left))


def _computed_s(assignment: Assignment) -> float:
    """Seconds of a step's operations, without those in which a device changes a layout by itself."""
    return sum(seconds * times for _, seconds, times in assignment.seconds)


def stages_may_pay(
    plan: Plan, together_s: float, most_microbatches: int, equations: int, tuning: Tuning = TUNING
) -> bool:
    """Whether stages may save enough of this plan's step, and enough time in all for a search in a program of this size.

    `together_s`: seconds of its compute that several devices repeat, or in which layouts change. `equations`: of the program.
    """
    work_s = (plan.compute_s - together_s) / (REPEATED_FORWARD if plan.recompute else 1)
    gain_s = plan.step_s - work_s * (1 + 1 / (3 * most_microbatches))
    search_s = tuning.search_s + tuning.search_s_per_equation * equations
    return gain_s > tuning.least_gain * plan.step_s and gain_s * tuning.repaid_in_steps > search_s


def _most_microbatches(traced: TracedStep, wishes: PipelineWishes) -> int:
    given = wishes.num_microbatches
    return max(microbatch_counts(traced)) if given == "auto" else given


def _faster(one: PlannedStep, found: SearchedPipeline | OneStage) -> PlannedStep | PlannedPipeline:
    """The faster of two plans, with both plans' comparisons in its report."""
    own = one.plan.compared or (
        Alternative(
            num_stages=1,
            num_microbatches=one.plan.num_microbatches,
            recompute=one.plan.recompute,
            step_s=one.plan.step_s,
            peak_bytes=one.plan.peak_bytes,
        ),
    )
    if isinstance(found, SearchedPipeline) and found.pipeline.plan.step_s < one.plan.step_s:
        plan = dataclasses.replace(found.pipeline.plan, compared=(*own, *found.compared))
        return dataclasses.replace(found.pipeline, plan=plan)
    compared = (*own, *found.compared) if found.compared else one.plan.compared
    return dataclasses.replace(one, plan=dataclasses.replace(one.plan, compared=compared))
