"""A schedule and the tasks of each stage give one list of instructions.

In: a `Schedule`, the `TaskSpec`s, which inputs lie on which mesh, which outputs are wanted where. Out: a verified
`InstructionList`. The idea: lay all tasks in one global order (prologue, schedule by time, epilogue) and read it like a
sequential program, in which every write makes a new *version* of a name. Of each version we know where it is born and who
reads it, and so:

* it is sent when it is born, once to each mesh that reads it, the earliest reader first;
* it is received just before its first reader there;
* it is freed on each mesh after its last reader there, unless that reader consumes it (donation).

What can go wrong: a task that reads what nothing has produced before it, or donates what somebody reads later. Both raise
with the names of task and value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.schedules.check import check_instructions, check_schedule
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
from autopar.schedules.schedules import Schedule, task_times

UNIT_DURATIONS: Mapping[str, int] = {"forward": 1, "backward": 2, "input_gradient": 1, "weight_gradient": 1}


def emit(
    schedule: Schedule,
    specs: Sequence[TaskSpec],
    *,
    inputs: Mapping[int, tuple[Value, ...]],
    outputs: tuple[tuple[int, Value], ...],
    consumable: Collection[tuple[int, Value]] = (),
) -> InstructionList:
    """The instructions of one step.

    `specs` holds one spec for every stage and kind of the schedule, plus the prologue's and epilogue's in an order in which
    they can run. `inputs` says for each mesh what the caller supplies there; the same value may be on several meshes.
    `outputs` are (mesh, value), the latest version; a value is sent there if need be. `consumable` lists the inputs that
    the step may free and donate; all others survive it.

    Raises `ScheduleError` for a schedule or specs that do not fit together.
    """
    check_schedule(schedule)
    _check_specs(specs, schedule)
    runs = _global_order(schedule, specs)
    supplied = [(mesh, value) for mesh, values in sorted(inputs.items()) for value in values]
    versions = _versions(runs, supplied, outputs=outputs)
    _check_donations(versions, runs, consumable=frozenset(consumable))
    program = InstructionList(
        num_meshes=schedule.num_meshes,
        instructions=tuple(_lay_out(runs, versions, consumable=frozenset(consumable))),
        inputs=tuple(supplied),
        outputs=tuple(outputs),
        consumable=frozenset(consumable),
    )
    check_instructions(program)
    return program


@dataclass
class _Version:
    """What one write, or the caller, put under a name. `homes`: the meshes where it is without a transfer."""

    value: Value
    born: int  # index of the run that writes it; -1 for inputs
    homes: tuple[int, ...]
    readers: dict[int, list[int]] = field(default_factory=dict)  # mesh to indices of runs
    donors: dict[int, int] = field(default_factory=dict)  # mesh to index of the run that consumes it there
    wanted: set[int] = field(default_factory=set)  # meshes where it is an output

    def last_use(self, mesh: int) -> int:
        """Index of the last run that reads it on a mesh; its birth if none does."""
        return max(self.readers.get(mesh, [self.born]))

    def targets(self) -> list[int]:
        """The meshes it has to be sent to."""
        return sorted((set(self.readers) | self.wanted) - set(self.homes))


def _global_order(schedule: Schedule, specs: Sequence[TaskSpec]) -> list[Run]:
    """All runs: the prologue, the schedule's tasks by the time at which they would start, the epilogue."""
    by_task = {(spec.kind, spec.stage): spec for spec in specs}
    times = task_times(schedule, lambda task: UNIT_DURATIONS[task.kind])
    tasks = sorted(times, key=lambda task: (times[task][0], task.stage % schedule.num_meshes))
    m = schedule.num_microbatches

    def once(kind: SpecKind) -> list[Run]:
        return [_run(spec, None, num_microbatches=m) for spec in specs if spec.kind == kind]

    scheduled = [_run(by_task[task.kind, task.stage], task.microbatch, num_microbatches=m) for task in tasks]
    return [*once("prologue"), *scheduled, *once("epilogue")]


def _run(spec: TaskSpec, microbatch: int | None, *, num_microbatches: int) -> Run:
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
    writes = tuple(values(spec.outputs))
    return Run(spec.mesh, spec.name, spec.kind, spec.stage, microbatch, tuple(reads), writes, tuple(donated))


def _versions(
    runs: Sequence[Run], supplied: Sequence[tuple[int, Value]], *, outputs: Sequence[tuple[int, Value]]
) -> list[_Version]:
    """Every version of every value with its birth and readers: the global order read as a sequential program."""
    homes: dict[Value, list[int]] = {}
    for mesh, value in supplied:
        homes.setdefault(value, []).append(mesh)
    latest = {value: _Version(value, -1, tuple(meshes)) for value, meshes in homes.items()}
    versions = list(latest.values())
    for n, run in enumerate(runs):
        for position, value in enumerate(run.reads):
            if value not in latest:
                raise ScheduleError(_unknown(value, f"Task {run.task!r} on mesh {run.mesh} reads", latest))
            _check_reader(latest[value], run, runs)
            latest[value].readers.setdefault(run.mesh, []).append(n)
            if position in run.donated:
                latest[value].donors[run.mesh] = n
        for value in run.writes:
            if value in latest and value not in run.reads:
                raise ScheduleError(
                    f"Task {run.task!r} on mesh {run.mesh} writes {value}, which {_origin(latest[value], runs)}. Only "
                    "a task that also reads a value may write it again: list it among the inputs, or name it differently."
                )
            latest[value] = _Version(value, n, (run.mesh,))
            versions.append(latest[value])
    for mesh, value in outputs:
        if value not in latest:
            raise ScheduleError(_unknown(value, f"An output on mesh {mesh} is", latest))
        latest[value].wanted.add(mesh)
    return versions


