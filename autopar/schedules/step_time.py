"""How long a schedule takes on the plain chain of its stages, without the instructions.

In: a `Schedule`, seconds of each kind of task on each stage, and of what such a task sends to a neighbour. Out: `StepTime`. With
e the end of a task, d its duration, c the seconds of sending its result over the link L from its mesh to the reader's,

    a = max(e, free(L)) + c,  free(L) = a        the result arrives; a link sends one thing after the other
    e = max(e of the mesh's task before, a of what it reads) + d

in the order of each mesh's row. That is what `simulate` finds of the chain's instructions, without writing these down: a search
asks for hundreds of steps with thousands of tasks. Only sums and maxima are formed. What can go wrong: a schedule that was not
checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.schedules.tasks import Schedule

PerStage = Mapping[tuple[str, int], float]
"""Seconds by kind of task and stage."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and for each mesh the seconds in which it works."""

    makespan_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The waiting of the busiest mesh over its work: (p-1)/m for 1F1B with equal stages."""
        most_s = max(self.busy_s)
        return (self.makespan_s - most_s) / most_s


def time_step(schedule: Schedule, run_s: PerStage, sent_s: PerStage | None = None) -> StepTime:
    """Time a step of the chain of a schedule's stages.

    Args:
        schedule: It must pass `check_schedule`, as everything that `make_schedule` returns does.
        run_s: Seconds of a task.
        sent_s: Seconds until a task's result is on the mesh of the neighbour that reads it, if the link is free; none by default.
    """
    state = _Meshes(schedule, run_s, sent_s or {})
    while sum(state.advance(mesh) for mesh in range(schedule.num_meshes)):
        pass
    assert state.is_done, "the schedule was not checked"
    return StepTime(max(state.now), tuple(state.busy))


class _Meshes:
    """Per mesh: how far it is in its row, its time, its work; and when each task's operand arrives, None if not yet known."""

    def __init__(self, schedule: Schedule, run_s: PerStage, sent_s: PerStage) -> None:
        meshes, last = schedule.num_meshes, schedule.num_stages - 1
        self._rows, self._run_s = schedule.rows, run_s
        self._place = [0] * meshes
        self.now: list[float] = [0] * meshes
        self.busy: list[float] = [0] * meshes
        self._free: dict[tuple[int, int], float] = {}
        self._arrival: dict[tuple[str, int], list[float | None]] = {}
        self._sends: dict[tuple[str, int], tuple[list[float | None], tuple[int, int], float]] = {}
        for kind in schedule.kinds:
            step = 1 if kind == "forward" else -1
            first = 0 if step == 1 else last
            for stage in range(last + 1):
                needs_nothing = kind == "weight_gradient" or stage == first
                self._arrival[kind, stage] = [0 if needs_nothing else None] * schedule.num_microbatches
            for stage in range(last + 1) if kind != "weight_gradient" else ():
                if 0 <= stage + step <= last:
                    link = (stage % meshes, (stage + step) % meshes)
                    self._sends[kind, stage] = (self._arrival[kind, stage + step], link, sent_s.get((kind, stage), 0))

    @property
    def is_done(self) -> bool:
        """Whether all tasks have run."""
        return all(place == len(row) for place, row in zip(self._place, self._rows, strict=True))

    def advance(self, mesh: int) -> int:
        """Run a mesh's next tasks as far as it is known when their operands arrive; returns their number."""
        row, now, begun = self._rows[mesh], self.now[mesh], self._place[mesh]
        for place in range(begun, len(row)):
            task = row[place]
            key = (task.kind, task.stage)
            arrival = self._arrival[key][task.microbatch]
            if arrival is None:
                break
            seconds = self._run_s[key]
            self.busy[mesh] += seconds
            now = max(now, arrival) + seconds
            self._place[mesh] = place + 1
            if key in self._sends:
                self._send(key, task.microbatch, now)
        self.now[mesh] = now
        return self._place[mesh] - begun

    def _send(self, key: tuple[str, int], microbatch: int, now: float) -> None:
        arrivals, link, seconds = self._sends[key]
        if link[0] != link[1]:
            now = self._free[link] = max(now, self._free.get(link, 0)) + seconds
        arrivals[microbatch] = now
