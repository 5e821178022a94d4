"""From a traced step and a user's wishes to a `PlannedPipeline` in one timetable.

In: a step, what the user wishes of a pipeline (`PipelineWishes`), a timetable, the machine. Out: the plan, and the `Staged`
programs behind it. What can go wrong: wishes that exclude each other; the errors name the numbers that would do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import cast

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.inter_op.candidates.timetables import (
    Timetable,
    counts_around,
    list_timetables,
    more_counts,
    usual_microbatches,
)
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.describe_pipeline import PlannedPipeline, RestoredPipeline, describe_pipeline
from autopar.inter_op.dynamic_program.kinds import KindOfNodes, kinds_of
from autopar.inter_op.plan_stage import StagesTooLargeError
from autopar.inter_op.plan_stages import StageRequest, plan_stages, restore_stages, split_devices
from autopar.inter_op.stage_seconds import Staged
from autopar.intra_op.request import PlanRequest
from autopar.intra_op.restore import another_step
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.counts import microbatch_counts
from autopar.microbatches.named_phases import NamedPhases
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Alternative
from autopar.program.step import TracedStep
from autopar.schedules.in_flight import InFlight
from autopar.schedules.schedules import (
    NAMED_SCHEDULES,
    TRAINING,
    Open,
    Recompute,
    ScheduleName,
    interleaves,
    make_schedule,
)
from autopar.schedules.tasks import Schedule
from autopar.stages.dependence import takes_gradients
from autopar.stages.follow import Following, homes_of
from autopar.stages.tasks.mesh_memory import fit_together, peak_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineWishes:
    """What the user fixed of a pipeline, and left open. `num_stages` counts meshes; each has `virtual_stages` stages.

    `following`: the leaves' homes and layouts are those of another step.
    """

    num_stages: int
    num_microbatches: Open = "auto"
    schedule: str = "auto"
    virtual_stages: Open = "auto"
    stage_meshes: tuple[LogicalMesh, ...] | None = None
    recompute: Recompute = "auto"
    following: Following | None = None

    def timetables(
        self, traced: TracedStep, num_stages: int, devices: int, tuning: Tuning = TUNING
    ) -> tuple[Timetable, ...]:
        """The timetables that are left open for about `num_stages` stages on these devices: the usual one first."""
        counts, given = self._counts(traced), self.num_microbatches
        usual = usual_microbatches(counts, num_stages, devices=devices) if given == "auto" else given
        around = counts_around(counts, usual, tuning) if given == "auto" else (given,)
        return self._list(traced, around, usual, tuning)

    def larger_timetables(
        self, traced: TracedStep, around: Sequence[Timetable], tuning: Tuning = TUNING
    ) -> tuple[Timetable, ...]:
        """Those with more microbatches than `around`, fewest first, for a step that fits the memory in none of these."""
        if self.num_microbatches != "auto":
            return ()
        counts = more_counts(self._counts(traced), max(one.microbatches for one in around), tuning)
        return self._list(traced, counts, counts[0], tuning) if counts else ()

    def _counts(self, traced: TracedStep) -> tuple[int, ...]:
        counts = microbatch_counts(traced)
        if interleaves(self.schedule):
            return tuple(m for m in counts if m % self.num_stages == 0) or counts
        return counts

    def _list(self, traced: TracedStep, counts: Sequence[int], usual: int, tuning: Tuning) -> tuple[Timetable, ...]:
        return list_timetables(
            counts,
            usual=usual,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            gradients=takes_gradients(traced),
            tuning=tuning,
        )


def plan_pipeline(
    traced: TracedStep,
    wishes: PipelineWishes,
    timetable: Timetable,
    request: PlanRequest,
    *,
    devices: int,
    tuning: Tuning = TUNING,
) -> PlannedPipeline:
    """The plan of a pipeline with this timetable. Raises ArgumentError, ConstraintError, OutOfMemoryError and others."""
    started = time.perf_counter()
    schedule = schedule_for(timetable, wishes.num_stages)
    wanted = StageRequest(
        meshes=_choose_meshes(wishes, devices),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        in_flight=InFlight(schedule),
        also=in_flight_if_split(timetable, wishes.num_stages) if wishes.schedule == "auto" else (),
    )
    if wishes.following is not None:
        following = wishes.following
        scan_cuts = following.scan_cuts(traced)
        wanted = dataclasses.replace(wanted, scan_cuts=scan_cuts, homes=following.homes, following=following)
    of_stage = share_memory(request, schedule)
    staged = plan_with_recomputation(traced, wanted, of_stage, wishes.recompute, tuning=tuning)
    _refuse_gradients_without_backward(staged, schedule)
    planned = describe_pipeline(traced, staged, schedule, request)
    return dataclasses.replace(
        planned, plan=dataclasses.replace(planned.plan, planning_s=time.perf_counter() - started)
    )


def plan_in_other_schedules(
    planned: PlannedPipeline, timetable: Timetable, others: Sequence[Timetable], request: PlanRequest
) -> dict[Timetable, PlannedPipeline]:
    """The same stages in those other timetables that differ by the schedule alone, as far as they fit the memory.

    `timetable`: the one in which they are planned.
    """
    like = [t for t in others if t != timetable and dataclasses.replace(t, schedule=timetable.schedule) == timetable]
    found = {t: _plan_in_schedule(planned, t, request) for t in like}
    return {t: one for t, one in found.items() if one is not None}


def _plan_in_schedule(planned: PlannedPipeline, timetable: Timetable, request: PlanRequest) -> PlannedPipeline | None:
    staged = planned.staged
    schedule = schedule_for(timetable, len(staged.stages) // timetable.virtual_stages)
    in_flight, shared = InFlight(schedule), share_memory(request, schedule).memory_limit_bytes
    limits = [stage.plan.memory_limit_bytes if stage.node_kind else shared for stage in staged.stages]
    if not fit_together([stage.memory for stage in staged.stages], limits, in_flight):
        return None
    stages = tuple(
        dataclasses.replace(stage, peak_bytes=peak_bytes([stage.memory], in_flight)) for stage in staged.stages
    )
    return describe_pipeline(planned.traced, dataclasses.replace(staged, stages=stages), schedule, request)


def plan_with_recomputation(
    traced: TracedStep,
    wanted: StageRequest,
    request: PlanRequest,
    recompute: Recompute,
    *,
    tuning: Tuning = TUNING,
) -> Staged:
    """The stages, with forward work done again in backward if that was asked for, or if nothing else fits.

    `wanted.shares`: the parts of it with which the stages should fit. Of those that do not, ever more is done again; without
    such parts, of all stages.
    """
    again = functools.partial(dataclasses.replace, wanted, keeps_named=recompute == "named")
    plan = functools.partial(plan_stages, traced, request=request, tuning=tuning)
    if recompute in ("layer", "named"):
        return plan(wanted=again(shares=(1.0,) * wanted.num_stages))
    if recompute == "none":
        return plan(wanted=again())
    if wanted.shares:
        return _plan_with_own_shares(plan, wanted, tuning)
    *tried, largest = sorted(tuning.recomputed_shares)
    for share in tried:
        with contextlib.suppress(OutOfMemoryError):
            return plan(wanted=again(shares=(share,) * wanted.num_stages if share else ()))
    return plan(wanted=again(shares=(largest,) * wanted.num_stages))


def _plan_with_own_shares(plan: Callable[..., Staged], wanted: StageRequest, tuning: Tuning) -> Staged:
    """The stages, of which those that do not fit do more forward work again, each as much as it has to."""
    shares, largest = wanted.shares, max(tuning.recomputed_shares)
    while True:
        try:
            return plan(wanted=dataclasses.replace(wanted, shares=shares, largest_share=largest))
        except StagesTooLargeError as error:
            more = {
                share: min(one for one in tuning.recomputed_shares if one > share) for share in {*shares} - {largest}
            }
            shares = tuple(more[one] if stage in error.stages else one for stage, one in enumerate(shares))


def restore_pipeline(
    traced: TracedStep, plan: PipelinePlan, request: PlanRequest, *, phases: NamedPhases | None = None
) -> RestoredPipeline:
    """The stages of a plan, without solving. Raises PlanError if the plan is for another step.

    `phases`: those that the plan was made with, if it is known to be of this very step and request. It is not checked then.
    """
    if plan.fingerprint != traced.fingerprint.digest:
        raise another_step(traced, plan.fingerprint, plan.trail)
    wanted = StageRequest(
        meshes=(),
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        cuts=plan.cuts,
        shares=plan.recomputed_shares,
        keeps_named=plan.keeps_named,
        scan_cuts=plan.scan_cuts,
        homes=homes_of(plan),
        kinds=_kinds_of_plan(plan, request),
    )
    return restore_stages(traced, plan, wanted, request, phases=phases)


def _kinds_of_plan(plan: PipelinePlan, request: PlanRequest) -> tuple[KindOfNodes, ...]:
    """The kind of node of each stage; none if the plan or the cluster has no kinds."""
    known = {kind.name: kind for kind in kinds_of(request)}
    names = [stage.node_kind for stage in plan.stages]
    return tuple(known[name] for name in names) if all(name in known for name in names) else ()


def alternative_of(plan: PipelinePlan) -> Alternative:
    """A planned pipeline as a row among what was compared."""
    return Alternative(
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        recompute=plan.recompute,
        step_s=plan.step_s,
        peak_bytes=plan.peak_bytes,
    )


def timetable_of(one: Alternative) -> Timetable:
    """The timetable of a row among what was compared."""
    return Timetable(one.num_microbatches, cast(ScheduleName, one.schedule), one.virtual_stages)


def share_memory(request: PlanRequest, schedule: Schedule) -> PlanRequest:
    """The request of one stage: an equal part of its mesh's memory, of which those on one mesh may still take unlike parts."""
    limit = request.memory_limit_bytes
    return dataclasses.replace(request, memory_limit_bytes=None if limit is None else limit // schedule.virtual_stages)


def schedule_for(timetable: Timetable, num_meshes: int) -> Schedule:
    """The schedule of a timetable on this number of meshes."""
    return make_schedule(
        timetable.schedule,
        num_meshes=num_meshes,
        num_microbatches=timetable.microbatches,
        virtual_stages=timetable.virtual_stages,
    )


def in_flight_if_split(timetable: Timetable, num_meshes: int) -> tuple[InFlight, ...]:
    """What the schedules keep in flight that split the backward, in the same number of microbatches; one stage on each mesh."""
    if timetable.virtual_stages > 1 or timetable.is_split:
        return ()
    split = [name for name, schedule in NAMED_SCHEDULES.items() if schedule.is_split]
    return tuple(InFlight(schedule_for(dataclasses.replace(timetable, schedule=one), num_meshes)) for one in split)


def _choose_meshes(wishes: PipelineWishes, devices: int) -> tuple[tuple[LogicalMesh, ...], ...]:
    """The logical meshes that each stage may have."""
    if wishes.stage_meshes is None:
        return split_devices(devices, wishes.num_stages)
    total = sum(mesh.size for mesh in wishes.stage_meshes)
    if total > devices:
        shapes = [mesh.shape for mesh in wishes.stage_meshes]
        each = f"{len(shapes)} times {shapes[0]}" if len(set(shapes)) == 1 else ", ".join(map(str, shapes))
        raise ArgumentError(
            f"the stages' meshes ({each}) need {total} devices, there are {devices}; use smaller shapes in mesh_shape, or fewer "
            f"stages, or XLA_FLAGS=--xla_force_host_platform_device_count={total} to try it on virtual CPU devices"
        )
    return tuple((mesh,) for mesh in wishes.stage_meshes)


def _refuse_gradients_without_backward(staged: Staged, schedule: Schedule) -> None:
    """Raise ArgumentError for a schedule of forwards alone if the step computes gradients."""
    backward = [name for name in staged.cut.segments if name.kind == "backward"]
    if backward and schedule.kinds == ("forward",):
        raise ArgumentError(
            f"schedule={schedule.name!r} runs forward only, and this step computes gradients; use one of "
            f"{', '.join(map(repr, TRAINING))}"
        )
