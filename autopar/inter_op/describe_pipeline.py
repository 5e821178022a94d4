"""From planned stages and a schedule to a `PipelinePlan`: what is where, what crosses, and what a step takes.

In: `Staged`, the stages' programs and assignments, and a `Schedule`. Out: the plan, frozen data without programs. Its step time
is the makespan of the schedule with the stages' seconds (`time_stages`), plus what the stages wait for transfers, which the
schedule decides too (`find_exposed_s`), and what happens once a step (`once_a_step_s`).

No pipeline on D devices takes less than `bound_stages` says, whatever its stages, microbatches and schedule. An operation runs
on the devices of one stage, and the busiest mesh works as long as the average device:

    step >= work / D
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.inter_op.candidates.pipeline_seconds import find_exposed_s, once_a_step_s, time_stages
from autopar.inter_op.dynamic_program.places import first_places
from autopar.inter_op.stage_seconds import Staged, StagedStage, transfer_sizes
from autopar.intra_op.choices.least_work import find_work
from autopar.intra_op.describe import named_below_the_root
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.request import PlanRequest
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.time_plan import TimePlan
from autopar.pipeline_plan import ONCE, PipelinePlan, StagePlan, TransferPlan
from autopar.program.step import TracedStep
from autopar.progress import Progress, report
from autopar.schedules.in_flight import InFlight
from autopar.schedules.tasks import Schedule
from autopar.stages.split_scans import SplitStep
from autopar.stages.tasks.mesh_memory import StageShare, share_peak
from autopar.stages.tasks.stage_program import StageProgram


@dataclasses.dataclass(frozen=True, eq=False)
class StageToRun:
    """A stage as it runs: its program, and the strategies of its operations."""

    program: StageProgram
    assignment: Assignment


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """A step with its plan in pipeline stages, and the stages' programs and assignments that the runtime compiles."""

    traced: TracedStep
    plan: PipelinePlan
    staged: Staged

    @property
    def stages(self) -> tuple[StageToRun, ...]:
        """The stages as they run, in the order of the pipeline."""
        return tuple(StageToRun(stage.program, stage.assignment) for stage in self.staged.stages)

    @property
    def phases(self) -> TimePlan:
        """The phases by which its microbatches are cut."""
        return self.staged.cut.loop.plan

    @property
    def split(self) -> SplitStep:
        """The step with its scans divided among stages."""
        return self.staged.split


@dataclasses.dataclass(frozen=True, eq=False)
class RestoredPipeline:
    """A step with a plan in stages that was made before, which says what they take, and what the runtime compiles of it."""

    traced: TracedStep
    plan: PipelinePlan
    stages: tuple[StageToRun, ...]
    split: SplitStep


def describe_pipeline(traced: TracedStep, staged: Staged, schedule: Schedule, request: PlanRequest) -> PlannedPipeline:
    """The stages under a schedule, with the plan that describes them; its `planning_s` is 0."""
    first_devices = _first_devices(staged.stages[: schedule.num_meshes], request)
    in_flight = InFlight(schedule)
    shares = _share_peaks(staged, in_flight)
    stages = tuple(
        _describe_stage(
            stage,
            number=number,
            mesh=number % schedule.num_meshes,
            first_device=first_devices[number % schedule.num_meshes],
            in_flight=in_flight,
            memory=shares[number],
            share=staged.shares[number] if staged.shares else 0.0,
        )
        for number, stage in enumerate(staged.stages)
    )
    stages = tuple(dataclasses.replace(one, plan=named_below_the_root(one.plan, traced)) for one in stages)
    transfers = _list_transfers(staged, stages, schedule, request)
    seconds = [stage.seconds_in(schedule) for stage in staged.stages]
    work = time_stages(schedule, seconds)
    once_s = once_a_step_s([stage.once_s for stage in staged.stages], transfers)
    plan = PipelinePlan(
        fingerprint=traced.fingerprint.digest,
        trail=traced.fingerprint.trail,
        cluster=request.cluster.name,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule.name,
        virtual_stages=schedule.virtual_stages,
        cuts=staged.cuts,
        recompute=any(staged.shares),
        keeps_named=staged.keeps_named,
        stages=stages,
        transfers=transfers,
        step_s=work.makespan_s + find_exposed_s(schedule, seconds, transfers) + once_s,
        bubble=work.bubble,
        memory_limit_bytes=_memory_limit(staged, request),
        planning_s=0.0,
        phases_from=staged.cut.loop.plan.taken_from,
        scan_cuts=staged.split.cuts,
        assumed_finite=staged.stages[0].program.cut.loop.plan.assumed_finite,
    )
    report(Progress(best_s=plan.step_s), is_news=True)
    return PlannedPipeline(traced, plan, staged)


