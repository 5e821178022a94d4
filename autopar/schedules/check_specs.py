"""Checks that the tasks given for a schedule are the tasks that it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.errors import ScheduleError
from autopar.schedules.instructions import TaskSpec
from autopar.schedules.tasks import Schedule


def check_specs(specs: Sequence[TaskSpec], schedule: Schedule) -> None:
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
        wrong += _list_faults(spec, schedule)
    if wrong:
        raise ScheduleError("These tasks do not fit the schedule:\n" + "\n".join(f"  - {line}" for line in wrong))


def _list_faults(spec: TaskSpec, schedule: Schedule) -> Iterator[str]:
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
