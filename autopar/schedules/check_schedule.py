"""Proves, before anything runs, that a schedule can run.

In: a `Schedule`. Out: nothing, or a `ScheduleError` that shows the schedule's grid with an arrow at the culprit. A schedule
is *complete* (every stage sees every microbatch once), *ordered* (no mesh runs a task before one of its own tasks that it
needs) and *free of deadlock* (meshes that run their rows in order never all wait).
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import ScheduleError
from autopar.schedules.grid import draw_grid
from autopar.schedules.tasks import Schedule, Task, TaskKind, dependencies, task_times

ALLOWED_KINDS: tuple[tuple[TaskKind, ...], ...] = (
    ("forward",),
    ("forward", "backward"),
    ("forward", "input_gradient", "weight_gradient"),
)
ONE_COLUMN_EACH: Mapping[TaskKind, int] = {"forward": 1, "backward": 1, "input_gradient": 1, "weight_gradient": 1}


def check_schedule(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless the schedule is complete, ordered and free of deadlock."""
    _check_sizes(schedule)
    _check_tasks(schedule)
    split = "input_gradient" in schedule.kinds
    for row in schedule.rows:
        place = {task: n for n, task in enumerate(row)}
        for n, task in enumerate(row):
            for need in dependencies(task, num_stages=schedule.num_stages, split=split):
                if place.get(need, -1) > n:
                    raise _refuse(schedule, f"the {task} comes before the {need}, which it needs", task)
    _check_deadlock(schedule, split=split)


def _check_sizes(schedule: Schedule) -> None:
    """One row per mesh, and kinds of task that make a step."""
    if len(schedule.rows) != schedule.num_meshes:
        raise ScheduleError(
            f"Schedule {schedule.name!r} has {len(schedule.rows)} rows for {schedule.num_meshes} meshes."
        )
    kinds = schedule.kinds
    if kinds not in ALLOWED_KINDS:
        raise ScheduleError(
            f"Schedule {schedule.name!r} has tasks of the kinds {', '.join(kinds) or 'none'}; it needs forwards, and for "
            "training either backwards or both input and weight gradients."
        )


def _check_tasks(schedule: Schedule) -> None:
    """Complete: every stage on its mesh, each of its microbatches once."""
    expected = {
        Task(kind, stage, k)
        for kind in schedule.kinds
        for stage in range(schedule.num_stages)
        for k in range(schedule.num_microbatches)
    }
    seen: set[Task] = set()
    for mesh, row in enumerate(schedule.rows):
        for task in row:
            home = task.stage % schedule.num_meshes
            if task not in expected:
                sizes = f"{schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
                raise _refuse(schedule, f"the {task} does not exist: there are {sizes}", task)
            if home != mesh:
                raise _refuse(schedule, f"the {task} is on mesh {mesh}, its stage lives on mesh {home}", task)
            if task in seen:
                raise _refuse(schedule, f"the {task} occurs more than once", task)
            seen.add(task)
    missing = sorted(expected - seen, key=lambda task: (task.stage, task.microbatch, task.kind))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise _refuse(schedule, f"the {missing[0]} is missing{more}", None)


def _check_deadlock(schedule: Schedule, *, split: bool) -> None:
    """Follow the waiting from the first stuck mesh until a task comes twice: that is the cycle."""
    times = task_times(schedule, lambda task: 1)
    stuck = [next((task for task in row if task not in times), None) for row in schedule.rows]
    task = next((task for task in stuck if task is not None), None)
    if task is None:
        return
    waiting: list[Task] = []
    while task not in waiting:
        assert task is not None
        waiting.append(task)
        needs = dependencies(task, num_stages=schedule.num_stages, split=split)
        task = stuck[next(need for need in needs if need not in times).stage % schedule.num_meshes]
    assert task is not None
    cycle = waiting[waiting.index(task) :]
    words = " waits for what is behind the ".join(f"{task} (mesh {task.stage % schedule.num_meshes})" for task in cycle)
    raise _refuse(schedule, f"deadlock: the {words}, which waits for what is behind the first", task)


def _refuse(schedule: Schedule, problem: str, culprit: Task | None) -> ScheduleError:
    picture = draw_grid(schedule, ONE_COLUMN_EACH, mark=culprit)
    return ScheduleError(f"Schedule {schedule.name!r} cannot run: {problem}.\n{picture}")
