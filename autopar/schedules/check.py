"""Proofs about schedules and instruction lists, before anything runs.

In: a `Schedule` or an `InstructionList`. Out: nothing, or a `ScheduleError` that shows the schedule's grid, or the
instructions around the culprit, with an arrow. A schedule is *complete* (every chunk sees every microbatch once),
*ordered* (no mesh runs a task before one of its own that it needs) and *free of deadlock* (meshes that run their rows in
order never all wait). An instruction list keeps exact books of what exists on each mesh: everything is produced before it
is read, freed exactly once, and never used afterwards. In the global order every receive follows its send; so meshes that
execute their parts in order, with sends that do not wait, reach the end: the earliest instruction that is left can always go.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.schedules.instructions import Free, InstructionList, Receive, Run, Send, Value
from autopar.schedules.schedules import Schedule, Task, TaskKind, dependencies, grid, task_times

CONTEXT_LINES = 6
ALLOWED_KINDS: tuple[tuple[TaskKind, ...], ...] = (
    ("forward",),
    ("forward", "backward"),
    ("forward", "input_gradient", "weight_gradient"),
)


def check_schedule(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless the schedule is complete, ordered and free of deadlock."""
    _check_shape(schedule)
    split = "input_gradient" in schedule.kinds
    for row in schedule.rows:
        place = {task: n for n, task in enumerate(row)}
        for n, task in enumerate(row):
            for need in dependencies(task, num_stages=schedule.num_stages, split=split):
                if place.get(need, -1) > n:
                    raise _bad(schedule, f"the {task} comes before the {need}, which it needs", task)
    _check_deadlock(schedule, split=split)


def microbatches_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, how many microbatches it has to keep residuals of at once.

    A microbatch is in flight from its forward to the end of its backward; with a split backward, of its weight gradient.
    Without a backward nothing is kept, and the count is 1, the microbatch being worked on.
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


def check_instructions(program: InstructionList) -> None:
    """Raise `ScheduleError` unless the books of every mesh balance and every receive follows its send."""
    live: list[set[Value]] = [set() for _ in range(program.num_meshes)]
    for mesh, value in program.inputs:
        if value in live[mesh]:
            raise ScheduleError(f"Input {value} is listed twice for mesh {mesh}.")
        live[mesh].add(value)
    kept = set(program.inputs) - program.consumable
    sent: dict[int, Send] = {}
    for n, instruction in enumerate(program.instructions):
        here = live[instruction.mesh]
        if isinstance(instruction, Run):
            problem = _check_run(instruction, here, kept=kept)
        elif isinstance(instruction, Send):
            problem = _check_send(instruction, here, sent=sent)
        elif isinstance(instruction, Receive):
            problem = _check_receive(instruction, here, sent=sent, kept=kept)
        else:
            problem = _check_free(instruction, here, kept=kept)
        if problem:
            raise ScheduleError(_show(program, n, problem))
    _check_end(program, live, sent=sent, kept=kept)


def _check_shape(schedule: Schedule) -> None:
    """Complete: one row per mesh, every chunk on its mesh, each microbatch once."""
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
    expected = {
        Task(kind, stage, k)
        for kind in kinds
        for stage in range(schedule.num_stages)
        for k in range(schedule.num_microbatches)
    }
    seen: set[Task] = set()
    for mesh, row in enumerate(schedule.rows):
        for task in row:
            if task not in expected:
                sizes = f"{schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
                raise _bad(schedule, f"the {task} does not exist: there are {sizes}", task)
            if task.stage % schedule.num_meshes != mesh:
                home = task.stage % schedule.num_meshes
                raise _bad(schedule, f"the {task} is on mesh {mesh}, its stage lives on mesh {home}", task)
            if task in seen:
                raise _bad(schedule, f"the {task} occurs more than once", task)
            seen.add(task)
    missing = sorted(expected - seen, key=lambda task: (task.stage, task.microbatch, task.kind))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise _bad(schedule, f"the {missing[0]} is missing{more}", None)


