"""The collector while planning: no whole collections, fewer young ones, and afterwards it is as it was."""

import gc
import weakref

import pytest

from autopar.gc_pause import NEVER, YOUNG, spared_collector


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def fail_within() -> None:
    with spared_collector():
        raise KeyError


@pytest.fixture
def threshold(request):
    before = gc.get_threshold()
    gc.set_threshold(*request.param)
    yield request.param
    gc.set_threshold(*before)


@pytest.mark.parametrize("threshold", [(700, 10, 10), (YOUNG + 1, 20, 5)], indirect=True)
def test_whole_collections_are_put_off_within_and_young_ones_are_fewer(threshold) -> None:
    with spared_collector(), spared_collector():
        assert gc.get_threshold() == (max(threshold[0], YOUNG), threshold[1], NEVER)
    assert gc.get_threshold() == threshold


@pytest.mark.parametrize("threshold", [(0, 10, 10)], indirect=True)
def test_a_collector_that_is_off_stays_off(threshold) -> None:
    with spared_collector():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == threshold


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
