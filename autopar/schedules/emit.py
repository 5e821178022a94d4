"""Turns a schedule and the tasks of each stage into one list of instructions.

The idea: lay all tasks in one global order (prologue, schedule by time, epilogue) and read it like a sequential program, in
which every write makes a new version of a name (`autopar.schedules.versions`). Each version

* is sent when it is born, once to each mesh that reads it, the earliest reader first;
* is received just before its first reader there;
* is freed on each mesh after its last reader there, unless that reader consumes it (donation).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from autopar.schedules.check_instructions import check_instructions
from autopar.schedules.check_schedule import check_schedule
from autopar.schedules.check_specs import check_specs
from autopar.schedules.instructions import (
    Free,
    Instruction,
    InstructionList,
    Receive,
    Run,
    Send,
    Slot,
    SpecKind,
    TaskSpec,
    Value,
)
from autopar.schedules.tasks import NOMINAL_DURATIONS, Schedule, task_times
from autopar.schedules.versions import Version, check_donations, read_versions


def emit(
    schedule: Schedule,
    specs: Sequence[TaskSpec],
    *,
    inputs: Mapping[int, tuple[Value, ...]],
    outputs: tuple[tuple[int, Value], ...],
    consumable: Collection[tuple[int, Value]] = (),
) -> InstructionList:
    """The verified instructions of one step.

    Args:
        schedule: What runs when.
        specs: One spec for every stage and kind of the schedule, and those of the prologue and the epilogue in an order in
            which they can run.
        inputs: For each mesh, what the caller supplies there. The same value may be on several meshes.
        outputs: (mesh, value) for each result; the latest version counts. A value is sent to the mesh if need be.
        consumable: The inputs, as (mesh, value), that the step may free and donate. All others survive it.

    Raises:
        ScheduleError: The schedule cannot run, or the specs do not fit it or each other.
    """
    check_schedule(schedule)
    check_specs(specs, schedule)
    runs = _order_runs(schedule, specs)
    supplied = [(mesh, value) for mesh, values in sorted(inputs.items()) for value in values]
    versions = read_versions(runs, supplied, outputs=outputs)
    check_donations(versions, runs, consumable=frozenset(consumable))
    program = InstructionList(
        num_meshes=schedule.num_meshes,
        instructions=tuple(_lay_out(runs, versions, consumable=frozenset(consumable))),
        inputs=tuple(supplied),
        outputs=tuple(outputs),
        consumable=frozenset(consumable),
    )
    check_instructions(program)
    return program


def _order_runs(schedule: Schedule, specs: Sequence[TaskSpec]) -> list[Run]:
    """All runs: the prologue, the schedule's tasks by the time at which they would start, and the epilogue."""
    by_task = {(spec.kind, spec.stage): spec for spec in specs}
    times = task_times(schedule, lambda task: NOMINAL_DURATIONS[task.kind])
    tasks = sorted(times, key=lambda task: (times[task][0], task.stage % schedule.num_meshes))
    m = schedule.num_microbatches

    def once(kind: SpecKind) -> list[Run]:
        return [_make_run(spec, None, num_microbatches=m) for spec in specs if spec.kind == kind]

    scheduled = [_make_run(by_task[task.kind, task.stage], task.microbatch, num_microbatches=m) for task in tasks]
    return [*once("prologue"), *scheduled, *once("epilogue")]


def _make_run(spec: TaskSpec, microbatch: int | None, *, num_microbatches: int) -> Run:
    def values(slots: Sequence[Slot]) -> Iterator[Value]:
        for slot in slots:
            if not slot.per_microbatch:
                yield Value(slot.name)
            elif microbatch is None:
                yield from (Value(slot.name, k) for k in range(num_microbatches))
            else:
                yield Value(slot.name, microbatch)

    reads: list[Value] = []
    donated: list[int] = []
    for position, slot in enumerate(spec.inputs):
        for value in values([slot]):
            if position in spec.donated:
                donated.append(len(reads))
            reads.append(value)
    return Run(
        mesh=spec.mesh,
        task=spec.name,
        kind=spec.kind,
        stage=spec.stage,
        microbatch=microbatch,
        reads=tuple(reads),
        writes=tuple(values(spec.outputs)),
        donated=tuple(donated),
    )


def _lay_out(
    runs: Sequence[Run], versions: Sequence[Version], *, consumable: frozenset[tuple[int, Value]]
) -> Iterator[Instruction]:
    """The instructions in the global order."""
    end = len(runs)
    born: dict[int, list[Version]] = {}
    arriving: dict[tuple[int, int], list[Version]] = {}  # index of the first reader, its mesh
    leaving: dict[tuple[int, int], list[Version]] = {}  # index of the last reader, its mesh
    for version in versions:
        born.setdefault(version.born, []).append(version)
        targets = version.targets()
        for mesh in targets:
            arriving.setdefault((min(version.readers.get(mesh, [end])), mesh), []).append(version)
        for mesh in (*version.homes, *targets):
            if mesh not in version.donors and _is_freed(version, mesh, runs, consumable=consumable):
                leaving.setdefault((version.last_use(mesh), mesh), []).append(version)
    numbers: dict[tuple[int, int], int] = {}  # id of version, target

    def births(n: int) -> Iterator[Instruction]:
        sends = [(version, mesh) for version in born.get(n, ()) for mesh in version.targets()]
        sends.sort(key=lambda send: min(send[0].readers.get(send[1], [end])))
        for version, mesh in sends:
            number = numbers[id(version), mesh] = len(numbers)
            yield Send(version.value, min(version.homes), mesh, number)

    def receives(n: int, mesh: int) -> Iterator[Instruction]:
        for version in sorted(arriving.get((n, mesh), ()), key=lambda version: numbers[id(version), mesh]):
            yield Receive(version.value, min(version.homes), mesh, numbers[id(version), mesh])

    meshes = sorted({mesh for _, mesh in (*arriving, *leaving)})
    yield from births(-1)
    yield from (Free(version.value, mesh) for mesh in meshes for version in leaving.get((-1, mesh), ()))
    for n, run in enumerate(runs):
        yield from receives(n, run.mesh)
        yield run
        yield from births(n)
        yield from (Free(version.value, run.mesh) for version in leaving.get((n, run.mesh), ()))
    for mesh in meshes:
        yield from receives(end, mesh)


def _is_freed(version: Version, mesh: int, runs: Sequence[Run], *, consumable: frozenset[tuple[int, Value]]) -> bool:
    """Whether a version is freed: not an output, not an input that must survive, and not one that its last reader replaces."""
    survives = version.born < 0 and mesh in version.homes and (mesh, version.value) not in consumable
    last = version.last_use(mesh)
    replaced = mesh in version.readers and version.value in runs[last].writes
    return not survives and not replaced and mesh not in version.wanted
