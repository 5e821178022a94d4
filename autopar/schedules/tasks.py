"""A schedule as data: which mesh runs which task in which order.

A pipeline has p meshes, m microbatches and v chunks of the model per mesh ("virtual stages"), so the model is cut into p*v
chunks. Chunk s is stage s and lives on mesh s % p. A mesh runs its row of tasks strictly in order and waits in front of a
task until everything that the task needs has arrived. A schedule holds no times; `task_times` adds them.

In every schedule, the backward tasks of one stage run in the order of microbatches. Gradients are therefore summed in one
order, and a change of schedule does not change a bit of the result.

What can go wrong: rows that wait for each other. `autopar.schedules.check_schedule` proves that they do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

TaskKind = Literal["forward", "backward", "input_gradient", "weight_gradient"]

NOMINAL_DURATIONS: Mapping[TaskKind, int] = {"forward": 1, "backward": 2, "input_gradient": 1, "weight_gradient": 1}
"""Relative durations that stand in where nothing is known of a model. They order tasks and predict nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """The work on one stage for one microbatch."""

    kind: TaskKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """As in an error message: "backward of stage 2, microbatch 5"."""
        return f"{self.kind.replace('_', ' ')} of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tasks of each mesh, in the order in which the mesh runs them."""

    name: str
    num_meshes: int
    num_microbatches: int
    virtual_stages: int
    rows: tuple[tuple[Task, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages, that is, of model chunks."""
        return self.num_meshes * self.virtual_stages

    @functools.cached_property
    def kinds(self) -> tuple[TaskKind, ...]:
        """The kinds of task that occur, in the order in which one microbatch goes through them."""
        present = {task.kind for row in self.rows for task in row}
        return tuple(kind for kind in get_args(TaskKind) if kind in present)


def dependencies(task: Task, *, num_stages: int, split: bool) -> tuple[Task, ...]:
    """The tasks whose results `task` reads. `split`: the backward is in two parts."""
    k = task.microbatch
    if task.kind == "forward":
        return (Task("forward", task.stage - 1, k),) if task.stage > 0 else ()
    if task.kind == "weight_gradient":
        return (Task("input_gradient", task.stage, k),)
    backward: TaskKind = "input_gradient" if split else "backward"
    later = (Task(backward, task.stage + 1, k),) if task.stage + 1 < num_stages else ()
    return (Task("forward", task.stage, k), *later)


def task_times(schedule: Schedule, duration_of: Callable[[Task], float]) -> dict[Task, tuple[float, float]]:
    """Start and end of each task when every mesh runs its row in order and transfers take no time.

    A task that can never start is missing from the result, and so are the tasks behind it. Only sums and maxima of the
    durations are formed.
    """
    split = "input_gradient" in schedule.kinds
    times: dict[Task, tuple[float, float]] = {}
    position = [0] * len(schedule.rows)
    free_at: list[float] = [0] * len(schedule.rows)
    progress = True
    while progress:
        progress = False
        for mesh, row in enumerate(schedule.rows):
            while position[mesh] < len(row):
                task = row[position[mesh]]
                needs = dependencies(task, num_stages=schedule.num_stages, split=split)
                if any(need not in times for need in needs):
                    break
                start = max([free_at[mesh], *(times[need][1] for need in needs)])
                times[task] = (start, start + duration_of(task))
                free_at[mesh] = times[task][1]
                position[mesh] += 1
                progress = True
    return times
