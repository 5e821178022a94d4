"""From a traced step to a planned pipeline: where to cut, and the best layouts of every stage on its devices.

In: a traced step, how many stages, microbatches and which schedule, the machine. Out: a `Staged`: the stages' programs and
assignments, and what each of their tasks takes. A stage is planned like a step of its own
(`stages/tasks/stage_program.py`), on its share of the devices, within the memory that its microbatches in flight leave.
What can go wrong: a step that mixes examples cannot be cut in time; a stage that does not fit is named with its bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.inter_op.forked_jobs import side_by_side
from autopar.inter_op.stage_seconds import Staged, StagedStage, measured
from autopar.intra_op.planner import PlanRequest, logical_meshes, plan_step, restore
from autopar.layouts.allowed import allowed_layouts
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.loop import TimeLoop
from autopar.plan import Plan, ValuePlan
from autopar.program.step import Leaf, TracedStep
from autopar.schedules.in_flight import InFlight
from autopar.stages.chain import forward_chain
from autopar.stages.cut import cut_stages, place_stages
from autopar.stages.even_cuts import chosen_cuts
from autopar.stages.follow import Following, leaves_at, placed_by_leaves
from autopar.stages.identical import identical
from autopar.stages.recompute_stages import recomputed
from autopar.stages.scan_stacks import ScanCuts, cuts_for_stages
from autopar.stages.segments import StageCut
from autopar.stages.split_scans import SplitStep, split_scans
from autopar.stages.tasks.stage_program import StageProgram, stage_program
from autopar.stages.tasks.task_memory import TaskMemories
from autopar.stages.time_loops import divided_loop

MEMORY_ROUNDS = 4
"""How often a stage is planned again for the microbatches in flight before it counts as too large."""


@dataclasses.dataclass(frozen=True)
class StageRequest:
    """How many stages on how many meshes, which logical shapes each mesh may have, and what the schedule keeps in flight; None
    is one microbatch at a time.

    `cuts`, `scan_cuts`, and `split` with its `loop`, if they are known already. `recompute`: backward does forward work again.
    `homes`: the stages of leaves by path, if they are known; `following`: what is taken over from another step.
    """

    meshes: tuple[tuple[LogicalMesh, ...], ...]
    num_stages: int
    num_microbatches: int
    in_flight: InFlight | None = None
    cuts: tuple[int, ...] | None = None
    loop: TimeLoop | None = None
    recompute: bool = False
    scan_cuts: ScanCuts | None = None
    split: SplitStep | None = None
    homes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    following: Following | None = None


def split_devices(devices: int, meshes: int) -> tuple[tuple[LogicalMesh, ...], ...]:
    """Equal shares of the devices with all their logical shapes; ArgumentError if they cannot be shared equally."""
    if devices < meshes:
        there = "there is 1 device" if devices == 1 else f"there are {devices} devices"
        raise ArgumentError(f"{meshes} stages need a device each, and {there}: use more devices or fewer stages")
    if devices % meshes:
        divisors = [n for n in range(1, devices + 1) if devices % n == 0]
        raise ArgumentError(
            f"{devices} devices cannot be shared equally by {meshes} stages; use {' or '.join(map(str, divisors))} stages, or "
            "give each a mesh of its own: mesh_shape=[(1,), (2,), ...], or --mesh 1/2/... on the command line"
        )
    share = devices // meshes
    return (logical_meshes(share) if share > 1 else (LogicalMesh.of((1,)),),) * meshes


def plan_stages(traced: TracedStep, wanted: StageRequest, request: PlanRequest) -> Staged:
    """All stages, planned. Raises ConstraintError, OutOfMemoryError, and what `time_loop` raises."""
    leaves = [leaf.one for leaf in traced.inputs]
    allowed_layouts(leaves, wanted.meshes[0][0], request.constraints, shared=traced.shared)
    split = _split(traced, wanted)
    loop = wanted.loop if wanted.loop is not None else divided_loop(split, wanted.num_microbatches)
    cuts = wanted.cuts
    if cuts is None and wanted.following is None:
        cuts = chosen_cuts(forward_chain(loop), wanted.num_stages)
    cut = _cut(loop, cuts or (), wanted)
    cut = recomputed(cut) if wanted.recompute else cut
    wishes = [_wish(stage_program(cut, stage), wanted, request) for stage in range(wanted.num_stages)]
    kinds: Sequence[int] = identical(loop, cuts) if cuts else range(wanted.num_stages)
    planned = _planned_first(wishes, kinds, processes=request.processes)
    stages: list[StagedStage] = []
    for stage, wish in enumerate(wishes):
        same = [stages[other] for other in range(stage) if kinds[other] == kinds[stage]]
        stages.append(planned.get(stage) or _planned_alike(wish, same) or _plan_stage(wish))
    return Staged(cut, cuts or (), tuple(stages), split, wanted.recompute)


@dataclasses.dataclass(frozen=True, eq=False)
class _Wish:
    """A stage to plan, and what the schedule keeps in flight."""

    program: StageProgram
    request: PlanRequest
    in_flight: InFlight | None


def _wish(program: StageProgram, wanted: StageRequest, request: PlanRequest) -> _Wish:
    rules = tuple(dataclasses.replace(rule, must_match=False) for rule in request.constraints.rules)
    layouts = wanted.following.layouts[program.stage] if wanted.following is not None else ()
    meshes = wanted.meshes[program.stage % len(wanted.meshes)]
    own = dataclasses.replace(request, meshes=meshes, constraints=Constraints((*layouts, *rules)))
    return _Wish(program, own, wanted.in_flight)


def _planned_first(wishes: Sequence[_Wish], kinds: Sequence[int], *, processes: int) -> dict[int, StagedStage]:
    """The first stage of each kind on each choice of meshes, planned side by side; where layouts are given, every stage."""
    leaders: dict[Any, int] = {}
    for stage, wish in enumerate(wishes):
        leaders.setdefault((kinds[stage], stage if wish.request.constraints.rules else wish.request.meshes), stage)
    kept: dict[int, StagedStage] = {}

    def plan(stage: int) -> Plan:
        kept[stage] = _plan_stage(wishes[stage])  # a fork keeps it for itself
        return kept[stage].plan

    numbers = list(leaders.values())
    weights = [len(wishes[n].program.step.inputs) * wishes[n].request.meshes[0].size for n in numbers]
    jobs = [functools.partial(plan, stage) for stage in numbers]
    plans = side_by_side(jobs, processes=processes, weights=weights)
    return {n: kept.get(n) or _as_planned(wishes[n], found) for n, found in zip(numbers, plans, strict=True)}


def _as_planned(wish: _Wish, plan: Plan, *, tasks: TaskMemories | None = None) -> StagedStage:
    """A stage by a plan of it."""
    assignment = restore(wish.program.step, plan, wish.request).assignment
    return measured(wish.program, plan, assignment, wish.in_flight, tasks=tasks)


def _planned_alike(wish: _Wish, planned: Sequence[StagedStage]) -> StagedStage | None:
    """By the plan of an earlier stage that differs by the names of its leaves alone, if it fits here too."""
    step, limit = wish.program.step, wish.request.memory_limit_bytes
    kind = _kind(step)
    for stage in planned:
        if stage.assignment.mesh in wish.request.meshes and _kind(stage.program.step) == kind:
            inputs = _renamed(stage.plan.inputs, step.inputs)
            outputs = _renamed(stage.plan.outputs, step.outputs)
            plan = dataclasses.replace(stage.plan, inputs=inputs, outputs=outputs)
            found = _as_planned(wish, plan, tasks=stage.memory.tasks)
            if limit is None or found.peak_bytes <= limit:
                return found
    return None


def _kind(step: TracedStep) -> tuple[Any, ...]:
    """What two stages' programs have in common if one's plan is the other's."""
    leaves = [dataclasses.replace(leaf, path="") for leaf in (*step.inputs, *step.outputs)]
    return step.fingerprint, leaves, step.state_of_output


