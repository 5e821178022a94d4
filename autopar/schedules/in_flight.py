"""How many microbatches a stage has in flight, and the most bytes that it keeps of them.

In: a `Schedule`, the number of a stage, and its `Kept` values: the bytes per microbatch of what one kind of task makes and
another kind reads last. Out: the most bytes of all microbatches together. What the stage's own mesh makes exists from the
start of the task that makes it; what another mesh makes exists from the end of that task. Both exist until the end of the
last reader.

All other meshes count as infinitely fast, so everything has arrived that can have arrived; no other speed keeps more.
Without a backward nothing stops a fast mesh, so there all meshes count as equally fast.

What can go wrong: the result is too small for slow stages behind fast ones in "inference", and for a stage without a
backward between stages that have one. Such a stage does not wait for the stage behind it, although the schedule says so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.schedules.tasks import Schedule, Task, TaskKind, task_times


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes per device and microbatch that `maker` of stage `source` makes and `reader` of the keeping stage reads last."""

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


def microbatches_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Count, for each stage, the most microbatches of which it keeps residuals at once.

    A microbatch is in flight from its forward to the end of its backward; with a split backward, of its weight gradient.
    Without a backward nothing is kept. The count is then 1, the microbatch being worked on.
    """
    kinds = schedule.kinds
    last: TaskKind = "weight_gradient" if "weight_gradient" in kinds else "backward"
    peaks = [0] * schedule.num_stages
    for row in schedule.rows:
        now = [0] * schedule.num_stages
        for task in row:
            if task.kind == "forward":
                now[task.stage] += 1
                peaks[task.stage] = max(peaks[task.stage], now[task.stage])
            if task.kind == last or kinds == ("forward",):
                now[task.stage] -= 1
    return tuple(peaks)


def most_kept_bytes(schedule: Schedule, stage: int, kept: Sequence[Kept]) -> int:
    """The most bytes per device that a stage keeps at once. At one instant, what goes makes room for what comes."""
    mesh, has_backward = stage % schedule.num_meshes, len(schedule.kinds) > 1

    def duration(task: Task) -> float:
        return 1 if task.stage % schedule.num_meshes == mesh or not has_backward else 0

    times = task_times(schedule, duration)
    changes: list[tuple[float, int]] = []
    for one in kept:
        if one.maker not in schedule.kinds or one.reader not in schedule.kinds:
            continue  # A step with a backward in a schedule without one is refused later, with a better message.
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
