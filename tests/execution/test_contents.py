"""The names of slots say where arrays come from and who reads them, each in its own words."""

import itertools

from autopar.execution.contents import Given, Lent, Made, Passed, Results, Rows, Sums
from autopar.program.task_name import TaskName

TASKS = [TaskName("prologue", 1), TaskName("forward", 1), TaskName("backward", 11), TaskName("update", 1, 1)]
SOURCES = [*map(Made, TASKS), Given(), Rows(), Lent(1), Lent(11)]


def test_slots_are_named_by_source_and_readers():
    assert str(Passed(Made(TASKS[1]), (TASKS[2],))) == "forward 1 > backward 11"
    assert str(Passed(Lent(3), (TASKS[1], TASKS[3]))) == "lent by 3 > forward 1, update 1.1"
    assert str(Passed(Given(), (TASKS[0],))) == "given > prologue 1"
    assert str(Passed(Rows(), (TASKS[1],))) == "rows > forward 1"
    assert [str(Sums(TASKS[2])), str(Results(TASKS[3]))] == ["sums of backward 11", "results of update 1.1"]


def test_different_slots_have_different_names():
    readers = [*itertools.permutations(TASKS, 1), *itertools.permutations(TASKS, 2)]
    contents = [Passed(source, several) for source in SOURCES for several in readers]
    contents += [make(task) for make in (Sums, Results) for task in TASKS]
    assert len(set(contents)) == len({str(content) for content in contents}) == len(contents)