def _check_deadlock(schedule: Schedule, *, split: bool) -> None:
    """Follow the waiting from the first stuck mesh until a task comes twice: that is the cycle."""
    times = task_times(schedule, lambda task: 1)
    stuck = [next((task for task in row if task not in times), None) for row in schedule.rows]
    task = next((task for task in stuck if task is not None), None)
    if task is None:
        return
    chain: list[Task] = []
    while task not in chain:
        assert task is not None
        chain.append(task)
        needs = dependencies(task, num_stages=schedule.num_stages, split=split)
        task = stuck[next(need for need in needs if need not in times).stage % schedule.num_meshes]
    assert task is not None
    cycle = chain[chain.index(task) :]
    waits = " waits for what is behind the ".join(f"{task} (mesh {task.stage % schedule.num_meshes})" for task in cycle)
    raise _bad(schedule, f"deadlock: the {waits}, which waits for what is behind the first", task)


def _bad(schedule: Schedule, problem: str, culprit: Task | None) -> ScheduleError:
    durations: dict[TaskKind, int] = {"forward": 1, "backward": 1, "input_gradient": 1, "weight_gradient": 1}
    picture = grid(schedule, durations, mark=culprit)
    return ScheduleError(f"Schedule {schedule.name!r} cannot run: {problem}.\n{picture}")


def _check_run(run: Run, here: set[Value], *, kept: set[tuple[int, Value]]) -> str | None:
    for value in run.reads:
        if value not in here:
            return f"{value} does not exist on mesh {run.mesh}: not produced yet, or freed or donated before"
    for position in run.donated:
        value = run.reads[position]
        if (run.mesh, value) in kept:
            return f"{value} is donated, and it is an input that must survive the step"
        here.discard(value)
    for value in run.writes:
        if value in here and value not in run.reads:
            return f"{value} still exists on mesh {run.mesh} and would be overwritten"
        here.add(value)
        kept.discard((run.mesh, value))
    return None


def _check_send(send: Send, here: set[Value], *, sent: dict[int, Send]) -> str | None:
    if send.value not in here:
        return f"{send.value} does not exist on mesh {send.mesh}: not produced yet, or freed or donated before"
    if send.target_mesh == send.source_mesh:
        return "a mesh does not send to itself"
    if send.number in sent:
        return f"transfer {send.number} was sent before"
    sent[send.number] = send
    return None


def _check_receive(
    receive: Receive, here: set[Value], *, sent: dict[int, Send], kept: set[tuple[int, Value]]
) -> str | None:
    send = sent.pop(receive.number, None)
    if send is None:
        return f"transfer {receive.number} has not been sent, or was received before"
    if (send.value, send.source_mesh, send.target_mesh) != (receive.value, receive.source_mesh, receive.target_mesh):
        return f"transfer {receive.number} was `{send}` of mesh {send.mesh}"
    if receive.value in here and (receive.mesh, receive.value) not in kept:
        return f"{receive.value} still exists on mesh {receive.mesh} and would be overwritten"
    here.add(receive.value)
    kept.discard((receive.mesh, receive.value))
    return None


def _check_free(free: Free, here: set[Value], *, kept: set[tuple[int, Value]]) -> str | None:
    if free.value not in here:
        return f"{free.value} does not exist on mesh {free.mesh}: not produced yet, or freed or donated before"
    if (free.mesh, free.value) in kept:
        return f"{free.value} is an input that must survive the step"
    here.discard(free.value)
    return None


def _check_end(
    program: InstructionList, live: Sequence[set[Value]], *, sent: dict[int, Send], kept: set[tuple[int, Value]]
) -> None:
    """At the end the outputs exist, the inputs that had to survive exist, and nothing else does."""
    for number, send in sent.items():
        raise ScheduleError(f"Transfer {number}, `{send}` of mesh {send.mesh}, is never received.")
    left = {(mesh, value) for mesh, values in enumerate(live) for value in values}
    for mesh, value in program.outputs:
        if (mesh, value) not in left:
            raise ScheduleError(f"Output {value} does not exist on mesh {mesh} after the last instruction.")
    for mesh, value in sorted(left - set(program.outputs) - kept, key=str):
        raise ScheduleError(f"{value} is never freed on mesh {mesh}.")


def _show(program: InstructionList, n: int, problem: str) -> str:
    """The instructions up to the culprit, with an arrow at it."""
    lines = str(program).splitlines()
    first = max(0, n - CONTEXT_LINES)
    shown = (
        [f"   {line}" for line in lines[first:n]] + [f"-> {lines[n]}"] + [f"   {line}" for line in lines[n + 1 : n + 3]]
    )
    return f"Instruction {n} cannot run: {problem}.\n" + "\n".join(shown)
