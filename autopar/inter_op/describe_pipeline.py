"""From planned stages and a schedule to a `PipelinePlan`: what is where, what crosses, and what a step takes.

In: `Staged`, the stages' programs and assignments, and a `Schedule`. Out: the plan, frozen data without programs. Its step time
is the makespan that the schedule's simulator finds from the stages' seconds, plus what the stages wait for transfers
(`waiting_s`) and what happens once a step (`once_a_step_s`).

No pipeline on D devices takes less than `bound_stages` says, whatever its stages, microbatches and schedule. An operation runs
on the devices of one stage, and the busiest mesh works as long as the average device:

    step >= work / D
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from autopar.inter_op.stage_seconds import Staged, StagedStage, transfer_bytes
from autopar.intra_op.choices.least_work import find_work
from autopar.intra_op.request import PlanRequest
from autopar.layouts.mesh import LogicalMesh
from autopar.pipeline_plan import PipelinePlan, StagePlan, TransferPlan
from autopar.program.step import TracedStep
from autopar.schedules.chain import make_chain
from autopar.schedules.in_flight import microbatches_in_flight
from autopar.schedules.instructions import Run, Send
from autopar.schedules.simulate import Simulation, simulate, simulate_schedule
from autopar.schedules.tasks import Schedule

ONCE = ("update", "weights")
"""Transfers that happen once per step."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """A step with its plan in pipeline stages, and the stages' programs and assignments that the runtime compiles."""

    traced: TracedStep
    plan: PipelinePlan
    staged: Staged


def describe_pipeline(traced: TracedStep, staged: Staged, schedule: Schedule, request: PlanRequest) -> PlannedPipeline:
    """The stages under a schedule, with the plan that describes them; its `planning_s` is 0."""
    sizes = [staged.stages[mesh].mesh.size for mesh in range(schedule.num_meshes)]
    first_devices = [0, *itertools.accumulate(sizes)]
    in_flight = microbatches_in_flight(schedule)
    stages = tuple(
        _describe_stage(
            stage,
            number=number,
            mesh=number % schedule.num_meshes,
            first_device=first_devices[number % schedule.num_meshes],
            in_flight=in_flight[number],
            share=staged.shares[number] if staged.shares else 0.0,
        )
        for number, stage in enumerate(staged.stages)
    )
    transfers = _list_transfers(staged, schedule, request)
    seconds = [(stage.forward_s, stage.backward_s) for stage in staged.stages]
    simulation = simulate_stages(schedule, seconds)
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
        step_s=simulation.makespan_s + waiting_s(schedule, seconds, transfers) + once_s,
        bubble=simulation.bubble,
        memory_limit_bytes=request.memory_limit_bytes,
        planning_s=0.0,
        scan_cuts=staged.split.cuts,
    )
    return PlannedPipeline(traced, plan, staged)


def _describe_stage(
    stage: StagedStage, *, number: int, mesh: int, first_device: int, in_flight: int, share: float
) -> StagePlan:
    cut = stage.program.cut
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
        forward_s=stage.forward_s,
        backward_s=stage.backward_s,
        once_s=stage.once_s,
        microbatches_in_flight=in_flight,
        peak_bytes=stage.peak_bytes,
        plan=stage.plan,
        recomputed_share=share,
        state_bytes=stage.memory.kept_bytes,
        sum_bytes=stage.memory.accumulator_bytes,
        microbatch_bytes=stage.memory.residual_bytes,
    )


def _list_transfers(staged: Staged, schedule: Schedule, request: PlanRequest) -> tuple[TransferPlan, ...]:
    """What crosses between meshes, over the links that join them."""
    devices = [stage.mesh.size for stage in staged.stages]

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


def bound_stages(traced: TracedStep, request: PlanRequest, devices: int) -> float:
    """Seconds that no plan of a step in stages on so many devices takes less than; nor one on a mesh of all of them."""
    alone = request.catalogues.of(LogicalMesh.of((1,)), request.cluster, request.options)
    return find_work(traced.program, alone).in_stages_s(devices)


def once_a_step_s(stages_once_s: Sequence[float], transfers: Sequence[TransferPlan]) -> float:
    """Seconds of what all stages do once a step: they update their state at the same time, so the slowest counts, after the
    longest transfer of that kind.
    """
    return max(stages_once_s) + max((t.predicted_s for t in transfers if t.what in ONCE), default=0.0)


def waiting_s(schedule: Schedule, seconds: Sequence[tuple[float, float]], transfers: Sequence[TransferPlan]) -> float:
    """Seconds by which the transfers of microbatches make a step longer than `simulate_stages` of the same seconds says.

    How much of them hides behind compute depends on the schedule: GPipe and eager 1F1B wait for those of one microbatch, if
    they are no longer than a microbatch's work, 1F1B for more. Transfers between stages that are no neighbours are none of the
    simulator's chain; those of one microbatch count.
    """
    between = {(t.source, t.target, t.what): t.predicted_s for t in transfers if t.what not in ONCE}
    sent = {key: s for key, s in between.items() if key[1] - key[0] == (1 if key[2] == "forward" else -1)}
    skipped_s = sum(s for key, s in between.items() if key not in sent)
    if not sent:
        return skipped_s

    def transfer_s(send: Send) -> float:
        letter, stage = send.value.name[0], int(send.value.name[1:])
        key = (stage - 1, stage, "forward") if letter == "x" else (stage, stage - 1, "backward")
        return sent.get(key, 0.0)

    program, run_s = make_chain(schedule).emit(), _seconds_of(schedule, seconds)
    whole_s = simulate(program, run_s=run_s, transfer_s=transfer_s).makespan_s
    return whole_s - simulate(program, run_s=run_s).makespan_s + skipped_s


def simulate_stages(schedule: Schedule, seconds: Sequence[tuple[float, float]]) -> Simulation:
    """The schedule with these seconds of (forward, backward) per stage; a split backward has two equal parts."""
    return simulate_schedule(schedule, _seconds_of(schedule, seconds))


def _seconds_of(schedule: Schedule, seconds: Sequence[tuple[float, float]]) -> Callable[[Run], float]:
    is_split = "weight_gradient" in schedule.kinds

    def run_s(run: Run) -> float:
        forward_s, backward_s = seconds[run.stage]
        return forward_s if run.kind == "forward" else backward_s / 2 if is_split else backward_s

    return run_s