def _first_devices(stages: Sequence[StagedStage], request: PlanRequest) -> list[int]:
    """The first device of each mesh, in a mixed cluster among the nodes of its kind."""
    cluster, begins, first = request.cluster, {"": 0}, 0
    per_node = {"": cluster.devices_per_node}
    for kind in cluster.node_kinds:
        begins[kind.name], first = first, first + kind.count * kind.devices_per_node
        per_node[kind.name] = kind.devices_per_node
    found: dict[int, int] = {}
    for kind_name, begin in begins.items():
        numbers = [number for number, stage in enumerate(stages) if stage.node_kind == kind_name]
        starts = first_places([stages[number].mesh.size for number in numbers], per_node[kind_name])
        found |= {number: begin + start for number, start in zip(numbers, starts, strict=True)}
    return [found[number] for number in range(len(stages))]


def _describe_stage(
    stage: StagedStage,
    *,
    number: int,
    mesh: int,
    first_device: int,
    in_flight: InFlight,
    memory: StageShare,
    share: float,
) -> StagePlan:
    cut = stage.program.cut
    forward_s, backward_s = stage.seconds_in(in_flight.schedule)
    leaves = tuple(
        leaf.path
        for leaf, var in zip(cut.loop.traced.inputs, cut.loop.program.invars, strict=True)
        if cut.homes[var] == number and leaf.role not in ("batch", "const")
    )
    return StagePlan(
        stage=number,
        mesh=mesh,
        first_device=first_device,
        leaves=leaves,
        forward_s=forward_s,
        backward_s=backward_s,
        once_s=stage.once_s,
        microbatches_in_flight=in_flight.microbatches[number],
        peak_bytes=memory.peak_bytes,
        plan=stage.plan,
        recomputed_share=share,
        state_bytes=stage.memory.kept_bytes,
        sum_bytes=stage.memory.accumulator_bytes,
        microbatch_bytes=stage.memory.residual_bytes,
        in_flight_bytes=_flying_bytes(stage, memory, in_flight, in_flight.microbatches[number]),
        node_kind=stage.node_kind,
    )


def _share_peaks(staged: Staged, in_flight: InFlight) -> list[StageShare]:
    """What each stage has of its mesh's peak."""
    meshes, memories = in_flight.schedule.num_meshes, [stage.memory for stage in staged.stages]
    by_mesh = [share_peak(memories[mesh::meshes], in_flight) for mesh in range(meshes)]
    return [by_mesh[number % meshes][number // meshes] for number in range(len(memories))]


def _flying_bytes(stage: StagedStage, memory: StageShare, in_flight: InFlight, most: int) -> int:
    """What the microbatches in flight keep, `most` at once: each as much, but where backward is split or meshes have stages."""
    if in_flight.schedule.virtual_stages > 1:
        return memory.flying_bytes
    return stage.memory.flying_bytes(in_flight) if in_flight.is_split else most * stage.memory.residual_bytes


def _memory_limit(staged: Staged, request: PlanRequest) -> int | None:
    """The limit that every stage keeps; of a mixed cluster that of the kind with the most memory, beside those of the stages."""
    limits = [stage.plan.memory_limit_bytes for stage in staged.stages if stage.node_kind]
    known = [limit for limit in limits if limit is not None]
    return max(known) if known else request.memory_limit_bytes


def _list_transfers(
    staged: Staged, stages: Sequence[StagePlan], schedule: Schedule, request: PlanRequest
) -> tuple[TransferPlan, ...]:
    """What crosses between meshes, over the links that join them."""

    def seconds(source: int, target: int, size: int, arrays: int) -> float:
        ends = {"source": stages[source].devices, "target": stages[target].devices}
        return request.cluster.transfer_s(size, **ends, arrays=arrays)

    return tuple(
        TransferPlan(
            source=source,
            target=target,
            what=what,
            bytes=size,
            count=1 if what in ONCE else schedule.num_microbatches,
            predicted_s=seconds(source, target, size, arrays),
            arrays=arrays,
            is_work=request.cluster.shares_host,
        )
        for (source, target, what), (size, arrays) in sorted(transfer_sizes(staged).items())
        if source % schedule.num_meshes != target % schedule.num_meshes
    )


def bound_stages(traced: TracedStep, request: PlanRequest, devices: int) -> float:
    """Seconds that no plan of a step in stages on so many devices takes less than; nor one on a mesh of all of them."""
    alone = request.catalogues.of(LogicalMesh.of((1,)), request.cluster, request.options)
    return find_work(traced.program, alone).in_stages_s(devices)
