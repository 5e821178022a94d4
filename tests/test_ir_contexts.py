"""MLIR contexts are shared by the modules of one thread at a time, and by few."""

import itertools
import threading

from tests.ir_contexts import MODULES, Shared


def in_a_thread(do):
    """What a function returns in a thread that has ended."""
    found = []
    thread = threading.Thread(target=lambda: found.append(do()))
    thread.start()
    thread.join()
    return found[0]


def test_a_context_is_for_so_many_modules():
    shared = Shared(itertools.count().__next__)
    assert [shared.take() for _ in range(2 * MODULES + 1)] == [0] * MODULES + [1] * MODULES + [2]


def test_threads_have_different_contexts_and_one_that_starts_has_that_of_one_that_has_ended():
    shared = Shared(itertools.count().__next__)
    assert shared.take() == 0
    assert [in_a_thread(shared.take) for _ in range(MODULES + 1)] == [1] * MODULES + [2]
    assert in_a_thread(lambda: (shared.take(), in_a_thread(shared.take))) == (2, 3)
    assert shared.take() == 0
