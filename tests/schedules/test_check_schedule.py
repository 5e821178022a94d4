"""What the proof about schedules refuses, and how it shows it."""

import dataclasses

import pytest

from autopar.errors import ScheduleError
from autopar.schedules.check_schedule import check_schedule
from autopar.schedules.schedules import make_schedule
from autopar.schedules.tasks import Schedule, Task
from tests.schedules.chains import small_schedules


def rows_changed(schedule, change):
    """The schedule with `change` applied to a mutable copy of its rows."""
    rows = [list(row) for row in schedule.rows]
    change(rows)
    return dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))


def swapped(schedule, mesh, first, second):
    def change(rows):
        rows[mesh][first], rows[mesh][second] = rows[mesh][second], rows[mesh][first]

    return rows_changed(schedule, change)


def schedule_of(rows, *, num_microbatches):
    """A schedule of one chunk per mesh that no name stands for."""
    sizes = {"num_meshes": len(rows), "num_microbatches": num_microbatches, "virtual_stages": 1}
    return Schedule(name="mine", rows=rows, **sizes)


ONE_F = make_schedule("1f1b", num_meshes=2, num_microbatches=3)


def test_a_missing_task_is_named():
    bad = rows_changed(ONE_F, lambda rows: rows[1].pop())
    with pytest.raises(ScheduleError, match="the backward of stage 1, microbatch 2 is missing"):
        check_schedule(bad)


def test_a_task_that_occurs_twice_is_named_with_an_arrow():
    bad = rows_changed(ONE_F, lambda rows: rows[0].append(rows[0][0]))
    with pytest.raises(ScheduleError, match=r"forward of stage 0, microbatch 0 occurs more than once(.|\n)*\^ here"):
        check_schedule(bad)


def test_a_task_on_a_mesh_where_its_stage_does_not_live_is_named():
    bad = rows_changed(ONE_F, lambda rows: rows[0].append(rows[1].pop()))
    with pytest.raises(
        ScheduleError, match="backward of stage 1, microbatch 2 is on mesh 0, its stage lives on mesh 1"
    ):
        check_schedule(bad)


def test_a_task_beyond_the_sizes_is_named():
    bad = rows_changed(ONE_F, lambda rows: rows[0].append(Task("forward", 0, 3)))
    with pytest.raises(ScheduleError, match="microbatch 3 does not exist: there are 2 stages, 3 microbatches"):
        check_schedule(bad)


def test_kinds_that_do_not_make_a_step_are_refused():
    bad = schedule_of(((Task("forward", 0, 0), Task("input_gradient", 0, 0)),), num_microbatches=1)
    with pytest.raises(ScheduleError, match="tasks of the kinds forward, input_gradient; it needs forwards"):
        check_schedule(bad)


def test_a_schedule_needs_a_row_for_every_mesh():
    with pytest.raises(ScheduleError, match="has 1 rows for 2 meshes"):
        check_schedule(dataclasses.replace(ONE_F, rows=ONE_F.rows[:1]))


def test_a_backward_before_its_forward_is_shown_in_the_grid():
    bad = swapped(ONE_F, 1, 0, 1)
    with pytest.raises(ScheduleError) as error:
        check_schedule(bad)
    assert str(error.value) == (
        "Schedule '1f1b' cannot run: the backward of stage 1, microbatch 0 comes before the forward of stage 1, "
        "microbatch 0, which it needs.\n"
        "mesh 0 | F0 F1 ?  B0 F2 B1 B2\n"
        "mesh 1 | ?  B0 F0 F1 B1 F2 B2\n"
        "            ^ here\n"
    )


def test_a_deadlock_is_shown_as_the_circle_of_waiting():
    rows = (
        (Task("forward", 0, 0), Task("backward", 0, 0), Task("forward", 0, 1), Task("backward", 0, 1)),
        (Task("forward", 1, 0), Task("forward", 1, 1), Task("backward", 1, 0), Task("backward", 1, 1)),
    )
    with pytest.raises(ScheduleError) as error:
        check_schedule(schedule_of(rows, num_microbatches=2))
    assert str(error.value) == (
        "Schedule 'mine' cannot run: deadlock: the backward of stage 0, microbatch 0 (mesh 0) waits for what is behind "
        "the forward of stage 1, microbatch 1 (mesh 1), which waits for what is behind the first.\n"
        "mesh 0 | F0 ?  B0 F1 B1\n"
        "               ^ here\n"
        "mesh 1 | .  F0 ?  F1 B0 B1\n"
    )


def test_every_swap_of_neighbours_is_either_harmless_or_refused():
    """A swap is refused exactly if some order of single steps cannot finish."""
    for schedule in small_schedules(max_meshes=3, max_microbatches=4, max_virtual=2):
        for mesh, row in enumerate(schedule.rows):
            for n in range(len(row) - 1):
                changed = swapped(schedule, mesh, n, n + 1)
                if finishes(changed):
                    check_schedule(changed)
                else:
                    with pytest.raises(ScheduleError, match=r"\^ here"):
                        check_schedule(changed)


def finishes(schedule):
    """Independent of the package: repeat single tasks whose needs are done."""
    done, split = set(), "input_gradient" in schedule.kinds
    rows = [list(row) for row in schedule.rows]

    def needs(task):
        s, k = task.stage, task.microbatch
        if task.kind == "forward":
            return {("forward", s - 1, k)} if s else set()
        if task.kind == "weight_gradient":
            return {("input_gradient", s, k)}
        later = {("input_gradient" if split else "backward", s + 1, k)} if s + 1 < schedule.num_stages else set()
        return {("forward", s, k)} | later

    while True:
        ready = [row for row in rows if row and needs(row[0]) <= done]
        if not ready:
            return not any(rows)
        task = ready[0].pop(0)
        done.add((task.kind, task.stage, task.microbatch))
