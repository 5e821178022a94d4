"""The tasks of a step, read in order like a sequential program: which version of which value each of them sees.

Every write makes a new *version* of a value's name. Of each version we know where it is born, who reads it and who
consumes it. What can go wrong: a task that reads what nothing has produced before it, or donates what somebody reads later.
Both raise `ScheduleError` with the names of task and value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.schedules.instructions import Run, Value


@dataclass(kw_only=True)
class Version:
    """What one write, or the caller, put under a name.

    Attributes:
        value: The name.
        born: Index of the run that writes the version; -1 for inputs.
        homes: The meshes that have it without a transfer.
        readers: For each mesh, the indices of the runs that read it there.
        donors: For each mesh, the index of the run that consumes it there.
        wanted: The meshes where it is an output.
    """

    value: Value
    born: int
    homes: tuple[int, ...]
    readers: dict[int, list[int]] = field(default_factory=dict)
    donors: dict[int, int] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)

    def last_use(self, mesh: int) -> int:
        """Index of the last run that reads it on a mesh; its birth if none does."""
        return max(self.readers.get(mesh, [self.born]))

    def targets(self) -> list[int]:
        """The meshes it has to be sent to."""
        return sorted((set(self.readers) | self.wanted) - set(self.homes))


def read_versions(
    runs: Sequence[Run], supplied: Sequence[tuple[int, Value]], *, outputs: Sequence[tuple[int, Value]]
) -> list[Version]:
    """Every version of every value, in the order of birth; `runs` are in the global order, `supplied` are the inputs."""
    homes: dict[Value, list[int]] = {}
    for mesh, value in supplied:
        homes.setdefault(value, []).append(mesh)
    latest = {value: Version(value=value, born=-1, homes=tuple(meshes)) for value, meshes in homes.items()}
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
            latest[value] = Version(value=value, born=n, homes=(run.mesh,))
            versions.append(latest[value])
    for mesh, value in outputs:
        if value not in latest:
            raise ScheduleError(_unknown(value, f"An output on mesh {mesh} is", latest))
        latest[value].wanted.add(mesh)
    return versions


def _check_reader(version: Version, run: Run, runs: Sequence[Run]) -> None:
    """Refuse an accumulator that another mesh reads inside the schedule: only the order of emission decides what it sees."""
    inside = version.born >= 0 and version.value.microbatch is None and _is_scheduled(runs[version.born])
    if inside and _is_scheduled(run) and run.mesh not in version.homes:
        raise ScheduleError(
            f"Task {run.task!r} on mesh {run.mesh} reads {version.value}, which task {runs[version.born].task!r} on mesh "
            f"{version.homes[0]} rewrites for every microbatch. Which version it would get is not defined: read it in the "
            "epilogue, or make it a slot per microbatch."
        )


def _is_scheduled(run: Run) -> bool:
    return run.microbatch is not None


def check_donations(
    versions: Sequence[Version], runs: Sequence[Run], *, consumable: frozenset[tuple[int, Value]]
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


def _unknown(value: Value, reader: str, latest: Mapping[Value, Version]) -> str:
    same_name = sorted(str(other) for other in latest if other.name == value.name)
    known = f"so far there is {', '.join(same_name)}" if same_name else "nothing of that name exists at that point"
    return f"{reader} {value}, which no earlier task writes and no mesh has as an input; {known}."


def _origin(version: Version, runs: Sequence[Run]) -> str:
    if version.born < 0:
        return f"is an input of mesh {', '.join(map(str, version.homes))}"
    return f"task {runs[version.born].task!r} on mesh {version.homes[0]} has written before"
