"""Several processes that launch what they share in the order of `order_launches` never wait for each other in vain.

The oracle performs the parts of all processes in the most cautious way: what is shared blocks its thread until every process
that takes part has come to it. It must reach the end, whatever the schedule and whichever processes have the meshes.

`golden/launch_order.txt` shows one program on two meshes of two processes. After a change that is meant, write it anew with
`AUTOPAR_WRITE_GOLDEN=1 python -m pytest tests/schedules/test_launch_order.py -k golden` and read the difference.
"""

import dataclasses
import os
import random
from pathlib import Path

import pytest

from autopar.errors import ScheduleError
from autopar.schedules.chain import make_chain
from autopar.schedules.instructions import Free, InstructionList, Receive, Run, Send, Value
from autopar.schedules.launch_order import check_launch_order, order_launches, part_of
from autopar.schedules.schedules import make_schedule
from tests.schedules.chains import small_schedules

GOLDEN = Path(__file__).parents[1] / "golden" / "launch_order.txt"


def homes(num_meshes, *sets):
    """Processes of each mesh, dealt out in turn."""
    return [frozenset(sets[mesh % len(sets)]) for mesh in range(num_meshes)]


HOMES = [
    ({0}, {1}),
    ({0}, {0}, {1}, {1}),
    ({0, 1},),
    ({0, 1}, {1, 2}),
    ({0}, {0, 1}),
    ({0}, {1}, {2}),
]


class Processes:
    """All processes that perform a program."""

    def __init__(self, program, processes):
        self.program, self.processes = program, processes
        everyone = sorted(set().union(*processes))
        self.parts = {process: part_of(program, processes, process) for process in everyone}
        self.position = {(process, mesh): 0 for process in everyone for mesh in self.parts[process].meshes}
        self.turn = dict.fromkeys(everyone, 0)
        self.come = {}
        self.sent = set()

    def takes_part(self, instruction):
        if isinstance(instruction, Run):
            return self.processes[instruction.mesh]
        return self.processes[instruction.source_mesh] | self.processes[instruction.target_mesh]

    def advance(self, process, mesh):
        """Whether a thread gets anywhere."""
        row, at = self.program.of(mesh), self.position[process, mesh]
        if at == len(row):
            return False
        one, part = row[at], self.parts[process]
        if isinstance(one, Receive) and one.number not in part.remote and (process, one.number) not in self.sent:
            return False
        if (mesh, at) in part.turns:
            if part.turns[self.turn[process]] != (mesh, at):
                return False
            key = ("transfer", one.number) if isinstance(one, Send | Receive) else (mesh, at)
            first = process not in self.come.setdefault(key, set())
            self.come[key].add(process)
            if self.come[key] != self.takes_part(one):
                return first
            self.turn[process] += 1
        if isinstance(one, Send):
            self.sent.add((process, one.number))
        self.position[process, mesh] += 1
        return True

    def reach_the_end(self):
        while any(self.advance(*thread) for thread in self.position):
            pass
        return all(at == len(self.program.of(mesh)) for (_, mesh), at in self.position.items())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sets", HOMES, ids=str)
def test_processes_that_share_meshes_or_transfers_reach_the_end_of_every_schedule(sets):
    for schedule in small_schedules(max_meshes=4, max_microbatches=5, max_virtual=2):
        program = make_chain(schedule).emit()
        processes = homes(schedule.num_meshes, *sets)
        ordered = order_launches(program, processes)
        assert Processes(ordered, processes).reach_the_end(), f"{schedule}\n{ordered}"


def interleaved_anew(program, draw):
    """The same instructions, each mesh in its own order, in another valid global order."""
    rows = [list(program.of(mesh)) for mesh in range(program.num_meshes)]
    sent, found = set(), []
    while any(rows):
        ready = [row for row in rows if row and not (isinstance(row[0], Receive) and row[0].number not in sent)]
        found.append(draw.choice(ready).pop(0))
        if isinstance(found[-1], Send):
            sent.add(found[-1].number)
    return dataclasses.replace(program, instructions=tuple(found))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sets", HOMES, ids=str)
def test_the_order_is_the_same_however_the_list_interleaves_the_meshes(sets):
    draw = random.Random(0)
    for schedule in small_schedules(max_meshes=4, max_microbatches=4, max_virtual=2):
        program = make_chain(schedule).emit()
        processes = homes(schedule.num_meshes, *sets)
        ordered = str(order_launches(program, processes))
        for _ in range(3):
            assert str(order_launches(interleaved_anew(program, draw), processes)) == ordered, str(schedule)


