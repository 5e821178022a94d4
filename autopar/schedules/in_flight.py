"""How long a stage keeps what tasks hand on, and the most bytes of it that are there at once.

In: a `Schedule`, the number of a stage, and `Kept`: the bytes that a microbatch has of what one kind of task makes and another
is the last to read. Out: the most bytes of all microbatches together. What is made on the stage's own mesh is there from the
start of its task, what another mesh makes from the end of it, and both until the end of the last reader.

The other meshes count as infinitely fast: so everything has arrived that can have arrived, which no other speed exceeds. Without
a backward nothing stops a fast mesh; there all are equally fast. What can go wrong: slow stages behind fast ones in "inference",
and a stage without a backward between others, which does not wait for the stage behind it, as the schedule thinks it does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.schedules.check import microbatches_in_flight
from autopar.schedules.schedules import Schedule, Task, TaskKind, task_times


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes per device and microbatch of what `maker` of stage `source` makes, and `reader` of the keeping stage reads last."""

    maker: TaskKind
    source: int
    reader: TaskKind
    bytes: int


@dataclass(frozen=True)
class InFlight:
    """What a schedule keeps of the microbatches that it has in flight."""

    schedule: Schedule

    @functools.cached_property
    def microbatches(self) -> tuple[int, ...]:
        """How many microbatches each stage has in flight."""
        return microbatches_in_flight(self.schedule)

    @property
    def is_split(self) -> bool:
        """Whether input gradients and weight gradients are two tasks."""
        return "weight_gradient" in self.schedule.kinds

    def most_bytes(self, stage: int, kept: Sequence[Kept]) -> int:
        """The most bytes per device that a stage keeps of all microbatches together."""
        return most_kept_bytes(self.schedule, stage, kept)


def most_kept_bytes(schedule: Schedule, stage: int, kept: Sequence[Kept]) -> int:
    """Bytes per device that a stage keeps at most; of what goes and what comes at one instant, the first makes room."""
    mesh, has_backward = stage % schedule.num_meshes, len(schedule.kinds) > 1

    def duration(task: Task) -> float:
        return 1 if task.stage % schedule.num_meshes == mesh or not has_backward else 0

    times = task_times(schedule, duration)
    changes: list[tuple[float, int]] = []
    for one in kept:
        if one.maker not in schedule.kinds or one.reader not in schedule.kinds:
            continue  # a step with a backward in a schedule without, which is refused
        is_made_here = one.source % schedule.num_meshes == mesh
        for k in range(schedule.num_microbatches):
            start, end = times[Task(one.maker, one.source, k)]
            changes.append((start if is_made_here else end, one.bytes))
            changes.append((times[Task(one.reader, stage, k)][1], -one.bytes))
    total = most = 0
    for _, change in sorted(changes):
        total += change
        most = max(most, total)
    return most
