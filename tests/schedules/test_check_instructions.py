"""What the proof about instruction lists refuses, and how it shows it."""

import dataclasses

import pytest

from autopar.errors import ScheduleError
from autopar.schedules.chain import make_chain
from autopar.schedules.check_instructions import check_instructions
from autopar.schedules.instructions import Free, InstructionList, Receive, Run, Send, Value
from autopar.schedules.schedules import make_schedule

A, B = Value("a"), Value("b")


def books(*instructions, inputs=((0, A),), outputs=(), consumable=((0, A),), meshes=2):
    program = InstructionList(
        num_meshes=meshes,
        instructions=instructions,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        consumable=frozenset(consumable),
    )
    check_instructions(program)


def run(reads, writes, *, donated=(), mesh=0):
    place = {"mesh": mesh, "kind": "forward", "stage": 0, "microbatch": None}
    return Run(task="task", reads=tuple(reads), writes=tuple(writes), donated=donated, **place)


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


def test_a_transfer_is_received_from_the_mesh_that_sent_it():
    with pytest.raises(ScheduleError, match="transfer 0 was `send a to mesh 2"):
        books(Send(A, 0, 2, 0), Receive(A, 1, 2, 0), Free(A, 2), Free(A, 0), meshes=3)


def test_an_input_that_must_survive_gives_its_name_to_a_copy_that_is_freed_like_any_other():
    both = {"inputs": ((0, A), (1, A)), "consumable": ((0, A),)}
    transfer = (Send(A, 0, 1, 0), Receive(A, 0, 1, 0), Free(A, 0))
    books(*transfer, Free(A, 1), **both)
    with pytest.raises(ScheduleError, match="a is never freed on mesh 1"):
        books(*transfer, **both)


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
    program = make_chain(make_schedule("gpipe", num_meshes=2, num_microbatches=1)).emit()
    check_instructions(program)
    late = [i for i in program.instructions if isinstance(i, Receive) and i.mesh == 0]
    others = [i for i in program.instructions if i not in late]
    with pytest.raises(ScheduleError, match="has not been sent"):
        check_instructions(dataclasses.replace(program, instructions=(*late, *others)))


def test_the_culprit_is_shown_with_an_arrow_among_its_neighbours():
    program = make_chain(make_schedule("1f1b", num_meshes=2, num_microbatches=1)).emit()
    without = [i for i in program.instructions if not (isinstance(i, Receive) and i.mesh == 1)]
    with pytest.raises(ScheduleError) as error:
        check_instructions(dataclasses.replace(program, instructions=tuple(without)))
    assert "->  4 mesh 1: run forward1@0: w1 x1@0 -> x2@0 r1@0\n" in str(error.value)
    assert "    3 mesh 0: free x1@0\n" in str(error.value)


def test_dropping_or_doubling_any_instruction_of_a_program_is_refused():
    program = make_chain(make_schedule("zb-h1", num_meshes=3, num_microbatches=3)).emit()
    for n, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) and not instruction.writes:
            continue  # nothing in the books depends on a task that writes nothing and consumes nothing
        for replacement in ((), (instruction, instruction)):
            changed = (*program.instructions[:n], *replacement, *program.instructions[n + 1 :])
            with pytest.raises(ScheduleError):
                check_instructions(dataclasses.replace(program, instructions=changed))
