"""A planned stage and what it takes: seconds of its tasks, bytes of its memory, bytes that it sends.

In: a `StageProgram`, its `Plan` and `Assignment`. Out: `StagedStage`, and `Staged`, all stages of a step. What can go wrong: work
that belongs to no task, which is counted once per step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from autopar.avals import itemsize_of
from autopar.compat import Var
from autopar.cost_model.machine import Cluster, Overlap
from autopar.intra_op.choices.overlap import Moved, find_needs, hide, kind_of, window
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.lowering.planned_moves import planned_moves
from autopar.intra_op.memory.compilers import compiler_of
from autopar.layouts.mesh import LogicalMesh
from autopar.layouts.moves import LOCAL_KINDS
from autopar.plan import Plan
from autopar.program.program import Equation, Program, operands_of
from autopar.program.step import TracedStep
from autopar.program.task_name import TaskName
from autopar.schedules.tasks import Schedule
from autopar.stages.segments import StageCut
from autopar.stages.split_scans import SplitStep
from autopar.stages.tasks.owners import loop_of
from autopar.stages.tasks.stage_memory import StageMemory, stage_memory
from autopar.stages.tasks.stage_program import StageProgram

_Owner = TypeVar("_Owner")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StagedStage:
    """A planned stage. Seconds are per microbatch for forward and backward, per step for the rest.

    `split_s`: what backward takes longer as two tasks, input gradients and weight gradients, each with a call of its own.
    `peak_bytes`: what it is taken to need of its mesh with as many microbatches in flight as there are, or with one.
    `assign`: makes the assignment that the plan describes, when it is first asked for. Only what runs the stage asks.
    `node_kind`: the name of its kind of node in a mixed cluster.
    """

    program: StageProgram
    plan: Plan
    assign: Callable[[], Assignment]
    forward_s: float
    backward_s: float
    split_s: float
    once_s: float
    memory: StageMemory
    peak_bytes: int
    node_kind: str = ""

    def seconds_in(self, schedule: Schedule) -> tuple[float, float]:
        """Its (forward, backward) in a schedule, which may split backward."""
        return self.forward_s, self.backward_s + (self.split_s if "weight_gradient" in schedule.kinds else 0.0)

    def __getstate__(self) -> dict[str, object]:
        """What a fork sends of it: the plan and figures. The process that asked has the program, and makes the assignment."""
        return {name: value for name, value in vars(self).items() if name not in ("program", "assign", "assignment")}

    @functools.cached_property
    def assignment(self) -> Assignment:
        """The strategies of its operations."""
        return self.assign()

    @property
    def mesh(self) -> LogicalMesh:
        """Its devices."""
        return LogicalMesh(self.plan.mesh_shape, self.plan.axis_names)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Staged:
    """All stages, where the forward chain was cut, and the step whose chain it is.

    `shares`: the part of each stage's forward work that backward does again; empty if it does none. `keeps_named`: it keeps
    values that the user named.
    """

    cut: StageCut
    cuts: tuple[int, ...]
    stages: tuple[StagedStage, ...]
    split: SplitStep
    shares: tuple[float, ...] = ()
    keeps_named: bool = False


def price_stage(
    program: StageProgram,
    plan: Plan,
    assignment: Assignment,
    *,
    cluster: Cluster,
) -> StagedStage:
    """What a planned stage takes: the seconds of its tasks, its memory with one microbatch in flight.

    Each task is a call of a compiled program, with the arrays that its segment reads and writes.
    """
    seconds = task_seconds(program.step, assignment, cluster.overlap)
    m = program.cut.loop.plan.microbatches
    forward_s = sum(s for task, s in seconds.items() if task is not None and task.kind == "forward") / m
    backward_s = sum(s for task, s in seconds.items() if task is not None and task.kind == "backward") / m
    once_s = sum(seconds.values()) - m * (forward_s + backward_s)
    memory = stage_memory(program, plan, assignment, compiler=compiler_of(cluster.device))
    arrays, handed = arrays_of_calls(program), memory.bytes_of_calls()
    halves = [kind for kind in ("input_gradient", "weight_gradient") if kind in arrays]
    halves_s = sum(cluster.called_s(backward_s / 2, arrays[kind], handed[kind]) for kind in halves)
    forward_s, backward_s, once_s = (
        cluster.called_s(work_s, arrays[kind], handed.get(kind, 0)) if kind in arrays else work_s
        for kind, work_s in (("forward", forward_s), ("backward", backward_s), ("update", once_s))
    )
    return StagedStage(
        program=program,
        plan=plan,
        assign=lambda: assignment,
        forward_s=forward_s,
        backward_s=backward_s,
        split_s=max(0.0, halves_s - backward_s),
        once_s=once_s,
        memory=memory,
        peak_bytes=memory.peak_bytes,
    )


def arrays_of_calls(program: StageProgram) -> dict[str, float]:
    """For each kind of task of a stage, the arrays of its calls, counted as `Cluster.dispatch_s` does: one in and one out is one.

    Reads are what other segments made and leaves; backward also takes and returns the gradients that it adds to. Where it is
    split, both halves read, the first sends what it made, and the second adds to the gradients.
    """
    found: dict[str, float] = {}

    def count(kind: str, ends: int) -> None:
        found[kind] = found.get(kind, 0.0) + ends / 2

    for segment in program.cut.of_stage(program.stage):
        read, made, results = len(segment.reads), len(segment.writes) + len(segment.outputs), len(segment.results)
        if segment.name.kind == "backward":
            count("backward", read + made + 2 * results)
            count("input_gradient", read + made)
            count("weight_gradient", read + 2 * results)
        else:
            count(segment.name.kind, read + made + results)
    return found


def _tasks(assignment: Assignment) -> dict[Equation, TaskName | None]:
    """The task of every equation, nested ones like the one that holds them."""
    found: dict[Equation, TaskName | None] = {}

    def walk(equations: Sequence[Equation], outer: TaskName | None) -> None:
        for eqn in equations:
            found[eqn] = eqn.task or outer
            for region in eqn.regions:
                walk(region.equations, found[eqn])

    walk(assignment.program.equations, None)
    return found


def _equation_seconds(step: TracedStep, assignment: Assignment, overlap: Overlap) -> dict[Equation | None, float]:
    """Seconds per step of each equation, those of the loop for all microbatches together; None stands for work of none.

    Of communication they count what does not hide behind the compute of the stage's step.
    """
    needs = find_needs(step)
    seconds: dict[Equation | None, float] = {}
    moved: list[tuple[Equation | None, Moved]] = []
    for eqn, each, trips in assignment.seconds:
        seconds[eqn] = seconds.get(eqn, 0.0) + each * trips
    for planned in planned_moves(assignment):
        shape, itemsize = tuple(planned.aval.shape), itemsize_of(planned.aval)
        reader, each = planned.equation, assignment.spaces.network.seconds(planned.move, shape, itemsize)
        if planned.move.kind in LOCAL_KINDS:
            seconds[reader] = seconds.get(reader, 0.0) + each * planned.trips
        else:
            kind = kind_of(needs.of(planned.atom), planned.move.kind)
            part = window(kind, planned.move.kind, times=planned.trips, microbatches=step.microbatches)
            size = planned.move.payload(shape, assignment.mesh) * itemsize
            moved.append((reader, Moved(kind, part, each * planned.trips, size * planned.trips)))
    waiting = hide((one for _, one in moved), compute_s=sum(seconds.values()), overlap=overlap)
    for reader, one in moved:
        beside = waiting[one.kind, one.part]
        exposed = beside.exposed_s / beside.total_s if beside.total_s else 1.0
        seconds[reader] = seconds.get(reader, 0.0) + one.seconds * exposed
    return seconds


def task_seconds(step: TracedStep, assignment: Assignment, overlap: Overlap) -> dict[TaskName | None, float]:
    """Seconds per step of each task, those of the loop for all microbatches together; None stands for work of no task.

    Of communication they count what does not hide behind the compute of the stage's step.
    """
    return _add_up(_equation_seconds(step, assignment, overlap), _tasks(assignment))


def repeated_part(program: StageProgram, assignment: Assignment, overlap: Overlap) -> float:
    """The part of a stage's forward seconds that its backward takes if it makes again what it reads, from what came in.

    What only the next stage reads, such as the last product of a block, is not made again.
    """
    loop = loop_of(assignment.program)
    if loop is None:
        return 1.0
    (region,) = loop.regions
    kinds = {eqn: None if eqn.task is None else eqn.task.kind for eqn in region.equations}
    wanted = {v for eqn, kind in kinds.items() if kind == "backward" for v in operands_of(eqn)}
    again: set[Equation] = set()
    for eqn in reversed(region.equations):
        if kinds[eqn] != "backward" and not wanted.isdisjoint(eqn.outvars):
            wanted.update(operands_of(eqn))
            again.add(eqn)
    outer = _outer_equations(region)
    seconds = _add_up(_equation_seconds(program.step, assignment, overlap), outer)
    forward = {eqn: seconds.get(eqn, 0.0) for eqn, kind in kinds.items() if kind == "forward"}
    forward_s = sum(forward.values())
    return sum(each for eqn, each in forward.items() if eqn in again) / forward_s if forward_s else 1.0


def _add_up(seconds: Mapping[Equation | None, float], owners: Mapping[Equation, _Owner]) -> dict[_Owner | None, float]:
    """The seconds of each owner's equations; None stands for those that have none."""
    found: dict[_Owner | None, float] = {}
    for eqn, each in seconds.items():
        owner = None if eqn is None else owners.get(eqn)
        found[owner] = found.get(owner, 0.0) + each
    return found


