"""The collector while planning: it leaves alone what was there, and is itself again afterwards."""

import gc
import weakref

import pytest

from autopar.collector import BY_PYTHON, spared_collector


def test_objects_are_frozen_within_and_not_afterwards_even_after_an_error() -> None:
    kept = [[] for _ in range(2 * BY_PYTHON)]
    with pytest.raises(KeyError), spared_collector():
        assert gc.get_freeze_count() > BY_PYTHON
        with spared_collector():
            pass
        assert gc.get_freeze_count() > BY_PYTHON, "the inner one has thawed what the outer one froze"
        raise KeyError
    assert gc.get_freeze_count() == 0
    assert len(kept) == 2 * BY_PYTHON


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_made_within_is_collected_within() -> None:
    with spared_collector():
        watched = weakref.ref(Ring())
        gc.collect()
        assert watched() is None
