"""The collector while planning: it leaves alone what was there, and is itself again afterwards."""

import gc
import weakref

import pytest

from autopar.collector import BY_PYTHON, spared_collector


def fail_within() -> None:
    with spared_collector():
        raise KeyError


def test_objects_are_frozen_within_and_not_afterwards() -> None:
    kept: list[object] = [[] for _ in range(2 * BY_PYTHON)]
    with spared_collector():
        assert gc.get_freeze_count() > BY_PYTHON
        with spared_collector():
            pass
        assert gc.get_freeze_count() > BY_PYTHON, "the inner one has thawed what the outer one froze"
    assert gc.get_freeze_count() == 0
    assert len(kept) == 2 * BY_PYTHON


def test_an_error_thaws_objects_too() -> None:
    with pytest.raises(KeyError):
        fail_within()
    assert gc.get_freeze_count() == 0


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_made_within_is_collected_within() -> None:
    with spared_collector():
        watched = weakref.ref(Ring())
        gc.collect()
        assert watched() is None