def _outer_equations(region: Program) -> dict[Equation, Equation]:
    """For every equation of a region, those of its loops and branches too, the one that stands in the region itself."""
    found: dict[Equation, Equation] = {}

    def walk(equations: Sequence[Equation], outer: Equation | None) -> None:
        for eqn in equations:
            found[eqn] = outer or eqn
            for inner in eqn.regions:
                walk(inner.equations, outer or eqn)

    walk(region.equations, None)
    return found


def transfer_sizes(staged: Staged) -> dict[tuple[int, int, str], tuple[int, int]]:
    """(bytes, arrays) between stages by (source, target, what).

    Of one microbatch for forward and backward, of one step for the rest. What forward and backward of a stage both read counts
    once. weights: leaves lent to a stage where they do not live.
    """
    cut = staged.cut
    layouts = cut.loop.layouts()
    total: dict[tuple[int, int, str], tuple[int, int]] = {}
    counted: set[tuple[Var, int, bool]] = set()

    def add(key: tuple[int, int, str], size: int) -> None:
        known, arrays = total.get(key, (0, 0))
        total[key] = known + size, arrays + 1

    for name, segment in cut.segments.items():
        for v in segment.reads:
            maker = cut.made_by.get(v)
            once = name.kind == "update"
            if maker is not None and maker.stage != name.stage and (v, name.stage, once) not in counted:
                counted.add((v, name.stage, once))
                shape = v.aval.shape if once else layouts[v].local_shape(v.aval.shape, cut.loop.mesh)
                add((maker.stage, name.stage, name.kind), math.prod(shape) * itemsize_of(v.aval))
    for stage in staged.stages:
        for port in stage.program.inputs:
            if port.source == "lent":
                size = math.prod(port.var.aval.shape) * itemsize_of(port.var.aval)
                add((cut.homes[port.var], stage.program.stage, "weights"), size)
    return total


def repeated_s(assignment: Assignment) -> float:
    """Seconds of a step in which a device does work that other devices do as well."""
    ways = {eqn: strategy.ways / assignment.mesh.size for eqn, strategy in assignment.strategies.items()}
    return sum(seconds * times * (1 - min(1.0, ways.get(eqn, 1.0))) for eqn, seconds, times in assignment.seconds)
