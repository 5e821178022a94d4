"""Pipeline schedules as data: which mesh runs which task in which order.

In: the number of meshes p, of microbatches m, and of virtual stages v (model chunks per mesh). Out: a `Schedule`, one row
of tasks per mesh. The model is cut into p*v chunks; chunk s lives on mesh s % p. A mesh runs its row strictly in order and
waits in front of a task until what the task needs has arrived; time is not part of a schedule.

Backward tasks of one chunk always run in the order of microbatches, in every schedule: gradients are summed in one order,
so a change of schedule does not change a bit of the result.

What can go wrong: rows that wait for each other. `autopar.schedules.check` proves that they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from autopar.errors import ScheduleError

TaskKind = Literal["forward", "backward", "input_gradient", "weight_gradient"]
ScheduleName = Literal["1f1b", "gpipe", "inference", "interleaved", "zb-h1"]
Open: TypeAlias = Literal["auto"] | int
"""A number that the user gave, or left to the planner."""
Recompute: TypeAlias = Literal["auto", "none", "layer"]
"""What the backward pass computes again: what the planner decides, nothing, or the forward work of each layer or stage."""

LETTERS: Mapping[TaskKind, str] = {"forward": "F", "backward": "B", "input_gradient": "B", "weight_gradient": "W"}


@dataclass(frozen=True, slots=True)
class Task:
    """One chunk of the model worked on for one microbatch. `stage` is the number of the chunk."""

    kind: TaskKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """As in an error message: "backward of stage 2, microbatch 5"."""
        return f"{self.kind.replace('_', ' ')} of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The tasks of each mesh, in the order in which the mesh runs them."""

    name: str
    num_meshes: int
    num_microbatches: int
    virtual_stages: int
    rows: tuple[tuple[Task, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of model chunks."""
        return self.num_meshes * self.virtual_stages

    @property
    def kinds(self) -> tuple[TaskKind, ...]:
        """The kinds of task that occur, in the order in which one microbatch goes through them."""
        present = {task.kind for row in self.rows for task in row}
        return tuple(kind for kind in get_args(TaskKind) if kind in present)


def make_schedule(name: str, *, num_meshes: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The named schedule.

    "gpipe": all forwards, then all backwards. "1f1b": backwards as early as possible, at most p microbatches in flight.
    "interleaved": 1F1B over v chunks per mesh, whose bubble is v times smaller. "zb-h1": 1F1B whose backward is split, so
    that weight gradients fill the bubble (Qi et al., Zero Bubble Pipeline Parallelism, 2023). "inference": forwards only.

    Raises `ScheduleError` with everything that is wrong with the arguments.
    """
    _check_arguments(name, num_meshes=num_meshes, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    row = _ROWS[name]
    rows = tuple(tuple(row(_Shape(num_meshes, num_microbatches, virtual_stages), mesh)) for mesh in range(num_meshes))
    return Schedule(name, num_meshes, num_microbatches, virtual_stages, rows)


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

    A task that can never start is missing, as are those behind it.
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


def grid(schedule: Schedule, durations: Mapping[TaskKind, int], *, mark: Task | None = None) -> str:
    """The schedule as text, one column per unit of time; `mark` gets an arrow under it.

    F3 is the forward of microbatch 3, B its backward (or input gradient), W its weight gradient; with several chunks per
    mesh a letter follows, a for the first chunk of the mesh. A mesh whose next task can never start ends in "?" and the
    tasks that wait behind it.
    """
    times = task_times(schedule, lambda task: durations[task.kind])
    width = max((len(_label(task, schedule)) for row in schedule.rows for task in row), default=1) + 1
    lines = []
    for mesh, row in enumerate(schedule.rows):
        cells, columns = _cells(row, times, schedule)
        head = f"mesh {mesh} | "
        lines.append((head + "".join(cell.ljust(width) for cell in cells)).rstrip())
        if mark is not None and mark in columns:
            lines.append(" " * (len(head) + width * columns[mark]) + "^ here")
    return "\n".join(lines) + "\n"


def _cells(
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


@dataclass(frozen=True)
class _Shape:
    """p meshes, m microbatches, v chunks per mesh."""

    p: int
    m: int
    v: int


def _gpipe(shape: _Shape, mesh: int) -> Iterator[Task]:
    stages = range(mesh, shape.p * shape.v, shape.p)
    for stage in stages:
        yield from (Task("forward", stage, k) for k in range(shape.m))
    for stage in reversed(stages):
        yield from (Task("backward", stage, k) for k in range(shape.m))


def _inference(shape: _Shape, mesh: int) -> Iterator[Task]:
    """A mesh works through all its chunks for p microbatches, then for the next p: few activations are kept."""
    for first in range(0, shape.m, shape.p):
        for stage in range(mesh, shape.p * shape.v, shape.p):
            yield from (Task("forward", stage, k) for k in range(first, min(first + shape.p, shape.m)))


def _one_f_one_b(shape: _Shape, mesh: int) -> Iterator[Task]:
    """Mesh i starts with as many forwards as there are meshes behind it, then alternates, then drains."""
    warm_up = min(shape.p - 1 - mesh, shape.m)
    yield from (Task("forward", mesh, k) for k in range(warm_up))
    for k in range(shape.m):
        if k + warm_up < shape.m:
            yield Task("forward", mesh, k + warm_up)
        yield Task("backward", mesh, k)


def _zb_h1(shape: _Shape, mesh: int) -> Iterator[Task]:
    """1F1B whose mesh i holds back weight gradients by i microbatches.

    So cotangents reach the first meshes earlier, and the held-back work fills the time at the end in which 1F1B waits.
    No mesh keeps more than p microbatches, which is what the first mesh of 1F1B keeps.
    With m >= p the bubble is (p - 1)(tF + tB - min(tF, tB, tW)); the paper gives it for the usual case, tW the shortest.
    """
    warm_up = min(shape.p - 1 - mesh, shape.m)
    yield from (Task("forward", mesh, k) for k in range(warm_up))
    for k in range(shape.m):
        if k + warm_up < shape.m:
            yield Task("forward", mesh, k + warm_up)
        yield Task("input_gradient", mesh, k)
        if k >= mesh:
            yield Task("weight_gradient", mesh, k - mesh)
    yield from (Task("weight_gradient", mesh, k) for k in range(max(0, shape.m - mesh), shape.m))


def _interleaved(shape: _Shape, mesh: int) -> Iterator[Task]:
    """1F1B over chunks: p microbatches go through chunk 0 of all meshes, then the same through chunk 1, and so on.

    Warm-up of mesh i: 2 (p - 1 - i) + (v - 1) p forwards (Narayanan et al., Efficient Large-Scale Language Model
    Training, 2021).
    """
    total = shape.m * shape.v
    warm_up = min(total, 2 * (shape.p - 1 - mesh) + (shape.v - 1) * shape.p)
    yield from (Task("forward", *_chunk(shape, mesh, number=n)) for n in range(warm_up))
    for n in range(total):
        if n + warm_up < total:
            yield Task("forward", *_chunk(shape, mesh, number=n + warm_up))
        stage, k = _chunk(shape, mesh, number=n)
        yield Task("backward", 2 * mesh + (shape.v - 1) * shape.p - stage, k)


def _chunk(shape: _Shape, mesh: int, *, number: int) -> tuple[int, int]:
    """Stage and microbatch of a mesh's `number`-th forward under interleaving."""
    round_, within = divmod(number, shape.p * shape.v)
    chunk, k = divmod(within, shape.p)
    return chunk * shape.p + mesh, round_ * shape.p + k


_ROWS: Mapping[str, Callable[[_Shape, int], Iterator[Task]]] = {
    "1f1b": _one_f_one_b,
    "gpipe": _gpipe,
    "inference": _inference,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
}
SCHEDULES = tuple(_ROWS)
"""The names that `make_schedule` knows."""


def _check_arguments(name: str, *, num_meshes: int, num_microbatches: int, virtual_stages: int) -> None:
    counts = {"num_meshes": num_meshes, "num_microbatches": num_microbatches, "virtual_stages": virtual_stages}
    wrong = [f"{argument}={count}: must be at least 1" for argument, count in counts.items() if count < 1]
    if name not in _ROWS:
        wrong.append(f"schedule {name!r} is unknown; there are {', '.join(map(repr, sorted(_ROWS)))}")
    if name in ("1f1b", "zb-h1") and virtual_stages > 1:
        wrong.append(
            f"schedule {name!r} runs one chunk per mesh, not virtual_stages={virtual_stages}; use 'interleaved'"
        )
    if name == "interleaved" and virtual_stages == 1:
        wrong.append(
            "schedule 'interleaved' with virtual_stages=1 has nothing to interleave; use '1f1b', or two or more"
        )
    if name == "interleaved" and num_meshes > 0 and num_microbatches % num_meshes:
        below = num_microbatches // num_meshes * num_meshes
        either = f"{below} or {below + num_meshes}" if below else f"{num_meshes}"
        wrong.append(
            f"schedule 'interleaved' sends microbatches round {num_meshes} meshes in groups of {num_meshes}, and "
            f"num_microbatches={num_microbatches} does not divide; use {either} microbatches, or '1f1b' with any number"
        )
    if wrong:
        raise ScheduleError("This pipeline schedule does not exist:\n" + "\n".join(f"  - {line}" for line in wrong))
