"""From a traced step and a user's wishes to a `PipelinePlan`.

In: how many stages, microbatches and virtual stages, which schedule, which meshes; for `search_pipeline`, what is left open of
that. Out: the plan, with the step time that the runtime's simulator predicts from the stages' seconds, and the `Staged` programs
behind it. What can go wrong: wishes that exclude each other; the errors name the numbers that would do.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import cast

from autopar.errors import ArgumentError, OutOfMemoryError, PlanError
from autopar.gc_pause import spared_collector
from autopar.inter_op.plan_stages import StageRequest, plan_stages, restore_stages, split_devices
from autopar.inter_op.search import NotFaster, search_stages
from autopar.inter_op.stage_seconds import Staged, StagedStage, transfer_bytes
from autopar.inter_op.submeshes import machine_shape
from autopar.inter_op.timetables import Timetable, counts_around, timetables, usual_microbatches
from autopar.intra_op.planner import PlanRequest
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.counts import microbatch_counts
from autopar.pipeline_plan import PipelinePlan, StagePlan, TransferPlan
from autopar.plan import Alternative
from autopar.program.step import TracedStep
from autopar.schedules.in_flight import InFlight, microbatches_in_flight
from autopar.schedules.instructions import Run
from autopar.schedules.schedules import Open, Recompute, ScheduleName, make_schedule
from autopar.schedules.simulate import Simulation, simulate_schedule
from autopar.schedules.tasks import Schedule
from autopar.stages.dependence import takes_gradients
from autopar.stages.follow import Following, homes_of
from autopar.stages.rejoin_scans import merged
from autopar.stages.scan_stacks import every_layer
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import loops

ONCE = ("update", "weights")
"""Transfers that happen once per step."""


@dataclasses.dataclass(frozen=True)
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

    def timetables(self, traced: TracedStep, num_stages: int) -> tuple[Timetable, ...]:
        """What is left open of the timetable of about so many stages: the usual one first."""
        counts, given = microbatch_counts(traced), self.num_microbatches
        if self.schedule == "interleaved":
            counts = tuple(m for m in counts if m % self.num_stages == 0) or counts
        usual = usual_microbatches(counts, num_stages) if given == "auto" else given
        return timetables(
            counts_around(counts, usual) if given == "auto" else (given,),
            usual=usual,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            gradients=takes_gradients(traced),
        )


@spared_collector()
def plan_pipeline(
    traced: TracedStep, wishes: PipelineWishes, timetable: Timetable, request: PlanRequest, *, devices: int
) -> tuple[PipelinePlan, Staged]:
    """The plan of a pipeline with this timetable. Raises ArgumentError, ConstraintError, OutOfMemoryError and others."""
    started = time.perf_counter()
    schedule = _schedule(timetable, wishes.num_stages)
    meshes = _meshes(wishes, devices)
    wanted = StageRequest(meshes, schedule.num_stages, schedule.num_microbatches, InFlight(schedule))
    if wishes.following is not None:
        following = wishes.following
        scan_cuts = following.scan_cuts(traced)
        wanted = dataclasses.replace(wanted, scan_cuts=scan_cuts, homes=following.homes, following=following)
    staged = _with_recomputation(traced, wanted, _shared(request, schedule), wishes.recompute)
    _check_backward(staged, schedule)
    plan = _describe(traced, staged, schedule, request)
    return dataclasses.replace(plan, planning_s=time.perf_counter() - started), staged


def in_other_schedules(
    traced: TracedStep, staged: Staged, now: Timetable, timetables: Sequence[Timetable], request: PlanRequest
) -> dict[Timetable, tuple[PipelinePlan, Staged]]:
    """The same stages in those of the other timetables that differ by the schedule alone and fit the memory."""
    like = [t for t in timetables if t != now and dataclasses.replace(t, schedule=now.schedule) == now]
    found = {t: _in_timetable(traced, staged, t, request) for t in like}
    return {t: one for t, one in found.items() if one is not None}


def _in_timetable(
    traced: TracedStep, staged: Staged, timetable: Timetable, request: PlanRequest
) -> tuple[PipelinePlan, Staged] | None:
    schedule = _schedule(timetable, len(staged.stages) // timetable.virtual_stages)
    kept = InFlight(schedule)
    stages = tuple(dataclasses.replace(stage, peak_bytes=stage.memory.with_in_flight(kept)) for stage in staged.stages)
    limit = _shared(request, schedule).memory_limit_bytes
    if limit is not None and any(stage.peak_bytes > limit for stage in stages):
        return None
    staged = dataclasses.replace(staged, stages=stages)
    return _describe(traced, staged, schedule, request), staged


def as_planned(plan: PipelinePlan) -> Alternative:
    """A planned pipeline among what was compared."""
    return Alternative(
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        recompute=plan.recompute,
        step_s=plan.step_s,
    )


def timetable_of(one: Alternative) -> Timetable:
    """The timetable of something that was compared."""
    return Timetable(one.num_microbatches, cast(ScheduleName, one.schedule), one.virtual_stages)


def _shared(request: PlanRequest, schedule: Schedule) -> PlanRequest:
    """The request of one stage: those on one mesh share its memory."""
    limit = request.memory_limit_bytes
    return dataclasses.replace(request, memory_limit_bytes=None if limit is None else limit // schedule.virtual_stages)


@dataclasses.dataclass(frozen=True, eq=False)
class SearchedPipeline:
    """What the search found. By the sum of layers: `one_stage_s`, of one stage on all devices; `by_layers_s`, a microbatch's
    seconds in each stage."""

    plan: PipelinePlan
    staged: Staged
    one_stage_s: float
    by_layers_s: tuple[float, ...]

    def as_compared(self) -> tuple[Alternative, ...]:
        """All that was compared, the plan itself if nothing else was."""
        return self.plan.compared or (as_planned(self.plan),)


@dataclasses.dataclass(frozen=True)
class OneStage:
    """What the search found if one stage is best; `compared`: what several would take, where they had to beat one."""

    compared: tuple[Alternative, ...] = ()


@spared_collector()
def search_pipeline(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, *, devices: int, beat_s: float | None = None
) -> SearchedPipeline | OneStage:
    """The best pipeline with as many stages as pay. Raises what `plan_pipeline` raises.

    `beat_s`: seconds of the step on one mesh; the search ends where several stages do not promise to take less.
    """
    started = time.perf_counter()
    tables = wishes.timetables(traced, max(2, machine_shape(request.cluster, devices)[0]))
    split = split_scans(traced, every_layer(traced))
    loop_of = loops(split, tables[0].microbatches)
    again = {"auto": (False, True), "none": (False,), "layer": (True,)}[wishes.recompute]
    found = search_stages(loop_of, request, devices=devices, timetables=tables, recompute=again, beat_s=beat_s)
    if isinstance(found, NotFaster):
        return OneStage(found.compared)
    if len(found.sizes) == 1:
        return OneStage()
    schedule = _schedule(found.timetable, len(found.sizes) // found.timetable.virtual_stages)
    split, loop, cuts = merged(split, found.loop, found.cuts)
    wanted = StageRequest(
        found.meshes, schedule.num_stages, schedule.num_microbatches, InFlight(schedule), cuts, loop, split=split
    )
    recompute: Recompute = "layer" if found.recompute else wishes.recompute
    staged = _with_recomputation(traced, wanted, _shared(request, schedule), recompute)
    plans = {found.timetable: (_describe(traced, staged, schedule, request), staged)}
    plans |= in_other_schedules(traced, staged, found.timetable, tables, request)
    plan, staged = min(plans.values(), key=lambda one: one[0].step_s)
    rows = {timetable_of(one): one for one in found.compared} | {t: as_planned(one[0]) for t, one in plans.items()}
    compared = tuple(rows[t] for t in sorted(rows)) if len(rows) > 1 else ()
    plan = dataclasses.replace(plan, planning_s=time.perf_counter() - started, compared=compared)
    return SearchedPipeline(plan, staged, found.one_stage_s, tuple(stage.stage_s for stage in found.choice.stages))


def _with_recomputation(traced: TracedStep, wanted: StageRequest, request: PlanRequest, recompute: Recompute) -> Staged:
    """The stages, with forward work done again in backward if that was asked for, or if nothing else fits."""
    again = dataclasses.replace(wanted, recompute=True)
    if recompute == "layer":
        return plan_stages(traced, again, request)
    try:
        return plan_stages(traced, wanted, request)
    except OutOfMemoryError:
        if recompute == "none":
            raise
    return plan_stages(traced, again, request)


def restore_pipeline(traced: TracedStep, plan: PipelinePlan, request: PlanRequest) -> Staged:
    """The stages of a plan, without solving. Raises PlanError if the plan is for another step."""
    if plan.fingerprint != traced.fingerprint:
        raise PlanError(
            f"the plan was made for another step: its program has fingerprint {plan.fingerprint}, this one "
            f"{traced.fingerprint}. Shapes, types, the model or JAX's version differ; plan again."
        )
    wanted = StageRequest(
        (),
        plan.num_stages,
        plan.num_microbatches,
        cuts=plan.cuts,
        recompute=plan.recompute,
        scan_cuts=plan.scan_cuts,
        homes=homes_of(plan),
    )
    return restore_stages(traced, [s.plan for s in plan.stages], wanted, request)


def schedule_of(plan: PipelinePlan) -> Schedule:
    """The schedule of a plan."""
    return make_schedule(
        plan.schedule,
        num_meshes=plan.num_stages // plan.virtual_stages,
        num_microbatches=plan.num_microbatches,
        virtual_stages=plan.virtual_stages,
    )


def _schedule(timetable: Timetable, num_meshes: int) -> Schedule:
    return make_schedule(
        timetable.schedule,
        num_meshes=num_meshes,
        num_microbatches=timetable.microbatches,
        virtual_stages=timetable.virtual_stages,
    )


def _meshes(wishes: PipelineWishes, devices: int) -> tuple[tuple[LogicalMesh, ...], ...]:
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


def _check_backward(staged: Staged, schedule: Schedule) -> None:
    """A schedule of forwards alone is for steps without gradients."""
    backward = [name for name in staged.cut.pieces if name.kind == "backward"]
    if backward and schedule.kinds == ("forward",):
        raise ArgumentError(
            f"schedule={schedule.name!r} runs forward only, and this step computes gradients; use '1f1b', 'gpipe' or 'zb-h1'"
        )


def _describe(traced: TracedStep, staged: Staged, schedule: Schedule, request: PlanRequest) -> PipelinePlan:
    first, firsts = 0, []
    for mesh in range(schedule.num_meshes):
        firsts.append(first)
        first += staged.stages[mesh].assignment.mesh.size
    in_flight = microbatches_in_flight(schedule)
    stages = tuple(
        _stage_plan(s, stage, firsts[s % schedule.num_meshes], schedule.num_meshes, in_flight[s])
        for s, stage in enumerate(staged.stages)
    )
    transfers = _transfers(staged, schedule, request)
    simulation = simulated(schedule, [(stage.forward_s, stage.backward_s) for stage in staged.stages])
    fill_s, once_s = beside_tasks_s([stage.once_s for stage in staged.stages], transfers)
    return PipelinePlan(
        fingerprint=traced.fingerprint,
        cluster=request.cluster.name,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule.name,
        virtual_stages=schedule.virtual_stages,
        cuts=staged.cuts,
        recompute=staged.recompute,
        stages=stages,
        transfers=transfers,
        step_s=simulation.makespan_s + fill_s + once_s,
        bubble=simulation.bubble,
        memory_limit_bytes=request.memory_limit_bytes,
        planning_s=0.0,
        scan_cuts=staged.split.cuts,
    )


def beside_tasks_s(stages_once_s: Sequence[float], transfers: Sequence[TransferPlan]) -> tuple[float, float]:
    """(seconds of one microbatch's way through all stages, which fills the pipeline; of what all stages do once a step)."""
    fill_s = sum(t.predicted_s for t in transfers if t.what not in ONCE)
    sent_s = max((t.predicted_s for t in transfers if t.what in ONCE), default=0.0)
    return fill_s, max(stages_once_s) + sent_s


def _stage_plan(number: int, stage: StagedStage, first_device: int, meshes: int, in_flight: int) -> StagePlan:
    cut = stage.program.cut
    leaves = tuple(
        leaf.path
        for leaf, var in zip(cut.loop.traced.inputs, cut.loop.program.invars, strict=True)
        if cut.homes[var] == number and leaf.role not in ("batch", "const")
    )
    return StagePlan(
        stage=number,
        mesh=number % meshes,
        first_device=first_device,
        leaves=leaves,
        forward_s=stage.forward_s,
        backward_s=stage.backward_s,
        once_s=stage.once_s,
        microbatches_in_flight=in_flight,
        peak_bytes=stage.peak_bytes,
        plan=stage.plan,
    )


def simulated(schedule: Schedule, seconds: Sequence[tuple[float, float]]) -> Simulation:
    """The schedule with these seconds of forward and backward per stage; a divided backward in two equal parts."""
    is_split = "weight_gradient" in schedule.kinds

    def run_s(run: Run) -> float:
        forward_s, backward_s = seconds[run.stage]
        return forward_s if run.kind == "forward" else backward_s / 2 if is_split else backward_s

    return simulate_schedule(schedule, run_s)


def _transfers(staged: Staged, schedule: Schedule, request: PlanRequest) -> tuple[TransferPlan, ...]:
    """What crosses between meshes, over the links that join them."""
    devices = [stage.assignment.mesh.size for stage in staged.stages]

    def seconds(source: int, target: int, size: int) -> float:
        smaller = min(devices[source], devices[target])
        return request.cluster.transfer_s(size, meshes=schedule.num_meshes, devices=smaller)

    return tuple(
        TransferPlan(
            source=source,
            target=target,
            what=what,
            bytes=size,
            count=1 if what in ONCE else schedule.num_microbatches,
            predicted_s=seconds(source, target, size),
        )
        for (source, target, what), size in sorted(transfer_bytes(staged).items())
        if source % schedule.num_meshes != target % schedule.num_meshes
    )
