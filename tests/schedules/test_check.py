"""What the proofs refuse, and how they show it."""

import dataclasses

import pytest

from autopar.errors import ScheduleError
from autopar.schedules.chain import chain
from autopar.schedules.check import check_instructions, check_schedule
from autopar.schedules.instructions import Free, InstructionList, Receive, Run, Send, Value
from autopar.schedules.schedules import Schedule, Task, make_schedule
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
    bad = Schedule("mine", 1, 1, 1, ((Task("forward", 0, 0), Task("input_gradient", 0, 0)),))
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
        check_schedule(Schedule("mine", 2, 2, 1, rows))
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


A, B = Value("a"), Value("b")


def books(*instructions, inputs=((0, A),), outputs=(), consumable=((0, A),), meshes=2):
    check_instructions(InstructionList(meshes, instructions, tuple(inputs), tuple(outputs), frozenset(consumable)))


def run(reads, writes, *, donated=(), mesh=0):
    return Run(mesh, "task", "forward", 0, None, tuple(reads), tuple(writes), donated)


@pytest.mark.parametrize(
    ("instructions", "words"),
    [
        ((run([B], []),), "b does not exist on mesh 0: not produced yet, or freed or donated before"),
        ((Free(A, 0), run([A], [])), "a does not exist on mesh 0"),
        ((run([A], [], donated=(0,)), run([A], [])), "a does not exist on mesh 0"),
        ((Free(A, 0), Free(A, 0)), "a does not exist on mesh 0"),
        ((run([], [A]), Free(A, 0)), "a still exists on mesh 0 and would be overwritten"),
        ((Send(B, 0, 1, 0), Free(A, 0)), "b does not exist on mesh 0"),
        ((Send(A, 0, 0, 0), Free(A, 0)), "a mesh does not send to itself"),
        ((Send(A, 0, 1, 0), Send(A, 0, 1, 0)), "transfer 0 was sent before"),
        ((Receive(A, 0, 1, 0),), "transfer 0 has not been sent, or was received before"),
        ((Send(A, 0, 1, 0), Receive(B, 0, 1, 0)), "transfer 0 was `send a to mesh 1"),
        ((Send(A, 0, 1, 0), Send(A, 0, 1, 1), Receive(A, 0, 1, 0), Receive(A, 0, 1, 1)), "a still exists on mesh 1"),
        ((Send(A, 0, 1, 0), Free(A, 0)), r"Transfer 0, `send a to mesh 1 \(transfer 0\)` of mesh 0, is never received"),
        ((), "a is never freed on mesh 0"),
    ],
)
def test_books_that_do_not_balance_are_refused(instructions, words):
    with pytest.raises(ScheduleError, match=words):
        books(*instructions)


def test_what_must_survive_is_neither_freed_nor_donated():
    with pytest.raises(ScheduleError, match="a is an input that must survive the step"):
        books(Free(A, 0), consumable=())
    with pytest.raises(ScheduleError, match="a is donated, and it is an input that must survive the step"):
        books(run([A], [], donated=(0,)), consumable=())


def test_an_output_has_to_exist_and_an_input_is_listed_once():
    with pytest.raises(ScheduleError, match="Output b does not exist on mesh 1 after the last instruction"):
        books(Free(A, 0), outputs=[(1, B)])
    with pytest.raises(ScheduleError, match="Input a is listed twice for mesh 0"):
        books(inputs=[(0, A), (0, A)])


def test_two_meshes_that_wait_for_each_other_are_refused():
    """In the global order every receive follows its send; each mesh alone would wait."""
    program = chain(make_schedule("gpipe", num_meshes=2, num_microbatches=1)).emit()
    check_instructions(program)
    late = [i for i in program.instructions if isinstance(i, Receive) and i.mesh == 0]
    others = [i for i in program.instructions if i not in late]
    with pytest.raises(ScheduleError, match="has not been sent"):
        check_instructions(dataclasses.replace(program, instructions=(*late, *others)))


def test_the_culprit_is_shown_with_an_arrow_among_its_neighbours():
    program = chain(make_schedule("1f1b", num_meshes=2, num_microbatches=1)).emit()
    without = [i for i in program.instructions if not (isinstance(i, Receive) and i.mesh == 1)]
    with pytest.raises(ScheduleError) as error:
        check_instructions(dataclasses.replace(program, instructions=tuple(without)))
    assert "->  4 mesh 1: run forward1@0: w1 x1@0 -> x2@0 r1@0\n" in str(error.value)
    assert "    3 mesh 0: free x1@0\n" in str(error.value)


def test_dropping_or_doubling_any_instruction_of_a_program_is_refused():
    program = chain(make_schedule("zb-h1", num_meshes=3, num_microbatches=3)).emit()
    for n, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) and not instruction.writes:
            continue  # nothing in the books depends on a task that writes nothing and consumes nothing
        for replacement in ((), (instruction, instruction)):
            changed = (*program.instructions[:n], *replacement, *program.instructions[n + 1 :])
            with pytest.raises(ScheduleError):
                check_instructions(dataclasses.replace(program, instructions=changed))
