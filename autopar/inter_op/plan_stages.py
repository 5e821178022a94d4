"""From a traced step to a planned pipeline: where to cut, and the best layouts of every stage on its devices.

In: a traced step, how many stages, microbatches and which schedule, the machine. Out: a `Staged`: the stages' programs and
assignments, and what each of their tasks takes. A stage is planned like a step of its own
(`stages/tasks/stage_program.py`), on its share of the devices, within the memory that its microbatches in flight leave.
What can go wrong: a step that mixes examples cannot be cut in time; a stage that does not fit is named with its bytes.
All that do not, and may do more forward work again, are named together: the others need not be planned again for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import cast

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.forks.jobs import run_side_by_side
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.describe_pipeline import RestoredPipeline, StageToRun
from autopar.inter_op.dynamic_program.kinds import KindOfNodes
from autopar.inter_op.plan_stage import (
    KnownStages,
    PlannedWithin,
    Planner,
    StageJob,
    StagePlanning,
    StagesTooLargeError,
    plan_program,
    take_over,
)
from autopar.inter_op.stage_seconds import Staged, StagedStage
from autopar.intra_op.choices.allowed_values import allowed_inputs, allowed_outputs
from autopar.intra_op.request import PlanRequest, logical_meshes
from autopar.intra_op.restore import restore, restore_known
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.loop import TimeLoop
from autopar.microbatches.named_phases import NamedPhases
from autopar.pipeline_plan import PipelinePlan
from autopar.program.step import TracedStep
from autopar.progress import enter, planning_parts
from autopar.schedules.in_flight import InFlight
from autopar.stages.chain import forward_chain
from autopar.stages.cut import cut_stages, place_stages
from autopar.stages.even_cuts import choose_cuts
from autopar.stages.follow import Following, leaves_at, place_by_leaves
from autopar.stages.layers import find_layers
from autopar.stages.recompute_stages import recompute_in_backward
from autopar.stages.rejoin_scans import rejoin_scans
from autopar.stages.scan_stacks import ScanCuts, cuts_for_stages
from autopar.stages.segments import StageCut
from autopar.stages.split_scans import SplitStep, split_scans
from autopar.stages.tasks.mesh_memory import fit_together, own_limits
from autopar.stages.tasks.stage_program import StageProgram, program_of_stage
from autopar.stages.time_loops import make_divided_loop, make_loops


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRequest:
    """How many stages on how many meshes, which logical shapes each mesh may have, and what the schedule keeps in flight.

    `in_flight`: None stands for one microbatch at a time. `cuts`, `scan_cuts`, and `split` with its `loop`: what is known of them
    already. `shares`, `keeps_named`: see `Staged`. `homes`: the stages of leaves by path, as far as they are known.
    `following`: what is taken over from another step. `known`: stages that were planned before, which are not planned again.
    `largest_share`: what a stage that does not fit may do again at most, where stages have shares of their own; 0: no more.
    `kinds`: of the nodes of each mesh in a mixed cluster; none where nodes are alike. `also`: what other schedules keep in flight
    that split the backward, and will be asked what the stages need in them.
    """

    meshes: tuple[tuple[LogicalMesh, ...], ...]
    num_stages: int
    num_microbatches: int
    in_flight: InFlight | None = None
    cuts: tuple[int, ...] | None = None
    loop: TimeLoop | None = None
    shares: tuple[float, ...] = ()
    keeps_named: bool = False
    largest_share: float = 0.0
    scan_cuts: ScanCuts | None = None
    split: SplitStep | None = None
    homes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    following: Following | None = None
    known: KnownStages = dataclasses.field(default_factory=KnownStages)
    kinds: tuple[KindOfNodes, ...] = ()
    also: tuple[InFlight, ...] = ()

    def kind_of(self, stage: int) -> KindOfNodes | None:
        """The kind of node of a stage; None where nodes are alike."""
        return self.kinds[stage % len(self.kinds)] if self.kinds else None

    def may_repeat_more(self, stage: int) -> bool:
        """Whether a stage may do more forward work again than it does."""
        return bool(self.shares) and self.shares[stage] < self.largest_share


def split_devices(devices: int, meshes: int) -> tuple[tuple[LogicalMesh, ...], ...]:
    """Equal shares of the devices with all their logical shapes; ArgumentError if they cannot be shared equally."""
    if devices < meshes:
        there = "there is 1 device" if devices == 1 else f"there are {devices} devices"
        raise ArgumentError(f"{meshes} stages need a device each, and {there}: use more devices or fewer stages")
    if devices % meshes:
        divisors = [n for n in range(1, devices + 1) if devices % n == 0]
        raise ArgumentError(
            f"{devices} devices cannot be shared equally by {meshes} stages; use {' or '.join(map(str, divisors))} stages, or "
            "give each a mesh of its own: mesh_shape=[(1,), (2,), ...]"
        )
    share = devices // meshes
    return (logical_meshes(share) if share > 1 else (LogicalMesh.of((1,)),),) * meshes


def plan_stages(
    traced: TracedStep,
    wanted: StageRequest,
    request: PlanRequest,
    *,
    tuning: Tuning = TUNING,
    planner: Planner = plan_program,
) -> Staged:
    """All stages, planned.

    Raises ConstraintError, OutOfMemoryError, StagesTooLargeError if more forward work done again may help, and what
    `make_time_loop` raises.
    """
    for check in (allowed_inputs, allowed_outputs):
        check(traced, wanted.meshes[0][0], request.constraints)
    split = _split_scans(traced, wanted)
    loop = wanted.loop if wanted.loop is not None else make_divided_loop(split, wanted.num_microbatches)
    cuts = wanted.cuts
    if cuts is None and wanted.following is None:
        cuts = choose_cuts(forward_chain(loop), wanted.num_stages)
    if cuts and any(wanted.shares):
        split, loop, cuts = rejoin_scans(split, loop, cuts, wanted.shares)
    cut = _cut(loop, cuts or (), wanted)
    enter(f"planning {wanted.num_stages} stages")
    programs = [program_of_stage(cut, stage) for stage in range(wanted.num_stages)]
    jobs = [_job_of(program, wanted, request, tuning) for program in programs]
    planning = StagePlanning(
        planner=planner,
        in_flight=wanted.in_flight,
        memory_rounds=tuning.memory_rounds,
        known=wanted.known,
        also=wanted.also,
    )
    with planning_parts():
        stages = _plan_together(planning, jobs, processes=request.processes)
    stages = [_on_kind(stage, wanted.kind_of(number)) for number, stage in enumerate(stages)]
    return _staged(wanted, cut, cuts or (), stages, split)


def _plan_together(planning: StagePlanning, jobs: Sequence[StageJob], *, processes: int) -> list[StagedStage]:
    """The stages, those of one mesh within its memory: each in all of it first, then in parts of it, at last in equal parts."""
    stages, in_flight = _plan_jobs(planning, jobs, processes=processes), planning.in_flight
    parts, free = [job.request.memory_limit_bytes for job in jobs], [stage.memory for stage in stages]
    if in_flight is None or in_flight.schedule.virtual_stages == 1 or fit_together(free, parts, in_flight):
        return stages

    def plan(own: Sequence[int | None]) -> list[StagedStage]:
        return _plan_jobs(dataclasses.replace(planning, limits=own), jobs, processes=processes)

    by_size, sure = (own_limits(free, parts, in_flight, is_sure=is_sure) for is_sure in (False, True))
    try:
        stages = plan(by_size)
        return stages if fit_together([stage.memory for stage in stages], parts, in_flight) else plan(sure)
    except OutOfMemoryError as error:
        equal = [None if own is None else part for own, part in zip(sure, parts, strict=True)]
        if any(part > own for part, own in zip(equal, by_size, strict=True) if part is not None and own is not None):
            with contextlib.suppress(OutOfMemoryError):
                return plan(equal)
        raise error from None


def _plan_jobs(planning: StagePlanning, jobs: Sequence[StageJob], *, processes: int) -> list[StagedStage]:
    """The stages, of which equal ones are planned once. Raises OutOfMemoryError; see `StagesTooLargeError`.

    Where the first of equal stages does not fit, the last one is planned next, which keeps least in most schedules: if it does
    not fit either, none of them does, and if it does, the others are like it or do not.
    """
    found = _plan_leaders(planning, jobs, processes=processes)
    large = {jobs[number].kind for number, one in found.items() if isinstance(one, OutOfMemoryError)}
    numbers = range(len(jobs))
    order = [
        *(n for n in numbers if jobs[n].kind not in large),
        *(n for n in reversed(numbers) if jobs[n].kind in large),
    ]
    for number in order:
        if number not in found:
            alike = [one for other, one in sorted(found.items()) if jobs[other].kind == jobs[number].kind]
            found[number] = _plan_follower(planning, jobs[number], alike)
    stages = [one for _, one in sorted(found.items()) if isinstance(one, StagedStage)]
    if len(stages) < len(jobs):
        raise StagesTooLargeError({n: one for n, one in sorted(found.items()) if isinstance(one, OutOfMemoryError)})
    return stages


def _plan_follower(
    planning: StagePlanning, job: StageJob, alike: Sequence[StagedStage | OutOfMemoryError]
) -> StagedStage | OutOfMemoryError:
    """A stage that equals others, or why it does not fit."""
    fitting = [one for one in alike if isinstance(one, StagedStage)]
    errors = [one for one in alike if isinstance(one, OutOfMemoryError)]
    like = planning.plan_like(job, fitting)
    if like is not None:
        return like
    if len(errors) > 1 or (errors and fitting):
        return errors[0]
    planned = planning.try_plan(job)
    if isinstance(planned, OutOfMemoryError):
        return planned
    planning.keep(job, planned)
    return planned.stage


def restore_stages(
    traced: TracedStep,
    plan: PipelinePlan,
    wanted: StageRequest,
    request: PlanRequest,
    *,
    phases: NamedPhases | None = None,
) -> RestoredPipeline:
    """The stages that a plan describes, without solving. `phases`: see `restore_pipeline`."""
    assert wanted.cuts is not None
    split, count = _split_scans(traced, wanted), wanted.num_microbatches
    if phases is None:
        loop = make_loops(split, plan.phases_from or count)(count)
    else:
        loop = TimeLoop(split.step, phases.find(split.step), pieces=split.pieces)
    cut = _cut(loop, wanted.cuts, wanted)
    stages = []
    for number, stage in enumerate(plan.stages):
        program, kind = program_of_stage(cut, number), wanted.kind_of(number)
        own, make = request if kind is None else kind.request, restore if phases is None else restore_known
        stages.append(StageToRun(program, make(program.step, stage.plan, own).assignment))
    return RestoredPipeline(traced, plan, tuple(stages), split)


def _on_kind(stage: StagedStage, kind: KindOfNodes | None) -> StagedStage:
    return stage if kind is None else dataclasses.replace(stage, node_kind=kind.name)


def _staged(
    wanted: StageRequest, cut: StageCut, cuts: tuple[int, ...], stages: Sequence[StagedStage], split: SplitStep
) -> Staged:
    return Staged(
        cut=cut, cuts=cuts, stages=tuple(stages), split=split, shares=wanted.shares, keeps_named=wanted.keeps_named
    )


def _split_scans(traced: TracedStep, wanted: StageRequest) -> SplitStep:
    """The step with its scans divided: as asked for, or, if cuts are still to be found, between stages of equal work."""
    if wanted.split is not None:
        return wanted.split
    if wanted.scan_cuts is not None or wanted.loop is not None:
        return split_scans(traced, wanted.scan_cuts or ())
    return split_scans(traced, cuts_for_stages(traced, wanted.num_stages))


def _cut(loop: TimeLoop, cuts: tuple[int, ...], wanted: StageRequest) -> StageCut:
    """The stages between these cuts; several stages without cuts are those on which another step keeps the leaves."""
    if cuts or wanted.num_stages == 1:
        cut = cut_stages(loop, cuts)
    else:
        homes = leaves_at(wanted.homes, loop)
        cut = place_stages(loop, place_by_leaves(loop, homes, wanted.num_stages), homes)
    if not any(wanted.shares):
        return cut
    layers = find_layers(forward_chain(loop), TUNING.layer_counts, is_divisible=True)
    return recompute_in_backward(cut, wanted.shares, layers=layers, keeps_named=wanted.keeps_named)


def _job_of(program: StageProgram, wanted: StageRequest, request: PlanRequest, tuning: Tuning) -> StageJob:
    rules = tuple(dataclasses.replace(rule, must_match=False) for rule in request.constraints.rules)
    layouts = wanted.following.layouts[program.stage] if wanted.following is not None else ()
    meshes = wanted.meshes[program.stage % len(wanted.meshes)]
    constraints = Constraints((*layouts, *rules))
    content = dataclasses.replace(request.tuning, limited_gap=tuning.stage_gap)
    kind = wanted.kind_of(program.stage)
    if kind is not None:
        limit, cluster = kind.request.memory_limit_bytes, kind.request.cluster
        request = dataclasses.replace(request, cluster=cluster, memory_limit_bytes=limit)
    own = dataclasses.replace(
        request, meshes=meshes, constraints=constraints, processes=1, tuning=content
    )  # forks do not fork
    number = wanted.known.kind_of(program.ports, kind.name if kind else "")
    return StageJob(program, number, own, may_repeat_more=wanted.may_repeat_more(program.stage))


def _plan_leaders(
    planning: StagePlanning, jobs: Sequence[StageJob], *, processes: int
) -> dict[int, StagedStage | OutOfMemoryError]:
    """The first stage of each kind on each choice of meshes, planned side by side; under constraints, every stage.

    A fork sends the plan and figures alone, which are small. Each process traces the programs of the stages that it plans.
    """
    leaders: dict[tuple[int, int | tuple[LogicalMesh, ...]], int] = {}
    for number, job in enumerate(jobs):
        leaders.setdefault((job.kind, number if job.request.constraints.rules else job.request.meshes), number)
    known = {number: planning.find_known(jobs[number]) for number in leaders.values()}
    numbers = [number for number, stage in known.items() if stage is None]

    def take(place: int, sent: object) -> PlannedWithin | OutOfMemoryError:
        found = cast(PlannedWithin | OutOfMemoryError, sent)
        return found if isinstance(found, OutOfMemoryError) else take_over(found, jobs[numbers[place]])

    outcomes = run_side_by_side(
        [functools.partial(planning.plan_leader, jobs[number]) for number in numbers],
        processes=processes,
        weights=[len(jobs[n].program.inputs) * jobs[n].request.meshes[0].size for n in numbers],
        unpack=take,
        ends_at_error=True,
    )
    found: dict[int, StagedStage | OutOfMemoryError]
    found = {number: stage for number, stage in known.items() if stage is not None}
    for number, outcome in zip(numbers, outcomes, strict=True):
        if isinstance(outcome, PlannedWithin):
            planning.keep(jobs[number], outcome)
        found[number] = outcome.stage if isinstance(outcome, PlannedWithin) else outcome
    return found
