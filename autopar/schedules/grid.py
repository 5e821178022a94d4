"""A schedule as text, for people: one line per mesh, one column per unit of time."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.schedules.tasks import Schedule, Task, TaskKind, task_times

LETTERS: Mapping[TaskKind, str] = {"forward": "F", "backward": "B", "input_gradient": "B", "weight_gradient": "W"}


def draw_grid(schedule: Schedule, durations: Mapping[TaskKind, int], *, mark: Task | None = None) -> str:
    """Draw the schedule.

    F3 is the forward of microbatch 3, B3 its backward (or input gradient), W3 its weight gradient. With several chunks per
    mesh a letter follows: a for the first chunk of the mesh. A mesh whose next task can never start ends in "?" and the
    tasks that wait behind it.

    Args:
        schedule: What to draw; it need not be free of deadlock.
        durations: The columns that each kind of task takes.
        mark: A task that gets an arrow under it.
    """
    times = task_times(schedule, lambda task: durations[task.kind])
    width = max((len(_label(task, schedule)) for row in schedule.rows for task in row), default=1) + 1
    lines = []
    for mesh, row in enumerate(schedule.rows):
        cells, columns = _lay_out_row(row, times, schedule)
        head = f"mesh {mesh} | "
        lines.append((head + "".join(cell.ljust(width) for cell in cells)).rstrip())
        if mark is not None and mark in columns:
            lines.append(" " * (len(head) + width * columns[mark]) + "^ here")
    return "\n".join(lines) + "\n"


def _lay_out_row(
    row: tuple[Task, ...], times: Mapping[Task, tuple[float, float]], schedule: Schedule
) -> tuple[list[str], dict[Task, int]]:
    """The texts of one line of the grid, and the column of each task."""
    cells: list[str] = []
    columns: dict[Task, int] = {}
    for task in row:
        if task in times and task not in columns:
            start, end = (int(time) for time in times[task])
            cells += ["."] * (start - len(cells))
            columns[task] = len(cells)
            cells += [_label(task, schedule), *["-"] * (end - start - 1)]
        else:
            if "?" not in cells:
                cells.append("?")
            columns[task] = len(cells)
            cells.append(_label(task, schedule))
    return cells, columns


def _label(task: Task, schedule: Schedule) -> str:
    chunk = task.stage // schedule.num_meshes
    letter = chr(ord("a") + chunk) if chunk < 26 else f"/{chunk}"
    return f"{LETTERS[task.kind]}{task.microbatch}{letter if schedule.virtual_stages > 1 else ''}"
