"""A limit of planning's seconds: its clock starts with the search, reaches the planner, and can be stopped from outside."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import decide
from autopar.pipeline_plan import plan_from_json
from autopar.progress import listening
from autopar.settings import make_request, start_clock
from tests.explain.test_pipelines import pipeline_of, stage_of
from tests.inter_op.test_search import arguments
from tests.inter_op.test_search import step as mlp_step
from tests.plan_examples import plan_of


def a_step(state, batch):
    return {"w": state["w"] - jnp.mean(batch @ state["w"])}, jnp.sum(batch)


SHAPES = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}, jax.ShapeDtypeStruct((32, 16), jnp.float32)


@pytest.mark.parametrize(
    ("given", "limit"), [({}, 60.0), ({"planning_seconds": 7}, 7.0), ({"planning_seconds": None}, math.inf)]
)
def test_the_request_of_a_search_has_a_clock_with_this_limit(given, limit):
    settings = autopar.parallelize(a_step, devices=2, **given)._settings
    left = make_request(start_clock(settings)).budget.seconds_left
    assert left == limit == math.inf or 0 < left <= limit


def test_each_search_has_a_clock_of_its_own_which_makes_no_request_another():
    settings = autopar.parallelize(a_step, devices=2)._settings
    first, second = start_clock(settings), start_clock(settings)
    first.budget.stop()
    assert first.budget.is_over
    assert not second.budget.is_over
    assert dataclasses.replace(make_request(first), budget=second.budget) == make_request(first)


def test_a_search_can_be_stopped_while_it_is_under_way_and_nothing_else():
    step = autopar.parallelize(a_step, devices=2)
    stopped = {}

    def stop(progress):
        stopped.setdefault(progress.phase, step.stop_planning())

    with listening(stop):
        plan = step.plan(*SHAPES)
    assert stopped["tracing"] is False, "there is no search yet"
    assert stopped["planning on one mesh"] is True
    assert step.stop_planning() is False
    assert step.plan(*SHAPES) is plan


@pytest.mark.parametrize("plan", [plan_of(), pipeline_of(stage_of(0), stage_of(1))])
def test_what_ended_early_survives_json_and_older_files_have_neither_field(plan):
    ended = dataclasses.replace(plan, ended_early=True, not_compared=("mesh (2, 4)",))
    assert autopar.plan_from_json(ended.to_json()) == ended
    fields = json.loads(plan.to_json())
    older = {name: value for name, value in fields.items() if name not in ("ended_early", "not_compared")}
    assert len(older) == len(fields) - 2
    assert autopar.plan_from_json(json.dumps(older)) == plan


@pytest.mark.sampled(4)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("stages", [{"num_stages": 2}, {"num_stages": 4}])
def test_stages_are_handed_over_although_the_clock_ends_before_they_are_planned(stages, processes):
    weights, x = arguments(64, layers=4, batch=64)
    step = autopar.parallelize(
        mlp_step, devices=8, num_microbatches=4, planning_seconds=1e-9, planning_processes=processes, **stages
    )
    plan = step.plan(weights, x)
    assert plan.num_stages == stages["num_stages"]
    assert plan_from_json(plan.to_json()) == plan


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}, {"num_stages": 2, "num_microbatches": 4}])
def test_the_seconds_of_a_plan_are_those_of_the_whole_search(options, monkeypatch):
    times = iter([100.0, 107.0])
    monkeypatch.setattr(decide, "perf_counter", lambda: next(times))
    weights, x = arguments(64, layers=4, batch=64)
    plan = autopar.parallelize(mlp_step, devices=8, **options).plan(weights, x)
    assert plan.planning_s == 7.0