def _renamed(values: Sequence[ValuePlan], leaves: Sequence[Leaf]) -> tuple[ValuePlan, ...]:
    return tuple(dataclasses.replace(v, path=leaf.path) for v, leaf in zip(values, leaves, strict=True))


def _cut(loop: TimeLoop, cuts: tuple[int, ...], wanted: StageRequest) -> StageCut:
    """The stages between these cuts; several stages without cuts are those where another step keeps the leaves."""
    if cuts or wanted.num_stages == 1:
        return cut_stages(loop, cuts)
    homes = leaves_at(wanted.homes, loop)
    return place_stages(loop, placed_by_leaves(loop, homes, wanted.num_stages), homes)


def _split(traced: TracedStep, wanted: StageRequest) -> SplitStep:
    """The step with its scans divided: as asked for, or, where cuts are still to be found, between stages of equal work."""
    if wanted.split is not None:
        return wanted.split
    if wanted.scan_cuts is not None or wanted.loop is not None:
        return split_scans(traced, wanted.scan_cuts or ())
    return split_scans(traced, cuts_for_stages(traced, wanted.num_stages))


def restore_stages(traced: TracedStep, plans: Sequence[Plan], wanted: StageRequest, request: PlanRequest) -> Staged:
    """The stages that a plan describes, without solving."""
    assert wanted.cuts is not None
    split = _split(traced, wanted)
    cut = _cut(divided_loop(split, wanted.num_microbatches), wanted.cuts, wanted)
    cut = recomputed(cut) if wanted.recompute else cut
    stages = []
    for number, plan in enumerate(plans):
        program = stage_program(cut, number)
        stages.append(measured(program, plan, restore(program.step, plan, request).assignment))
    return Staged(cut, wanted.cuts, tuple(stages), split, wanted.recompute)


def measured_stage(program: StageProgram, request: PlanRequest) -> StagedStage:
    """A stage planned with one microbatch in flight, and what its tasks take."""
    planned = plan_step(program.step, request)
    return measured(program, planned.plan, planned.assignment)


def _plan_stage(wish: _Wish) -> StagedStage:
    """One stage, within what its microbatches in flight leave of the memory."""
    program, request, in_flight = wish.program, wish.request, wish.in_flight
    limit = request.memory_limit_bytes
    count = 1 if in_flight is None else in_flight.microbatches[program.stage]
    room, stage = limit, None
    for _ in range(MEMORY_ROUNDS):
        try:
            planned = plan_step(program.step, dataclasses.replace(request, memory_limit_bytes=room))
        except OutOfMemoryError as error:
            if stage is not None:
                break
            raise OutOfMemoryError(
                f"stage {program.stage} of {program.cut.num_stages}, with {count} microbatches in flight: {error}"
            ) from None
        stage = measured(
            program, dataclasses.replace(planned.plan, memory_limit_bytes=limit), planned.assignment, in_flight
        )
        if limit is None or stage.peak_bytes <= limit:
            return stage
        room = limit - (stage.peak_bytes - stage.memory.peak_bytes)
        if room <= 0:
            break
    assert stage is not None
    raise OutOfMemoryError(
        f"stage {program.stage} of {program.cut.num_stages} needs {stage.peak_bytes:,} bytes per device, the limit is {limit:,}: "
        f"{count} microbatches in flight keep {stage.memory.each_text(in_flight)}. Use more microbatches, fewer stages, more "
        "devices, or the 1f1b schedule, which keeps less."
    )
