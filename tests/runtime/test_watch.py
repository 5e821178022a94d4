"""Failures are told to the other processes, once, and nobody waits on."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import PipelineError
from autopar.runtime import mesh_threads
from autopar.runtime.processes import wait_until_ready
from autopar.runtime.tuning import TUNING, Tuning
from autopar.runtime.watch import MAX_NOTE, Watch
from tests.process_table import Table

TOGETHER = "The step runs on processes 0, 3 together, and they are out of step"


class Slow:
    """An array that is computed after some time."""

    def __init__(self, seconds):
        self.ready_at = time.monotonic() + seconds
        self.looks = 0

    def is_ready(self):
        self.looks += 1
        return time.monotonic() >= self.ready_at

    def block_until_ready(self):
        return self


@pytest.mark.parametrize("others_end", [True, False])
def test_at_exit_a_thread_that_was_left_behind_is_waited_for_until_the_others_end_or_for_a_while(
    others_end, monkeypatch
):
    released = threading.Event()
    stuck = threading.Thread(target=released.wait, daemon=True)
    stuck.start()
    monkeypatch.setattr(mesh_threads, "TUNING", Tuning(exit_s=30.0, longest_exit_s=30.0 if others_end else 0.05))
    monkeypatch.setattr(jax.distributed, "shutdown", released.set if others_end else lambda: None)
    mesh_threads._wait_at_exit([stuck])
    assert stuck.is_alive() == (not others_end)
    released.set()
    stuck.join()


def test_nothing_is_refused_before_a_failure():
    watch = Watch((3, 0), Table())
    watch.look()
    watch.refuse_if_lost()
    watch.wait([jnp.ones(3)])


def test_a_failure_is_told_by_its_first_line_to_all_who_look_and_refused_afterwards():
    table = Table()
    here, there = Watch((0, 3), table), Watch((3, 0), table)
    here.post(ValueError("broken\nin detail"))
    for raises in (here.refuse_if_lost, there.look, there.refuse_if_lost):
        with pytest.raises(PipelineError) as caught:
            raises()
        assert str(caught.value).startswith(f"process 0 failed: ValueError: broken\n{TOGETHER}")


def test_of_several_failures_the_first_counts():
    watch = Watch((0, 3), Table())
    watch.post(ValueError("first"))
    watch.post(ValueError("second"))
    with pytest.raises(PipelineError, match="ValueError: first"):
        watch.refuse_if_lost()


def test_what_was_heard_is_not_told_again():
    table = Table()
    table.entries["autopar/failed/0-3/3"] = b"process 3 failed: broken"
    watch = Watch((0, 3), table)
    with pytest.raises(PipelineError, match="process 3 failed: broken") as caught:
        watch.look()
    watch.post(caught.value)
    assert list(table.entries.values()) == [b"process 3 failed: broken"]


def test_a_long_note_is_cut_and_one_of_other_processes_is_not_heard():
    table = Table()
    Watch((0, 3), table).post(ValueError("x" * 2 * MAX_NOTE))
    assert [len(note) for note in table.entries.values()] == [MAX_NOTE]
    Watch((0, 30), table).look()


def test_a_second_step_of_a_process_that_has_told_a_failure_tells_it_again_without_an_error():
    """The note is there already: both steps run on the same processes."""
    table = Table()
    for words in ("first", "second"):
        Watch((0, 3), table).post(ValueError(words))
    assert list(table.entries.values()) == [b"process 0 failed: ValueError: first"]


def test_who_waits_looks_for_notes():
    table = Table()
    watch = Watch((0, 3), table)
    table.entries["autopar/failed/0-3/3"] = b"process 3 failed: broken"
    with pytest.raises(PipelineError, match="process 3 failed: broken"):
        watch.wait([Slow(3 * TUNING.look_s)])


def test_an_array_that_needs_longer_than_a_look_is_waited_for():
    array, table = Slow(1.5 * TUNING.look_s), Table()
    Watch((0, 3), table).wait([array])
    assert array.is_ready()
    assert table.looks == 1


def test_waiting_is_given_up_when_told_and_costs_little():
    assert wait_until_ready(Slow(0.0), lambda: True)
    assert not wait_until_ready(Slow(10.0), lambda: True)
    array = Slow(0.1)
    assert wait_until_ready(array, lambda: False)
    assert array.looks <= 10 + 0.1 / TUNING.longest_pause_s