def test_the_order_is_that_of_the_golden_file():
    """A forward takes one unit of time, a backward two; at one time transfers come before runs, lower meshes before higher."""
    program = make_chain(make_schedule("1f1b", num_meshes=2, num_microbatches=3)).emit()
    text = str(order_launches(program, homes(2, {0}, {1})))
    if os.environ.get("AUTOPAR_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_every_mesh_does_the_same_in_the_same_order_but_for_earlier_receives():
    program = make_chain(make_schedule("1f1b", num_meshes=4, num_microbatches=6)).emit()
    ordered = order_launches(program, homes(4, {0}, {1}))
    for mesh in range(4):
        before, after = ([i for i in p.of(mesh) if not isinstance(i, Receive)] for p in (program, ordered))
        assert after == before
    assert sorted(map(str, ordered.instructions)) == sorted(map(str, program.instructions))


def test_a_mesh_passes_a_microbatch_on_before_it_takes_up_the_next():
    """The transfer of x1@0 needs both meshes: it is over before mesh 0 begins with microbatch 1."""
    program = make_chain(make_schedule("gpipe", num_meshes=2, num_microbatches=3)).emit()
    lines = [str(i) for i in order_launches(program, homes(2, {0}, {1})).instructions]
    sent = lines.index("send x1@0 to mesh 1 (transfer 0)")
    assert lines[sent + 1] == "receive x1@0 from mesh 0 (transfer 0)"
    assert [line[:14] for line in lines[:sent] if line.startswith("run")] == ["run forward0@0"]


def test_a_mesh_takes_what_is_ready_before_it_begins_something_long():
    """At time 2 mesh 0 has made x1@1 and mesh 1 can begin a backward: mesh 0 is not kept waiting for the end of that."""
    program = make_chain(make_schedule("1f1b", num_meshes=2, num_microbatches=4)).emit()
    lines = [str(i) for i in order_launches(program, homes(2, {0}, {1})).instructions]
    backward = next(n for n, line in enumerate(lines) if line.startswith("run backward1@0"))
    assert lines.index("send x1@1 to mesh 1 (transfer 1)") < backward


def test_transfers_within_one_process_stay_where_they_were():
    program = make_chain(make_schedule("1f1b", num_meshes=3, num_microbatches=4)).emit()
    assert part_of(program, homes(3, {0}), 0).turns == ()
    rows = [order_launches(program, homes(3, {0})).of(mesh) for mesh in range(3)]
    assert rows == [program.of(mesh) for mesh in range(3)]


def test_the_order_of_one_process_would_let_two_wait_for_each_other():
    program = make_chain(make_schedule("1f1b", num_meshes=2, num_microbatches=4)).emit()
    with pytest.raises(
        ScheduleError, match=r"`receive .*` of mesh \d, does not follow its send at once: meshes 0 and 1"
    ):
        check_launch_order(program, homes(2, {0}, {1}))
    assert not Processes(program, homes(2, {0}, {1})).reach_the_end()


def test_a_process_takes_turns_only_in_what_others_launch_too():
    program = order_launches(
        make_chain(make_schedule("gpipe", num_meshes=4, num_microbatches=2)).emit(), homes(4, {0}, {0}, {1}, {1})
    )
    part = part_of(program, homes(4, {0}, {0}, {1}, {1}), 1)
    assert part.meshes == (2, 3)
    shared = [program.of(mesh)[at] for mesh, at in part.turns]
    assert {(i.source_mesh, i.target_mesh) for i in shared} == {(1, 2), (2, 1)}
    assert part.remote == {i.number for i in shared if isinstance(i, Receive)}


def test_a_transfer_that_waits_for_what_waits_for_it_is_refused():
    """Mesh 1 lets go of x when it has y, which mesh 0 makes of the old x after it has sent the new one."""
    x, y = Value("x"), Value("y")
    run = {"kind": "epilogue", "stage": 0, "microbatch": None}
    program = InstructionList(
        num_meshes=2,
        instructions=(
            Run(mesh=0, task="make", reads=(), writes=(x,), **run),
            Send(x, 0, 1, 0),
            Run(mesh=0, task="more", reads=(x,), writes=(y,), **run),
            Send(y, 0, 1, 1),
            Free(x, 0),
            Free(y, 0),
            Receive(y, 0, 1, 1),
            Run(mesh=1, task="use", reads=(y, x), writes=(), **run),
            Free(y, 1),
            Free(x, 1),
            Receive(x, 0, 1, 0),
            Free(x, 1),
        ),
        inputs=((1, x),),
        outputs=(),
        consumable=frozenset({(1, x)}),
    )
    with pytest.raises(
        ScheduleError, match=r"`send x to mesh 1 \(transfer 0\)` of mesh 0 has to wait for an older version"
    ):
        order_launches(program, homes(2, {0}, {1}))
