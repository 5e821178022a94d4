"""Schedules as data: who runs what when, and what the bubble is.

`golden/schedules.txt` shows the grids. After a change that is meant, write it anew with
`AUTOPAR_WRITE_GOLDEN=1 python -m pytest tests/schedules/test_schedules.py -k golden` and read the difference.
"""

import ast
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

import autopar
from autopar.errors import ScheduleError
from autopar.schedules.check_schedule import check_schedule
from autopar.schedules.grid import draw_grid
from autopar.schedules.in_flight import microbatches_in_flight
from autopar.schedules.schedules import (
    NAMED_SCHEDULES,
    TRAINING,
    keeps_least,
    make_schedule,
    most_in_flight,
    most_together,
)
from autopar.schedules.tasks import Task, dependencies, task_times
from tests.schedules.chains import small_schedules

GOLDEN = Path(__file__).parents[1] / "golden" / "schedules.txt"
DURATIONS = {"forward": 1, "backward": 2, "input_gradient": 1, "weight_gradient": 1}
SHOWN = {
    "one": ((4, 8, 1), (4, 2, 1)),
    "several": ((4, 8, 2), (2, 4, 3)),
    "any": ((4, 8, 1), (2, 3, 2)),
}
"""Meshes, microbatches and chunks of the grids in the golden file, by how many chunks a mesh may have."""


def test_the_grids_are_those_of_the_golden_file():
    blocks = []
    shown = [(name, *sizes) for name, known in NAMED_SCHEDULES.items() for sizes in SHOWN[known.chunks]]
    for name, p, m, v in shown:
        schedule = make_schedule(name, num_meshes=p, num_microbatches=m, virtual_stages=v)
        title = f"{name}, {p} meshes, {m} microbatches" + (f", {v} chunks per mesh" if v > 1 else "")
        flights = ", ".join(map(str, microbatches_in_flight(schedule)))
        blocks.append(f"{title}\n{draw_grid(schedule, DURATIONS)}in flight per stage: {flights}\n")
    text = "\n".join(blocks)
    if os.environ.get("AUTOPAR_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_every_small_schedule_is_complete_ordered_and_free_of_deadlock():
    for schedule in small_schedules(max_meshes=6, max_microbatches=12, max_virtual=3):
        check_schedule(schedule)


def test_every_stage_takes_the_backwards_in_the_order_of_microbatches():
    for schedule in small_schedules():
        for row in schedule.rows:
            for kind in schedule.kinds:
                for stage in range(schedule.num_stages):
                    order = [task.microbatch for task in row if (task.kind, task.stage) == (kind, stage)]
                    assert order == sorted(order), (schedule.name, kind, stage)


def test_tasks_start_when_their_mesh_is_free_and_their_needs_are_met_and_not_later():
    for schedule in small_schedules(max_meshes=3, max_microbatches=4):
        times = task_times(schedule, lambda task: DURATIONS[task.kind])
        split = "input_gradient" in schedule.kinds
        for row in schedule.rows:
            free_at = 0
            for task in row:
                needs = dependencies(task, num_stages=schedule.num_stages, split=split)
                assert times[task][0] == max([free_at, *(times[need][1] for need in needs)])
                free_at = times[task][1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", lambda p, m, stage: m),
        ("1f1b", lambda p, m, stage: min(m, p - stage)),
        ("eager-1f1b", lambda p, m, stage: min(m, 2 * (p - stage) - 1)),
        ("zb-h1", lambda p, m, stage: min(m, p)),
        ("inference", lambda p, m, stage: 1),
    ],
)
def test_microbatches_in_flight_are_those_of_the_papers(name, expected):
    for p in range(1, 6):
        for m in range(1, 11):
            schedule = make_schedule(name, num_meshes=p, num_microbatches=m)
            assert microbatches_in_flight(schedule) == tuple(expected(p, m, stage) for stage in range(p)), (p, m)


def most_in_row(row):
    """The most forwards whose last task is not yet done, whichever stages they are of."""
    kinds = {task.kind for task in row}
    last = "weight_gradient" if "weight_gradient" in kinds else "backward" if "backward" in kinds else "forward"
    now = most = 0
    for task in row:
        now += task.kind == "forward"
        most = max(most, now)
        now -= task.kind == last
    return most


