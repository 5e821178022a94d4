"""A pipeline on a given number of meshes: stages of equal work on equal meshes, or what the search over layers finds.

In: a traced step, what the user fixed, the machine. Out: the faster `PlannedPipeline` of the two. Equal stages are planned first;
where they do not fit the memory in the usual number of microbatches, the search is asked next, which knows what layers need in
others. Across nodes the search, which also divides work and devices unequally, is always asked for as many stages; on one node
where it may pay: as for stages at all, by a bound on the gain,

    gain <= T - sum of the stages' compute x their devices / all devices x (1 + (n - 1) / 3m)

for n meshes and m microbatches, since n meshes idle for (n - 1) / 3 microbatches at least (zb-h1). What can go wrong: the search
prices ranges of layers by sums, and overlooks stages that are better as wholes.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.errors import ConstraintError, OutOfMemoryError, UnsupportedProgramError
from autopar.inter_op.compare_timetables import plan_best_pipeline
from autopar.inter_op.describe_pipeline import PlannedPipeline
from autopar.inter_op.dynamic_program.submeshes import machine_shape
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.inter_op.search_pipeline import OneStage, search_pipeline
from autopar.inter_op.tuning import TUNING, Tuning
from autopar.intra_op.request import PlanRequest
from autopar.pipeline_plan import PipelinePlan
from autopar.program.step import TracedStep
from autopar.solver.budget import LateError


def plan_given_stages(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, *, devices: int, tuning: Tuning = TUNING
) -> PlannedPipeline:
    """The best pipeline of `wishes.num_stages` meshes. Raises what `plan_best_pipeline` raises."""
    are_fixed = wishes.stage_meshes is not None or wishes.following is not None
    try:
        equal = plan_best_pipeline(traced, wishes, request, devices=devices, seeks_room=are_fixed, tuning=tuning)
    except (ConstraintError, OutOfMemoryError):
        if are_fixed or request.budget.is_over:
            raise
        return _plan_what_fits(traced, wishes, request, devices=devices, tuning=tuning)
    if are_fixed:
        return equal
    nodes, _ = machine_shape(request.cluster, devices)
    if nodes == 1 and not _may_gain(equal.plan, devices, sum(1 for _ in traced.program.walk()), tuning):
        return equal
    if request.budget.is_over:
        return _tell_what_is_left(equal)
    try:
        found = search_pipeline(
            traced,
            wishes,
            request,
            devices=devices,
            num_stages=wishes.num_stages,
            beat_s=equal.plan.step_s,
            tuning=tuning,
        )
    except (ConstraintError, OutOfMemoryError, UnsupportedProgramError):
        return equal
    except LateError:
        return _tell_what_is_left(equal)
    if isinstance(found, OneStage) or found.pipeline.plan.step_s >= equal.plan.step_s:
        return equal
    plan = found.pipeline.plan
    seconds = equal.plan.planning_s + plan.planning_s
    return dataclasses.replace(found.pipeline, plan=dataclasses.replace(plan, planning_s=seconds))


def _plan_what_fits(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, *, devices: int, tuning: Tuning
) -> PlannedPipeline:
    """The pipeline that the search finds, where equal stages do not fit; else equal stages in more microbatches."""
    try:
        found = search_pipeline(traced, wishes, request, devices=devices, num_stages=wishes.num_stages, tuning=tuning)
    except (ConstraintError, OutOfMemoryError, UnsupportedProgramError, LateError):
        found = None
    if found is None or isinstance(found, OneStage):
        return plan_best_pipeline(traced, wishes, request, devices=devices, tuning=tuning)
    return found.pipeline


def _tell_what_is_left(equal: PlannedPipeline) -> PlannedPipeline:
    """The plan, which says that the clock has ended the search for others."""
    left = (*equal.plan.not_compared, "stages of unequal work")
    return dataclasses.replace(equal, plan=dataclasses.replace(equal.plan, ended_early=True, not_compared=left))


def _may_gain(plan: PipelinePlan, devices: int, equations: int, tuning: Tuning) -> bool:
    """Whether other stages may save enough of this plan's step, and enough time in all for a search."""
    meshes = plan.num_stages // plan.virtual_stages
    even_s = sum(stage.plan.compute_s * math.prod(stage.plan.mesh_shape) for stage in plan.stages) / devices
    gain_s = plan.step_s - even_s * (1 + (meshes - 1) / (3 * plan.num_microbatches))
    search_s = tuning.search_s + tuning.search_s_per_equation * equations
    return gain_s > tuning.least_gain * plan.step_s and gain_s * tuning.repaid_in_steps > search_s
