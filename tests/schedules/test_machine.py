"""The state machine of one mesh: what is ready, and which events cannot happen."""

import pytest

from autopar.schedules.instructions import Free, Receive, Run, Value
from autopar.schedules.machine import TRANSITIONS, MachineError, MeshMachine

A = Value("a", 3)
RUN = Run(mesh=1, task="task", kind="forward", stage=1, microbatch=3, reads=(A,), writes=())
ROW = (Receive(A, 0, 1, 7), RUN, Free(A, 1))


def test_a_receive_is_ready_when_its_transfer_has_arrived_and_everything_else_at_once():
    machine = MeshMachine(ROW)
    assert machine.ready() is None
    machine.arrived(7)
    for position in range(3):
        assert machine.ready() == position
        machine.start()
        assert machine.ready() is None
        machine.finish()
    assert machine.finished
    assert machine.ready() is None


def test_a_mesh_without_instructions_is_finished():
    assert MeshMachine(()).finished


def test_the_table_says_what_follows_what():
    assert {f"{state} {event} {then}" for (state, event), then in TRANSITIONS.items()} == {
        "running fail failed",
        "running finish done",
        "running stop stopped",
        "waiting start running",
        "waiting stop stopped",
    }


def test_starting_before_the_transfer_arrives_raises_with_the_place():
    with pytest.raises(
        MachineError, match=r"start: no instruction is ready; at instruction 0 of 3, `receive a@3 from mesh 0"
    ):
        MeshMachine(ROW).start()


def test_a_transfer_that_is_for_another_mesh_or_comes_twice_raises():
    machine = MeshMachine(ROW)
    with pytest.raises(MachineError, match="transfer 8 is not for this mesh"):
        machine.arrived(8)
    machine.arrived(7)
    with pytest.raises(MachineError, match="transfer 7 arrived before"):
        machine.arrived(7)


def test_an_impossible_event_raises_with_the_history():
    machine = MeshMachine(ROW)
    machine.arrived(7)
    machine.start()
    machine.finish()
    with pytest.raises(MachineError, match="finish: not possible while waiting; at instruction 1 of 3") as error:
        machine.finish()
    assert "latest events: arrived 7, start 0, finish 0" in str(error.value)


@pytest.mark.parametrize("end", ["fail", "stop"])
def test_nothing_starts_after_a_failure_or_a_stop(end):
    machine = MeshMachine(ROW[1:])
    machine.start()
    getattr(machine, end)()
    assert machine.ready() is None
    for event in (machine.start, machine.finish, machine.fail, machine.stop):
        with pytest.raises(MachineError):
            event()
    assert not machine.finished