def _check_reader(version: _Version, run: Run, runs: Sequence[Run]) -> None:
    """Inside the schedule, another mesh would see an accumulator at a moment that only the order of emission decides."""
    inside = version.born >= 0 and version.value.microbatch is None and _scheduled(runs[version.born])
    if inside and _scheduled(run) and run.mesh not in version.homes:
        raise ScheduleError(
            f"Task {run.task!r} on mesh {run.mesh} reads {version.value}, which task {runs[version.born].task!r} on mesh "
            f"{version.homes[0]} rewrites for every microbatch. Which version it would get is not defined: read it in the "
            "epilogue, or make it a slot per microbatch."
        )


def _scheduled(run: Run) -> bool:
    return run.microbatch is not None


def _check_donations(
    versions: Sequence[_Version], runs: Sequence[Run], *, consumable: frozenset[tuple[int, Value]]
) -> None:
    """A consumed value has no later reader, is not an output, and is not an input that has to survive."""
    wrong = []
    for version in versions:
        for mesh, donor in version.donors.items():
            what = f"task {runs[donor].task!r} on mesh {mesh} donates {version.value}"
            later = [n for n in version.readers[mesh] if n > donor]
            if later:
                wrong.append(f"{what}, and task {runs[later[0]].task!r} reads it afterwards")
            if mesh in version.wanted:
                wrong.append(f"{what}, which is an output")
            if version.born < 0 and mesh in version.homes and (mesh, version.value) not in consumable:
                wrong.append(f"{what}, an input that is not consumable")
    if wrong:
        raise ScheduleError("These donations are not possible:\n" + "\n".join(f"  - {line}" for line in wrong))


def _lay_out(
    runs: Sequence[Run], versions: Sequence[_Version], *, consumable: frozenset[tuple[int, Value]]
) -> Iterator[Instruction]:
    """The instructions in the global order."""
    end = len(runs)
    born: dict[int, list[_Version]] = {}
    arriving: dict[tuple[int, int], list[_Version]] = {}  # index of the first reader, its mesh
    leaving: dict[tuple[int, int], list[_Version]] = {}  # index of the last reader, its mesh
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


def _is_freed(version: _Version, mesh: int, runs: Sequence[Run], *, consumable: frozenset[tuple[int, Value]]) -> bool:
    """Outputs and inputs that must survive stay; a version whose last reader writes the next one just gives way to it."""
    survives = version.born < 0 and mesh in version.homes and (mesh, version.value) not in consumable
    last = version.last_use(mesh)
    replaced = mesh in version.readers and version.value in runs[last].writes
    return not survives and not replaced and mesh not in version.wanted


def _check_specs(specs: Sequence[TaskSpec], schedule: Schedule) -> None:
    """Every task of the schedule has exactly one spec, on the right mesh, whose slots are named once."""
    wrong = [f"{count} specs are named {name!r}" for name, count in Counter(s.name for s in specs).items() if count > 1]
    found = Counter((spec.kind, spec.stage) for spec in specs if spec.kind not in ("prologue", "epilogue"))
    needed = {(kind, stage) for kind in schedule.kinds for stage in range(schedule.num_stages)}
    for kind, stage in sorted(needed | set(found)):
        count = found[kind, stage]
        if count != 1 and (kind, stage) in needed:
            wrong.append(f"the {kind} of stage {stage} has {count} specs, it needs one")
        elif (kind, stage) not in needed:
            wrong.append(f"the {kind} of stage {stage} does not occur in schedule {schedule.name!r}")
    for spec in specs:
        wrong += _wrong_in(spec, schedule)
    if wrong:
        raise ScheduleError("These tasks do not fit the schedule:\n" + "\n".join(f"  - {line}" for line in wrong))


def _wrong_in(spec: TaskSpec, schedule: Schedule) -> Iterator[str]:
    if not 0 <= spec.mesh < schedule.num_meshes:
        yield f"{spec.name!r} is on mesh {spec.mesh}; there are meshes 0 to {schedule.num_meshes - 1}"
    elif spec.kind not in ("prologue", "epilogue") and spec.mesh != spec.stage % schedule.num_meshes:
        yield f"{spec.name!r} is on mesh {spec.mesh}; stage {spec.stage} lives on mesh {spec.stage % schedule.num_meshes}"
    for side, slots in (("inputs", spec.inputs), ("outputs", spec.outputs)):
        twice = [name for name, count in Counter(slot.name for slot in slots).items() if count > 1]
        if twice:
            yield f"{side} of {spec.name!r} name {', '.join(map(repr, twice))} more than once"
    if any(not 0 <= position < len(spec.inputs) for position in spec.donated):
        yield f"{spec.name!r} donates inputs {spec.donated}; it has {len(spec.inputs)}"


def _unknown(value: Value, reader: str, latest: Mapping[Value, _Version]) -> str:
    same_name = sorted(str(other) for other in latest if other.name == value.name)
    known = f"so far there is {', '.join(same_name)}" if same_name else "nothing of that name exists at that point"
    return f"{reader} {value}, which no earlier task writes and no mesh has as an input; {known}."


def _origin(version: _Version, runs: Sequence[Run]) -> str:
    if version.born < 0:
        return f"is an input of mesh {', '.join(map(str, version.homes))}"
    return f"task {runs[version.born].task!r} on mesh {version.homes[0]} has written before"
