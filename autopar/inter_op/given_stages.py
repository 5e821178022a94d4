"""A pipeline on a given number of meshes: stages of equal work on equal meshes, or what the search over layers finds.

In: a traced step, what the user fixed, the machine. Out: the faster `PlannedPipeline` of the two. In a short step equal stages
are planned first, in a long one, whose stages take long to plan as wholes, the search is asked first: it plans what repeats once.
If its stages take as wholes what the sum of their layers promised, equal stages, which promise no less, are not planned; else
they are, in the timetable that it found alone. Where equal stages do not fit the memory in the usual number of microbatches, the
search is asked as well, which knows what layers need in others. The second of the two is planned where it may pay: as for stages
at all, by a bound on the gain,

    gain <= T - sum of the stages' compute x their devices / all devices x (1 + (n - 1) / 3m)

for n meshes and m microbatches, since n meshes idle for (n - 1) / 3 microbatches at least (zb-h1). Across nodes the search, which
also divides work and devices unequally, always is. What can go wrong: the search prices ranges of layers by sums, and overlooks
stages that are better as wholes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import cast

from autopar.errors import ConstraintError, OutOfMemoryError, UnsupportedProgramError
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.compare_timetables import plan_best_pipeline
from autopar.inter_op.describe_pipeline import PlannedPipeline
from autopar.inter_op.dynamic_program.submeshes import machine_shape
from autopar.inter_op.plan_pipeline import PipelineWishes, alternative_of
from autopar.inter_op.search_pipeline import OneStage, SearchedPipeline, search_pipeline
from autopar.intra_op.request import PlanRequest
from autopar.pipeline_plan import PipelinePlan
from autopar.program.step import TracedStep
from autopar.schedules.schedules import ScheduleName
from autopar.solver.budget import LateError


def plan_given_stages(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, *, devices: int, tuning: Tuning = TUNING
) -> PlannedPipeline:
    """The best pipeline of `wishes.num_stages` meshes. Raises what `plan_best_pipeline` raises."""
    if wishes.stage_meshes is not None or wishes.following is not None:
        return plan_best_pipeline(traced, wishes, request, devices=devices, tuning=tuning)
    equations = sum(1 for _ in traced.program.walk())

    def plan_equal_stages(*, seeks_room: bool, like: PipelinePlan | None = None) -> PlannedPipeline:
        own = wishes if like is None else _in_timetable_of(like, wishes)
        return plan_best_pipeline(traced, own, request, devices=devices, seeks_room=seeks_room, tuning=tuning)

    def search(beat_s: float | None = None) -> SearchedPipeline | None:
        """Stages by layers, if there are any that fit and take less."""
        try:
            found = search_pipeline(
                traced, wishes, request, devices=devices, num_stages=wishes.num_stages, beat_s=beat_s, tuning=tuning
            )
        except (ConstraintError, OutOfMemoryError, UnsupportedProgramError):
            return None
        return None if isinstance(found, OneStage) else found

    if equations >= tuning.searched_first:
        return _search_first(request, devices, plan_equal_stages, search, tuning)
    try:
        equal = plan_equal_stages(seeks_room=False)
    except (ConstraintError, OutOfMemoryError):
        if request.budget.is_over:
            raise
        unequal = _or_none(search)
        return plan_equal_stages(seeks_room=True) if unequal is None else unequal.pipeline
    nodes, _ = machine_shape(request.cluster, devices)
    if nodes == 1 and not _may_gain(equal.plan, devices, equations, tuning):
        return equal
    if request.budget.is_over:
        return _tell_what_is_left(equal, "stages of unequal work")
    try:
        found = search(equal.plan.step_s)
    except LateError:
        return _tell_what_is_left(equal, "stages of unequal work")
    return equal if found is None else _faster(equal, found.pipeline)


def _search_first(
    request: PlanRequest,
    devices: int,
    plan_equal_stages: Callable[..., PlannedPipeline],
    search: Callable[[], SearchedPipeline | None],
    tuning: Tuning,
) -> PlannedPipeline:
    """What the search finds, or equal stages in that timetable if they are faster; equal ones in any if it finds none."""
    found = _or_none(search)
    if found is None:
        return plan_equal_stages(seeks_room=True)
    unequal, step_s = found.pipeline, found.pipeline.plan.step_s
    is_as_promised = step_s <= (1 + tuning.worth) * found.promised_s
    if is_as_promised or _most_gain_s(unequal.plan, devices) <= tuning.worth * step_s:
        return unequal
    if request.budget.is_over:
        return _tell_what_is_left(unequal, "stages of equal work")
    try:
        return _faster(unequal, plan_equal_stages(seeks_room=False, like=unequal.plan))
    except (ConstraintError, OutOfMemoryError):
        return unequal


def _or_none(search: Callable[[], SearchedPipeline | None]) -> SearchedPipeline | None:
    """What a search finds before the clock ends it."""
    try:
        return search()
    except LateError:
        return None


def _faster(first: PlannedPipeline, second: PlannedPipeline) -> PlannedPipeline:
    """The faster of two plans, the first in doubt; the second took the time of both."""
    if second.plan.step_s >= first.plan.step_s:
        return first
    seconds = first.plan.planning_s + second.plan.planning_s
    rows = first.plan.compared or (alternative_of(first.plan),)
    compared = second.plan.compared or (*rows, alternative_of(second.plan))
    return dataclasses.replace(second, plan=dataclasses.replace(second.plan, planning_s=seconds, compared=compared))


def _tell_what_is_left(found: PlannedPipeline, others: str) -> PlannedPipeline:
    """The plan, which says that the clock has ended the search for others."""
    left = (*found.plan.not_compared, others)
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, ended_early=True, not_compared=left))


def _in_timetable_of(plan: PipelinePlan, wishes: PipelineWishes) -> PipelineWishes:
    """What the user wishes, in the microbatches and the schedule of a plan."""
    return dataclasses.replace(
        wishes,
        num_microbatches=plan.num_microbatches,
        schedule=cast(ScheduleName, plan.schedule),
        virtual_stages=plan.virtual_stages,
    )


def _may_gain(plan: PipelinePlan, devices: int, equations: int, tuning: Tuning) -> bool:
    """Whether other stages may save enough of this plan's step, and enough time in all for a search."""
    gain_s = _most_gain_s(plan, devices)
    search_s = tuning.search_s + tuning.search_s_per_equation * equations
    return gain_s > tuning.least_gain * plan.step_s and gain_s * tuning.repaid_in_steps > search_s


def _most_gain_s(plan: PipelinePlan, devices: int) -> float:
    """The most that other stages may save of this plan's step; see the module."""
    meshes = plan.num_stages // plan.virtual_stages
    even_s = sum(stage.plan.compute_s * math.prod(stage.plan.mesh_shape) for stage in plan.stages) / devices
    return plan.step_s - even_s * (1 + (meshes - 1) / (3 * plan.num_microbatches))
