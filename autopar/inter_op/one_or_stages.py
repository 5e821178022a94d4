"""One mesh or pipeline stages, where the user leaves that open: the faster of the two by prediction.

In: a traced step, what is left open of a pipeline, the planner's request, the number of devices. Out: the step on one mesh, or
the pipeline. Across nodes stages are searched first: the search prices one stage too, and where that is far slower one mesh is
not planned. On one node the mesh comes first, as it nearly always wins there, and stages are searched only where they may pay:

    a pipeline divides the work among the same devices; of the one mesh's step T = c + communication it saves at most the
    communication and what each device does that others do as well (5 devices and 64 examples), which leaves d of c; and it
    idles for a third of a microbatch at least (two stages, zb-h1). With m microbatches
        gain <= T - d (1 + 1 / 3m)

and that must be a good part of the step and win back the search in a run of some length. The search stops once none of its
estimates is near T. What can go wrong: work that is less in stages than on the mesh, such as products too thin to be efficient;
the bound on the gain leaves that out, and such a step stays on one mesh.
"""

from __future__ import annotations

import dataclasses

from autopar.errors import ConstraintError, OutOfMemoryError, UnsupportedProgramError
from autopar.inter_op.one_mesh import OneMeshStep, plan_on_one_mesh, state_is_too_large
from autopar.inter_op.plan_pipeline import OneStage, PipelineWishes, SearchedPipeline, search_pipeline
from autopar.inter_op.submeshes import machine_shape
from autopar.inter_op.timetables import WORTH
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.planner import PlanRequest
from autopar.microbatches.counts import microbatch_counts
from autopar.plan import Alternative, Plan
from autopar.program.step import TracedStep

SURELY_SLOWER = 1.3
"""One stage over several nodes is not planned if the sum of its layers exceeds the best stages by this factor."""
LEAST_GAIN = 0.1
"""What part of a step stages on one node must be able to save at most for a search; they reach about half of that bound."""
STEPS = 1000
"""In so many steps the most that stages can save must be more than the time that the search for them takes."""
SEARCH_S, SEARCH_S_PER_EQUATION = 2.0, 5e-3
"""Seconds that the search may take on one core: always, and for each equation; GPTs of 4 layers took 0.5 to 4 ms for each."""
REPEATED_FORWARD = 4 / 3
"""Work of a step whose backward does forward's work again over that of one that keeps it: four thirds, a backward being two."""


def one_or_stages(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, *, devices: int
) -> OneMeshStep | SearchedPipeline:
    """The faster of the two. Raises OutOfMemoryError if neither fits, and what `plan_on_one_mesh` raises."""
    nodes, _ = machine_shape(request.cluster, devices)
    chosen = _over_nodes if nodes > 1 else _on_one_node
    return chosen(traced, wishes, request, devices)


def _over_nodes(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, devices: int
) -> OneMeshStep | SearchedPipeline:
    found = _in_stages(traced, wishes, request, devices)
    if isinstance(found, SearchedPipeline) and found.one_stage_s > SURELY_SLOWER * found.plan.step_s:
        return found
    try:
        one = _on_one_mesh(traced, wishes, request, devices)
    except OutOfMemoryError:
        if not isinstance(found, SearchedPipeline):
            raise
        return found
    return _faster(one, found)


def _on_one_node(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, devices: int
) -> OneMeshStep | SearchedPipeline:
    try:
        one = _on_one_mesh(traced, wishes, request, devices)
    except OutOfMemoryError:
        found = _in_stages(traced, wishes, request, devices)
        if not isinstance(found, SearchedPipeline):
            raise
        return found
    most, equations = _most_microbatches(traced, wishes), sum(1 for _ in traced.program.walk())
    if not stages_may_pay(one.plan, repeated_s(one.assignment), most, equations):
        return one
    return _faster(one, _in_stages(traced, wishes, request, devices, beat_s=one.plan.step_s / (1 + WORTH)))


def repeated_s(assignment: Assignment) -> float:
    """Seconds of a step in which a device does what other devices do as well."""
    ways = {eqn: strategy.ways / assignment.mesh.size for eqn, strategy in assignment.strategies.items()}
    return sum(seconds * times * (1 - min(1.0, ways.get(eqn, 1.0))) for eqn, seconds, times in assignment.seconds)


def stages_may_pay(plan: Plan, together_s: float, most_microbatches: int, equations: int) -> bool:
    """Whether stages may save enough of this plan's step, and enough time in all for a search in a program of this size.

    `together_s`: of its compute, what devices do that others do as well.
    """
    work_s = (plan.compute_s - together_s) / (REPEATED_FORWARD if plan.recompute else 1)
    gain_s = plan.step_s - work_s * (1 + 1 / (3 * most_microbatches))
    return gain_s > LEAST_GAIN * plan.step_s and gain_s * STEPS > SEARCH_S + SEARCH_S_PER_EQUATION * equations


def _most_microbatches(traced: TracedStep, wishes: PipelineWishes) -> int:
    given = wishes.num_microbatches
    return max(microbatch_counts(traced)) if given == "auto" else given


def _on_one_mesh(traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, devices: int) -> OneMeshStep:
    return plan_on_one_mesh(
        traced, request, num_microbatches=wishes.num_microbatches, recompute=wishes.recompute, devices=devices
    )


def _in_stages(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, devices: int, beat_s: float | None = None
) -> SearchedPipeline | OneStage:
    """The best pipeline of several stages, if there is one that is better than one stage.

    One mesh may fulfil constraints that a stage with the examples of one microbatch does not; what nothing fulfils it reports.
    """
    if state_is_too_large(traced, request, devices):
        return OneStage()
    try:
        return search_pipeline(traced, wishes, request, devices=devices, beat_s=beat_s)
    except (ConstraintError, OutOfMemoryError, UnsupportedProgramError):
        return OneStage()


def _faster(one: OneMeshStep, found: SearchedPipeline | OneStage) -> OneMeshStep | SearchedPipeline:
    """Of two plans the faster one; its report compares the other's ways too."""
    own = one.plan.compared or (
        Alternative(
            num_stages=1,
            num_microbatches=one.plan.num_microbatches,
            recompute=one.plan.recompute,
            step_s=one.plan.step_s,
        ),
    )
    if isinstance(found, SearchedPipeline) and found.plan.step_s < one.plan.step_s:
        compared = (*own, *found.as_compared())
        return dataclasses.replace(found, plan=dataclasses.replace(found.plan, compared=compared))
    others = found.compared if isinstance(found, OneStage) else found.as_compared()
    compared = (*own, *others) if others else one.plan.compared
    return dataclasses.replace(one, plan=dataclasses.replace(one.plan, compared=compared))
