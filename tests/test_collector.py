"""The collector while planning: no whole collections, and afterwards it is as it was."""

import gc
import weakref

import pytest

from autopar.collector import spared_collector


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def whole_collections(rounds: int) -> int:
    """How many whole collections making so many objects causes."""
    before = gc.get_stats()[2]["collections"]
    kept: list[object] = []
    for _ in range(rounds):
        kept.append([Ring() for _ in range(1000)])
    return int(gc.get_stats()[2]["collections"] - before)


def fail_within() -> None:
    with spared_collector():
        raise KeyError


def test_there_are_no_whole_collections_within() -> None:
    before = gc.get_threshold()
    gc.set_threshold(100, 2, 2)
    try:
        assert whole_collections(30) > 0
        with spared_collector(), spared_collector():
            assert whole_collections(30) == 0
        assert gc.get_threshold() == (100, 2, 2)
    finally:
        gc.set_threshold(*before)


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