def test_what_the_planner_knows_of_a_schedule_is_what_counting_gives():
    for schedule in small_schedules(max_meshes=5, max_microbatches=12, max_virtual=3):
        sizes = {"num_meshes": schedule.num_meshes, "num_microbatches": schedule.num_microbatches}
        known = most_in_flight(schedule.name, virtual_stages=schedule.virtual_stages, **sizes)
        assert known == microbatches_in_flight(schedule), schedule
        together = most_together(schedule.name, virtual_stages=schedule.virtual_stages, **sizes)
        assert together == tuple(map(most_in_row, schedule.rows)), schedule
        assert NAMED_SCHEDULES[schedule.name].is_split == ("weight_gradient" in schedule.kinds)


def test_schedules_that_keep_least_keep_no_more_of_any_stage_than_the_others():
    for p, m in itertools.product(range(1, 6), range(1, 11)):
        kept = {
            name: np.array(most_in_flight(name, num_meshes=p, num_microbatches=m))
            for name, known in NAMED_SCHEDULES.items()
            if known.fewest_chunks == 1
        }
        for least in filter(keeps_least, kept):
            others = [name for name in kept if NAMED_SCHEDULES[name].trains == NAMED_SCHEDULES[least].trains]
            assert all((kept[least] <= kept[name]).all() for name in others), (least, p, m)
    assert any(keeps_least(name) for name in TRAINING)
    assert not keeps_least("gpipe")


def names_compared(source):
    """The schedules' names that a source text compares something with, or looks something up by."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            constants = [part for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)]
            yield from (part.value for part in constants if part.value in NAMED_SCHEDULES)


def test_what_a_schedule_needs_is_asked_of_its_entry_and_not_of_its_name():
    root = Path(autopar.__file__).parent
    found = {}
    for top in sorted(root.iterdir()):
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            if path.suffix == ".py" and (names := list(names_compared(path.read_text()))):
                found[path.relative_to(root).as_posix()] = names
    assert found == {}
    assert list(names_compared("a = way.schedule in ('1f1b', 'x') or schedule == 'gpipe'")) == ["1f1b", "gpipe"]


def test_users_read_the_name_of_every_schedule_in_the_docstring_of_parallelize():
    assert [name for name in NAMED_SCHEDULES if f'`"{name}"`' not in autopar.parallelize.__doc__] == []


def test_interleaving_keeps_as_many_chunk_activations_on_the_first_mesh_as_its_warm_up_says():
    for p, v, rounds in ((2, 2, 3), (4, 2, 3), (4, 3, 2), (3, 4, 3)):
        schedule = make_schedule("interleaved", num_meshes=p, num_microbatches=p * rounds, virtual_stages=v)
        now = peak = 0
        for task in schedule.rows[0]:
            now += 1 if task.kind == "forward" else -1
            peak = max(peak, now)
        assert peak == 2 * (p - 1) + (v - 1) * p + 1


def test_a_wrong_schedule_name_and_wrong_counts_are_reported_together():
    with pytest.raises(ScheduleError) as error:
        make_schedule("2f2b", num_meshes=0, num_microbatches=-3)
    text = str(error.value)
    assert "num_meshes=0: must be at least 1" in text
    assert "num_microbatches=-3: must be at least 1" in text
    assert f"'2f2b' is unknown; there are {', '.join(map(repr, sorted(NAMED_SCHEDULES)))}" in text


def test_interleaving_tells_which_numbers_of_microbatches_would_do():
    with pytest.raises(ScheduleError, match=r"num_microbatches=6 does not divide; use 4 or 8 microbatches, or '1f1b'"):
        make_schedule("interleaved", num_meshes=4, num_microbatches=6, virtual_stages=2)
    with pytest.raises(ScheduleError, match=r"num_microbatches=1 does not divide; use 4 microbatches, or '1f1b'"):
        make_schedule("interleaved", num_meshes=4, num_microbatches=1, virtual_stages=2)


def test_one_chunk_per_mesh_is_nothing_to_interleave_and_several_need_interleaving():
    with pytest.raises(ScheduleError, match="virtual_stages=1 has nothing to interleave; use '1f1b'"):
        make_schedule("interleaved", num_meshes=4, num_microbatches=8)
    with pytest.raises(ScheduleError, match=r"'zb-h1' runs one stage per mesh: virtual_stages=2 is for 'interleaved'"):
        make_schedule("zb-h1", num_meshes=4, num_microbatches=8, virtual_stages=2)


def test_a_task_reads_as_words():
    assert str(Task("input_gradient", 2, 5)) == "input gradient of stage 2, microbatch 5"
