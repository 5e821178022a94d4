"""What a restore has let go of is given back to the system as often as the heaps may hold much."""

import jax
import pytest

from autopar.checkpoints import freed, orbax_leaf
from autopar.checkpoints.freed import Freed
from tests.checkpoints.memory_of_restore import resident_bytes
from tests.checkpoints.steps import make_state
from tests.checkpoints.test_round_trips import saved_and_restored

BLOCK, BLOCKS = 100_000, 400


def test_the_heaps_are_trimmed_each_time_that_so_much_was_freed():
    trimmed, found = [], []
    heaps = Freed(10, trim=lambda: trimmed.append(len(found)))
    for freed_bytes in (4, 4, 4, 4, 5, 11, 1):
        heaps.add(freed_bytes)
        found.append(freed_bytes)
    assert trimmed == [2, 5]


@pytest.mark.skipif(freed._malloc_trim() is None, reason="the C library has no malloc_trim")
def test_a_heap_that_is_trimmed_holds_what_is_in_use():
    held = [b"x" * BLOCK for _ in range(BLOCKS)]
    last = b"x" * BLOCK  # behind the holes, so that they are not the end of the heap
    before = resident_bytes()
    held.clear()
    freed.trim_heaps()
    assert before - resident_bytes() > BLOCK * BLOCKS / 2
    assert len(last) == BLOCK


def test_a_restore_trims_the_heaps(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(orbax_leaf, "Freed", lambda most: Freed(1, trim=lambda: seen.append(most)))
    saved_and_restored(tmp_path, "zero3", "whole")
    assert set(seen) == {orbax_leaf.TUNING.in_flight_bytes}


def test_saves_trim_the_heaps_once_they_have_let_go_of_much(tmp_path, monkeypatch):
    seen = []
    once_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(make_state()))
    monkeypatch.setattr(freed, "SAVED", Freed(2 * once_bytes, trim=lambda: seen.append(number)))
    for number in range(5):
        saved_and_restored(tmp_path / str(number), "zero3", "whole")
    assert seen == [1, 3]
