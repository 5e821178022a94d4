"""The collector while planning: no collections, and afterwards it is as it was."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import gc_pause
from autopar.gc_pause import NEVER, YOUNG, pause_full_collections


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def fail_within() -> None:
    with pause_full_collections():
        raise KeyError


@pytest.fixture
def threshold(request):
    before = gc.get_threshold()
    gc.set_threshold(*request.param)
    yield request.param
    gc.set_threshold(*before)


@pytest.mark.parametrize("threshold", [(700, 10, 10), (YOUNG + 1, 20, 5)], indirect=True)
def test_collections_are_put_off_within(threshold) -> None:
    with pause_full_collections(), pause_full_collections():
        assert gc.get_threshold() == (max(threshold[0], YOUNG), threshold[1], NEVER)
    assert gc.get_threshold() == threshold


@pytest.mark.parametrize("threshold", [(0, 10, 10)], indirect=True)
def test_a_collector_that_is_off_stays_off(threshold) -> None:
    with pause_full_collections():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == threshold


def test_it_is_as_before_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError):
        fail_within()
    assert gc.get_threshold() == before


@pytest.fixture
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_was_made_within_counts_as_old_afterwards_and_is_collected_as_such(nothing_frozen, monkeypatch) -> None:
    monkeypatch.setattr(gc_pause, "MANY", 1)
    with pause_full_collections():
        watched = weakref.ref(Ring())
    gc.collect(1)
    assert watched() is not None
    gc.collect()
    assert watched() is None


def test_what_a_large_plan_left_is_collected_before_the_next(nothing_frozen, monkeypatch) -> None:
    """Or a process that plans many steps keeps all of them."""
    monkeypatch.setattr(gc_pause, "MANY", 1)
    with pause_full_collections():
        watched = weakref.ref(Ring())
    assert watched() is not None
    with pause_full_collections():
        assert watched() is None


@pytest.mark.parametrize("threshold", [(0, 10, 10)], indirect=True)
def test_a_collector_that_is_off_collects_nothing_before_the_next(threshold, monkeypatch) -> None:
    monkeypatch.setattr(gc_pause._PAUSES, "left_much", True)
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("it is off"))
    with pause_full_collections():
        pass


def test_after_a_small_plan_the_collector_is_asked_nothing_that_takes_long(monkeypatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("it walks over all that is frozen"))
    gc.collect(0)
    with pause_full_collections():
        pass


def test_what_the_user_has_frozen_stays_frozen(nothing_frozen, monkeypatch) -> None:
    monkeypatch.setattr(gc_pause, "MANY", 0)
    gc.freeze()
    count = gc.get_freeze_count()
    with pause_full_collections():
        pass
    assert gc.get_freeze_count() > count / 2  # a few of them may die


class Followed:
    """A step to follow, which notes how the collector is set when the planner asks it something."""

    def __init__(self, step):
        self.step, self.thresholds = step, []

    def last_plan(self):
        return self.step.last_plan()

    def jax_devices(self):
        return self.step.jax_devices()

    def cluster(self):
        self.thresholds.append(gc.get_threshold())
        return self.step.cluster()


def test_the_collector_is_paused_while_a_step_is_traced_and_while_it_is_planned():
    before, traced = gc.get_threshold(), []

    def step(state, batch):
        traced.append(gc.get_threshold())
        return state + jnp.sum(batch)

    arguments = jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
    first = autopar.parallelize(step, devices=2)
    first.plan(*arguments)
    followed = Followed(first)
    autopar.parallelize(step, follow=followed).plan(*arguments)
    paused = (max(before[0], YOUNG), before[1], NEVER)
    assert {*traced, *followed.thresholds} == {paused}
    assert len(traced) == 2
    assert followed.thresholds
    assert gc.get_threshold() == before
