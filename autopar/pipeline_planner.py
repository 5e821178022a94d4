"""From a traced step and a user's wishes to a `PipelinePlan`.

In: how many stages, microbatches and virtual stages, which schedule, which meshes; what is left open is chosen here. Out: the
plan, with the step time that the runtime's simulator predicts from the stages' seconds, and the `Staged` programs behind it.
What can go wrong: wishes that exclude each other; the errors name the numbers that would do.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

from autopar.errors import ArgumentError, OutOfMemoryError, PlanError, UnsupportedProgramError, warn
from autopar.following import Following, homes_of
from autopar.merged_scans import merged
from autopar.mesh import LogicalMesh
from autopar.microbatch import microbatch_counts
from autopar.pipeline_plan import PipelinePlan, StagePlan, TransferPlan
from autopar.planner import PlanRequest
from autopar.runtime.check import microbatches_in_flight
from autopar.runtime.instructions import Run
from autopar.runtime.schedules import Schedule, make_schedule
from autopar.runtime.simulate import simulate_schedule
from autopar.split_scans import split_scans
from autopar.stacks import every_layer
from autopar.stage_search import machine_shape, search_stages
from autopar.staging import (
    Staged,
    StagedStage,
    StageRequest,
    default_microbatches,
    divided_loop,
    plan_stages,
    restore_stages,
    split_devices,
    transfer_bytes,
)
from autopar.trace import TracedStep

Recompute = Literal["auto", "none", "layer"]
DEFAULT_SCHEDULE = "1f1b"
ONCE = ("update", "weights")
"""Transfers that happen once per step."""


@dataclasses.dataclass(frozen=True)
class PipelineWishes:
    """What the user fixed of a pipeline. `num_stages` counts meshes; each has `virtual_stages` stages.

    `following`: the leaves' homes and layouts are those of another step.
    """

    num_stages: int
    num_microbatches: Literal["auto"] | int = "auto"
    schedule: str = "auto"
    virtual_stages: int = 1
    stage_meshes: tuple[LogicalMesh, ...] | None = None
    recompute: Recompute = "auto"
    following: Following | None = None

    def named_schedule(self) -> str:
        """The schedule that was asked for, or the usual one for so many virtual stages."""
        if self.schedule != "auto":
            return self.schedule
        return DEFAULT_SCHEDULE if self.virtual_stages == 1 else "interleaved"


def plan_pipeline(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, *, devices: int
) -> tuple[PipelinePlan, Staged]:
    """The plan of a pipeline on so many devices. Raises ArgumentError, ConstraintError, OutOfMemoryError and others."""
    started = time.perf_counter()
    schedule = _schedule(traced, wishes)
    meshes = _meshes(wishes, devices)
    chunks = wishes.num_stages * wishes.virtual_stages
    in_flight = microbatches_in_flight(schedule)
    limit = request.memory_limit_bytes
    shared = dataclasses.replace(request, memory_limit_bytes=None if limit is None else limit // wishes.virtual_stages)
    wanted = StageRequest(meshes, chunks, schedule.num_microbatches, in_flight)
    if wishes.following is not None:
        following = wishes.following
        scan_cuts = following.scan_cuts(traced)
        wanted = dataclasses.replace(wanted, scan_cuts=scan_cuts, homes=following.homes, following=following)
    try:
        staged = _with_recomputation(traced, wanted, shared, wishes.recompute)
    except UnsupportedProgramError as error:
        if wishes.num_microbatches != "auto" or schedule.num_microbatches == 1:
            raise
        warn(f"the stages run with one microbatch, one after the other: {error}")
        return plan_pipeline(traced, dataclasses.replace(wishes, num_microbatches=1), request, devices=devices)
    _check_backward(staged, schedule)
    plan = _describe(traced, staged, schedule, request)
    return dataclasses.replace(plan, planning_s=time.perf_counter() - started), staged


@dataclasses.dataclass(frozen=True, eq=False)
class SearchedPipeline:
    """What the search found; `one_stage_s`: what one stage on all devices would take by the sum of its layers."""

    plan: PipelinePlan
    staged: Staged
    one_stage_s: float


def search_pipeline(
    traced: TracedStep, wishes: PipelineWishes, request: PlanRequest, *, devices: int
) -> SearchedPipeline | None:
    """The best pipeline with as many stages as pay; None if one stage is best. Raises what `plan_pipeline` raises."""
    started = time.perf_counter()
    counts = microbatch_counts(traced)
    count = wishes.num_microbatches
    most = max(2, machine_shape(request.cluster, devices)[0])
    microbatches = default_microbatches(counts, most) if count == "auto" else count
    split = split_scans(traced, every_layer(traced))
    loop = divided_loop(split, microbatches)
    name = wishes.named_schedule()
    if name == "interleaved":
        raise ArgumentError(
            "num_stages='auto' does not search interleaved schedules; give num_stages and virtual_stages"
        )
    again = {"auto": (False, True), "none": (False,), "layer": (True,)}[wishes.recompute]
    found = search_stages(loop, request, devices=devices, schedule=name, recompute=again)  # type: ignore[arg-type]
    stages = len(found.sizes)
    if stages == 1:
        return None
    schedule = make_schedule(name, num_meshes=stages, num_microbatches=microbatches)
    split, loop, cuts = merged(split, loop, found.cuts)
    wanted = StageRequest(found.meshes, stages, microbatches, microbatches_in_flight(schedule), cuts, loop, split=split)
    staged = _with_recomputation(traced, wanted, request, "layer" if found.recompute else wishes.recompute)
    plan = _describe(traced, staged, schedule, request)
    plan = dataclasses.replace(plan, planning_s=time.perf_counter() - started)
    return SearchedPipeline(plan, staged, found.one_stage_s)


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
        (),
        plan.cuts,
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


def _schedule(traced: TracedStep, wishes: PipelineWishes) -> Schedule:
    counts = microbatch_counts(traced)
    name = wishes.named_schedule()
    if name == "interleaved":
        counts = tuple(m for m in counts if m % wishes.num_stages == 0) or counts
    count = wishes.num_microbatches
    return make_schedule(
        name,
        num_meshes=wishes.num_stages,
        num_microbatches=default_microbatches(counts, wishes.num_stages) if count == "auto" else count,
        virtual_stages=wishes.virtual_stages,
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
    simulated = simulate_schedule(
        schedule, lambda run: _seconds(run, staged.stages, "weight_gradient" in schedule.kinds)
    )
    fill_s = sum(t.predicted_s for t in transfers if t.what not in ONCE)
    once_s = max(stage.once_s for stage in staged.stages) + max(
        (t.predicted_s for t in transfers if t.what in ONCE), default=0
    )
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
        step_s=simulated.makespan_s + fill_s + once_s,
        bubble=simulated.bubble,
        memory_limit_bytes=request.memory_limit_bytes,
        planning_s=0.0,
        scan_cuts=staged.split.cuts,
    )


def _stage_plan(number: int, stage: StagedStage, first_device: int, meshes: int, in_flight: int) -> StagePlan:
    cut = stage.program.cut
    leaves = tuple(
        leaf.path
        for leaf, var in zip(cut.loop.traced.inputs, cut.loop.program.invars, strict=True)
        if cut.homes[var] == number and leaf.role not in ("batch", "const")
    )
    return StagePlan(
        number,
        number % meshes,
        first_device,
        leaves,
        stage.forward_s,
        stage.backward_s,
        stage.once_s,
        in_flight,
        stage.peak_bytes,
        stage.plan,
    )


def _seconds(run: Run, stages: Sequence[StagedStage], split: bool) -> float:
    stage = stages[run.stage]
    if run.kind == "forward":
        return stage.forward_s
    return stage.backward_s / 2 if split else stage.backward_s


def _transfers(staged: Staged, schedule: Schedule, request: PlanRequest) -> tuple[TransferPlan, ...]:
    """What crosses between meshes, over the link that joins stages."""
    link = request.cluster.links_of((schedule.num_meshes, staged.stages[0].assignment.mesh.size))[0]
    return tuple(
        TransferPlan(
            source,
            target,
            what,
            size,
            1 if what in ONCE else schedule.num_microbatches,
            link.alpha_s + size * link.beta_s_per_byte,
        )
        for (source, target, what), size in sorted(transfer_bytes(staged).items())
        if source % schedule.num_meshes != target % schedule.num_meshes
    )
