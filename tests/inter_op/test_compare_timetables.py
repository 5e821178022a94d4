"""The search over timetables on given meshes: no worse than any choice by hand, and what it chooses runs like jit."""

import itertools

import jax
import numpy as np
import pytest

import autopar
from autopar import ArgumentError
from autopar.errors import OutOfMemoryError
from autopar.inter_op.candidates.tuning import TUNING
from autopar.plan import Alternative
from tests.inter_op.test_search import arguments, step, two_nodes
from tests.oracles import assert_same_as_jit
from tests.schedules.chains import TRAINING_IN_CHUNKS

BY_HAND = [*TRAINING_IN_CHUNKS, ("interleaved", 4)]


def planned(weights, x, **options):
    options = {"devices": 2, "cluster": two_nodes(), "mesh_shape": (1,), "num_stages": 2, **options}
    return autopar.parallelize(step, **options).plan(weights, x)


def by_hand(weights, x, counts, schedules=BY_HAND, **options):
    """Predicted seconds of every choice by hand that is possible."""
    found = {}
    for count, (schedule, chunks) in itertools.product(counts, schedules):
        if schedule != "interleaved" or count % 2 == 0:
            try:
                plan = planned(weights, x, num_microbatches=count, schedule=schedule, virtual_stages=chunks, **options)
            except OutOfMemoryError:
                continue
            found[count, schedule, chunks] = plan.step_s
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(("width", "batch"), [(64, 8), pytest.param(1024, 512, marks=pytest.mark.slow)])
def test_the_search_is_no_worse_than_any_choice_by_hand(width, batch):
    weights, x = arguments(width, layers=8, batch=batch)
    counts = [m for m in (1, 2, 4, 8, 16, 32, 64) if m <= batch]
    plan = planned(weights, x)
    hand = by_hand(weights, x, counts)
    assert plan.step_s <= min(hand.values()) * (1 + TUNING.worth)
    assert plan.step_s == pytest.approx(hand[plan.num_microbatches, plan.schedule, plan.virtual_stages])
    for one in plan.compared:
        real_s = hand[one.num_microbatches, one.schedule, one.virtual_stages]
        if one.step_s is not None:
            assert one.step_s == pytest.approx(real_s)
        else:
            assert one.estimate_s > plan.step_s * (1 - TUNING.worth)


def test_latencies_make_few_microbatches_best_and_work_makes_many_so():
    assert planned(*arguments(16, batch=64)).num_microbatches == 1
    assert planned(*arguments(2048, layers=2, batch=4096)).num_microbatches >= 8


@pytest.mark.sweep
def test_every_choice_by_hand_stays_and_the_rest_is_searched():
    weights, x = arguments(512, layers=8, batch=64)
    assert planned(weights, x, num_microbatches=8).num_microbatches == 8
    assert planned(weights, x, schedule="gpipe").schedule == "gpipe"
    plan = planned(weights, x, schedule="interleaved")
    assert plan.schedule == "interleaved"
    assert {one.virtual_stages for one in plan.compared} == {2, 4}
    assert plan.virtual_stages == 2, "four virtual stages send three times as often"
    assert planned(weights, x, virtual_stages=2, num_microbatches=4).schedule == "interleaved"


@pytest.mark.sweep
def test_the_chosen_timetable_runs_like_jit():
    weights, x = arguments(64, layers=4, batch=8)
    options = {"devices": jax.devices()[:4], "cluster": two_nodes(), "num_stages": 2}
    for more in ({}, {"schedule": "interleaved"}):
        parallel = autopar.parallelize(step, **options, **more)
        assert_same_as_jit(step, parallel, weights, x)


@pytest.mark.sweep
def test_under_a_memory_limit_what_does_not_fit_is_left_and_the_rest_is_no_worse_than_by_hand():
    weights, x = arguments(32, layers=4, batch=4096)
    counts = (2, 8, 32, 64)
    free = planned(weights, x)
    tight = int(0.6 * free.peak_bytes)
    plan = planned(weights, x, memory_limit_bytes=tight)
    assert plan.peak_bytes <= tight
    assert plan.num_microbatches > free.num_microbatches or plan.recompute
    hand = by_hand(weights, x, counts, BY_HAND[:3], memory_limit_bytes=tight)
    assert plan.step_s <= min(hand.values()) * (1 + TUNING.worth)


def test_where_nothing_fits_the_error_is_that_of_the_usual_timetable():
    with pytest.raises(OutOfMemoryError, match="stage 0 of 2, with 2 microbatches in flight"):
        planned(*arguments(32, batch=8), memory_limit_bytes=2000)


def test_a_step_of_too_few_layers_is_not_interleaved():
    weights, x = arguments(64, layers=2, batch=8)
    advice = r"4 stages, 2 on each of 2 meshes: use schedule='1f1b' .* fewer num_stages; virtual_stages=2 plans unequal"
    with pytest.raises(ArgumentError, match=f"too few layers of equal work for {advice}"):
        planned(weights, x, schedule="interleaved")
    assert all(one.virtual_stages == 1 or one.step_s is None for one in planned(weights, x).compared)


def test_what_was_compared_goes_with_the_plan_and_into_its_file():
    plan = planned(*arguments(64, batch=8))
    assert {(one.num_microbatches, one.schedule) for one in plan.compared} >= {(1, "1f1b"), (8, "zb-h1")}
    assert type(plan).from_json(plan.to_json()) == plan
    chosen = Alternative(
        num_stages=2,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        step_s=plan.step_s,
        peak_bytes=plan.peak_bytes,
    )
    assert chosen in plan.compared
    assert np.isclose(min(one.step_s or np.inf for one in plan.compared), plan.step_s)
    assert not planned(*arguments(64, batch=8), num_microbatches=2, schedule="gpipe").compared
