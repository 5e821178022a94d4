"""The collector while planning: no whole collections, and afterwards it is as it was."""

import gc
import weakref

import pytest

from autopar.collector import NEVER, spared_collector


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def fail_within() -> None:
    with spared_collector():
        raise KeyError


def test_whole_collections_are_put_off_within_and_young_ones_are_not() -> None:
    young, middle, whole = gc.get_threshold()
    with spared_collector(), spared_collector():
        assert gc.get_threshold() == (young, middle, NEVER)
    assert gc.get_threshold() == (young, middle, whole)


def test_it_is_as_before_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError):
        fail_within()
    assert gc.get_threshold() == before


def test_young_garbage_is_collected_within() -> None:
    with spared_collector():
        watched = weakref.ref(Ring())
        gc.collect(1)
        assert watched() is None
