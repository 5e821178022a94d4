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

import numpy as np

from autopar.schedules.check_schedule import check_schedule
from autopar.schedules.tasks import Schedule, Task, TaskKind, dependencies

_MOST_ENTRIES = 2**25
"""Times that are kept at once, of 4 bytes each."""


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
        """The most bytes per device that a stage keeps at once. At one instant, what goes makes room for what comes."""
        return sum(self.at_peak([(stage, one) for one in kept]))

    def at_peak(self, kept: Sequence[tuple[int, Kept]]) -> tuple[int, ...]:
        """Bytes of each of these when all together are most: pairs of a stage of one mesh and a value that it keeps."""
        schedule = self.schedule
        # A step with a backward in a schedule without one is refused later, with a better message.
        known = [n for n, (_, one) in enumerate(kept) if {one.maker, one.reader} <= {*schedule.kinds}]
        there = [0] * len(kept)
        if not known:
            return tuple(there)
        times, owners, changes = self._changes([kept[n] for n in known])
        order = np.lexsort((changes, times))
        total = np.cumsum(changes[order])
        if total.max() > 0:
            until = order[: int(total.argmax()) + 1]
            for place, number in enumerate(known):
                there[number] = int(changes[until][owners[until] == place].sum())
        return tuple(there)

    def _changes(self, kept: Sequence[tuple[int, Kept]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(when, of which value, bytes that come or go), a microbatch at a time."""
        schedule, mesh = self.schedule, kept[0][0] % self.schedule.num_meshes
        ends = self._ends_if_slow(mesh)
        came, gone = [], []
        for stage, one in kept:
            is_made_here = one.source % schedule.num_meshes == mesh
            came.append(ends[schedule.kinds.index(one.maker), one.source] - is_made_here)
            gone.append(ends[schedule.kinds.index(one.reader), stage])
        sizes = np.repeat(np.array([one.bytes for _, one in kept], np.int64), schedule.num_microbatches)
        owners = np.repeat(np.arange(len(kept)), schedule.num_microbatches)
        return np.concatenate([*came, *gone]), np.tile(owners, 2), np.concatenate([sizes, -sizes])

    def _ends_if_slow(self, mesh: int) -> np.ndarray:
        """[kind, stage, microbatch]: when each task ends, if a task takes 1 on this mesh and nothing on the others.

        Without a backward, a task takes 1 on all meshes.
        """
        number = len(self.schedule.kinds) * self.schedule.num_stages * self.schedule.num_microbatches
        together = max(1, _MOST_ENTRIES // max(1, number))
        first = mesh - mesh % together
        if first not in self._ends:
            self._ends.clear()
            meshes = range(first, min(first + together, self.schedule.num_meshes))
            self._ends[first] = _end_times(self.schedule, meshes)
        return self._ends[first][..., mesh - first]

    @functools.cached_property
    def _ends(self) -> dict[int, np.ndarray]:
        return {}


def _end_times(schedule: Schedule, meshes: Sequence[int]) -> np.ndarray:
    """[kind, stage, microbatch, number of the mesh]: when each task ends, for each of these meshes as the only slow one."""
    split, stages = "input_gradient" in schedule.kinds, schedule.num_stages
    place = {kind: number for number, kind in enumerate(schedule.kinds)}
    ends = np.full((len(place), stages, schedule.num_microbatches, len(meshes)), -1, np.int32)
    seconds = np.ones((schedule.num_meshes, len(meshes)), np.int32)
    if len(place) > 1:
        seconds = (np.arange(schedule.num_meshes)[:, None] == np.array(meshes)[None, :]).astype(np.int32)
    is_done: set[Task] = set()
    position, free_at = [0] * len(schedule.rows), np.zeros_like(seconds)
    progress = True
    while progress:
        progress = False
        for mesh, row in enumerate(schedule.rows):
            while position[mesh] < len(row):
                task = row[position[mesh]]
                needs = dependencies(task, num_stages=stages, split=split)
                if not is_done.issuperset(needs):
                    break
                for need in needs:
                    np.maximum(free_at[mesh], ends[place[need.kind], need.stage, need.microbatch], out=free_at[mesh])
                free_at[mesh] += seconds[mesh]
                ends[place[task.kind], task.stage, task.microbatch] = free_at[mesh]
                is_done.add(task)
                position[mesh] += 1
                progress = True
    if len(is_done) < sum(map(len, schedule.rows)):
        check_schedule(schedule)  # says which task comes before one that it needs
        raise AssertionError("every task of a schedule that passes the check ends")
    return ends


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
