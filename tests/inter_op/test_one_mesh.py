"""Microbatches and recomputation on one mesh are taken where the memory asks for them, and then the cheaper of the two."""

import contextlib
import dataclasses
import math
import types

import jax
import pytest

import autopar
from autopar.errors import OutOfMemoryError
from autopar.explain import explain
from autopar.inter_op import attempts, one_mesh
from autopar.inter_op.candidates.tuning import TUNING
from autopar.intra_op.planner import plan_way
from autopar.intra_op.shared_search import SharedSearch
from autopar.layouts.mesh import LogicalMesh
from autopar.solver.budget import Budget
from tests.inter_op.test_search import arguments, request_on, step, traced_step, two_nodes


def planned(weights, x, **options):
    options = {"devices": 4, "mesh_shape": (4,), "cluster": two_nodes(), "num_stages": 1, **options}
    return autopar.parallelize(step, **options).plan(weights, x)


def test_without_a_limit_that_binds_there_is_one_microbatch_and_nothing_is_compared():
    weights, x = arguments(32, batch=4096)
    free = planned(weights, x)
    assert (free.num_microbatches, free.compared) == (1, ())
    assert free.unlimited_s == free.step_s
    assert planned(weights, x, memory_limit_bytes=10**9).compared == ()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", [0.9, 0.6])
def test_under_a_limit_the_cheapest_way_that_fits_is_taken(part):
    weights, x = arguments(32, batch=4096)
    limit = int(part * planned(weights, x).peak_bytes)
    by_hand = {}
    for count in (1, 2, 4, 8):
        for recompute in ("none", "layer"):
            try:
                plan = planned(weights, x, memory_limit_bytes=limit, num_microbatches=count, recompute=recompute)
            except OutOfMemoryError:
                continue
            by_hand[count, recompute == "layer"] = plan.step_s
    plan = planned(weights, x, memory_limit_bytes=limit)
    assert plan.peak_bytes <= limit
    assert plan.step_s == pytest.approx(min(by_hand.values()))
    assert plan.num_microbatches > 1
    tried = {(one.num_microbatches, one.recompute): one.step_s for one in plan.compared}
    assert tried[1, False] is None
    assert all(seconds == pytest.approx(by_hand[way]) for way, seconds in tried.items() if seconds is not None)
    assert type(plan).from_json(plan.to_json()) == plan
    assert f"{plan.num_microbatches} microbatches is the fastest of {len(tried)} ways compared" in explain(plan)


def test_a_plan_that_the_limit_makes_dear_is_compared_with_other_ways():
    weights, x = arguments(256, layers=2, batch=512)
    free = planned(weights, x)
    plan = planned(weights, x, memory_limit_bytes=free.peak_bytes)
    assert plan.step_s > 1.2 * free.step_s
    assert 0.5 * free.step_s < plan.unlimited_s < plan.step_s / 1.2
    assert {(one.num_microbatches, one.recompute) for one in plan.compared} >= {(1, False), (2, False)}
    assert plan.step_s == min(one.step_s for one in plan.compared if one.step_s is not None)


@pytest.mark.parametrize(("constraints", "is_tried"), [(autopar.data_parallel(), False), (None, True)])
def test_where_constraints_keep_more_state_than_the_memory_no_other_way_is_planned(monkeypatch, constraints, is_tried):
    """Microbatches and recomputation leave the state as it is. Split, it would have room, so then they are tried."""
    weights, x = arguments(256, layers=2, batch=512)
    state_bytes = sum(w.size * w.dtype.itemsize for w in jax.tree.leaves(weights))
    planned_ways = []
    monkeypatch.setattr(
        attempts, "plan_way", lambda step, *rest: planned_ways.append(step.microbatches) or plan_way(step, *rest)
    )
    with contextlib.suppress(OutOfMemoryError):
        planned(weights, x, constraints=constraints, memory_limit_bytes=int(0.9 * state_bytes))
    assert (len(planned_ways) > 1) == is_tried
    assert planned_ways[:1] == ([1] if is_tried else [])


@pytest.mark.parametrize(
    ("part", "too_large", "ways"),
    [
        (0.25, (), [1, 16, 32]),
        (0.25, (16, 32), [1, 16, 32, 1024]),  # an example for each device
        (0.225, (), [1, 32, 64, 1024]),
        (0.2, (), [1, 32, 128, 1024, 1024]),  # what fails at little cost is planned again at any
    ],
)
def test_when_the_clock_ends_before_anything_fits_two_numbers_and_the_leanest_way_are_planned(
    monkeypatch, part, too_large, ways
):
    weights, x = arguments(32, batch=4096)
    free = planned(weights, x)
    limit, planned_ways, budget = int(part * free.peak_bytes), [], Budget()

    def plan_and_stop(step, request, shared):
        planned_ways.append(step.microbatches)
        budget.stop()
        if step.microbatches in too_large:
            shared.excess = 1.5
            raise OutOfMemoryError("too large", needed_bytes=2 * limit, tensors=())
        return plan_way(step, request, shared)

    monkeypatch.setattr(attempts, "plan_way", plan_and_stop)
    request = dataclasses.replace(request_on(two_nodes(), limit), meshes=(LogicalMesh.of((4,)),), budget=budget)
    options = {"num_microbatches": "auto", "recompute": "auto", "devices": 4}
    if len(ways) < 5:
        plan = one_mesh.plan_on_one_mesh(traced_step(weights, x), request, **options).plan
        assert plan.peak_bytes <= limit
        assert plan.ended_early
        assert plan.not_compared == ("more microbatches and recomputation",)
    else:
        with pytest.raises(OutOfMemoryError, match="planning_seconds were over before all") as told:
            one_mesh.plan_on_one_mesh(traced_step(weights, x), request, **options)
        assert not told.value.is_settled
    assert planned_ways == ways


@pytest.mark.parametrize(
    ("part", "tried"),
    [
        (
            0.8,
            [1, 2, 4, 8, 16, 32, 64],
        ),  # 64 have too few examples for four devices, and fewer than 32 take more memory
        (0.7, [1, 4, 16, 64, 32]),
    ],
)
def test_a_number_of_microbatches_that_failed_is_not_planned_again_where_larger_ones_cannot_meet_constraints(
    monkeypatch, part, tried
):
    weights, x = arguments(64, layers=8, batch=128)
    options = {"constraints": autopar.data_parallel(), "recompute": "none"}
    limit, planned_ways = int(part * planned(weights, x, **options).peak_bytes), []
    monkeypatch.setattr(
        attempts, "plan_way", lambda step, *rest: planned_ways.append(step.microbatches) or plan_way(step, *rest)
    )
    with pytest.raises(OutOfMemoryError):
        planned(weights, x, **options, memory_limit_bytes=limit)
    assert planned_ways[:-1] == tried
    assert planned_ways[-1] == 32, "what failed at little cost is planned again at any"


@pytest.mark.parametrize(("left_s", "best_s", "is_over"), [(4.0, 1.0, True), (6.0, 1.0, False), (4.0, math.inf, False)])
def test_another_way_is_not_begun_where_the_clock_leaves_half_of_what_the_last_one_took(left_s, best_s, is_over):
    request = types.SimpleNamespace(budget=types.SimpleNamespace(is_over=False, seconds_left=left_s))
    ways = attempts.Attempts(request, SharedSearch(best_s=best_s), tuning=dataclasses.replace(TUNING, begun=0.5))
    with ways.timed():
        pass
    assert not ways.is_over
    ways._took_s = 10.0
    assert ways.is_over is is_over


def test_a_plan_says_that_other_ways_were_not_begun_though_some_seconds_were_left(monkeypatch):
    weights, x = arguments(32, batch=4096)
    limit = int(0.25 * planned(weights, x).peak_bytes)
    request = dataclasses.replace(request_on(two_nodes(), limit), meshes=(LogicalMesh.of((4,)),))
    monkeypatch.setattr(attempts.Attempts, "is_over", property(lambda ways: ways.fastest() is not None))
    monkeypatch.setattr(attempts.Attempts, "is_dear", lambda _: True)
    options = {"num_microbatches": "auto", "recompute": "auto", "devices": 4}
    plan = one_mesh.plan_on_one_mesh(traced_step(weights, x), request, **options).plan
    assert plan.ended_early
    assert plan.not_compared == ("more microbatches and recomputation",)


@pytest.mark.parametrize(("work_s", "pays"), [(0.76, False), (0.74, True)])
def test_recomputation_may_pay_where_a_plan_in_many_microbatches_takes_far_longer_than_its_work(work_s, pays):
    """The limit costs little beside the best plan in as many microbatches, which are many because of it."""
    weights, x = arguments(32, batch=4096)
    traced = traced_step(weights, x)
    request = dataclasses.replace(request_on(two_nodes()), meshes=(LogicalMesh.of((4,)),))
    ways = attempts.Attempts(request, SharedSearch(has_other_ways=True), tuning=TUNING)
    assert ways.may_recompute()
    found = ways.plan(traced, None)
    ways.shared.work_s = work_s * found.plan.step_s
    assert not ways.may_recompute(), "it fits in one microbatch"
    ways.plan_first(traced, None, excess=2.0)
    assert not ways.is_dear()
    assert ways.may_recompute() is pays


@pytest.mark.parametrize("pays", [False, True])
def test_where_recomputation_may_pay_it_is_planned_though_the_limit_costs_little(monkeypatch, pays):
    weights, x = arguments(32, batch=4096)
    limit, planned_ways = int(0.25 * planned(weights, x).peak_bytes), []
    request = dataclasses.replace(request_on(two_nodes(), limit), meshes=(LogicalMesh.of((4,)),))
    monkeypatch.setattr(attempts.Attempts, "is_dear", lambda ways: not ways._found)
    monkeypatch.setattr(attempts.Attempts, "may_recompute", lambda ways: pays or ways.is_dear())
    monkeypatch.setattr(attempts.Attempts, "is_far_slower", lambda _: False)  # or a way that was left is searched again
    plan_one = attempts.Attempts.plan

    def note(ways, step, repeated):
        planned_ways.append((step.microbatches, repeated is not None))
        return plan_one(ways, step, repeated)

    monkeypatch.setattr(attempts.Attempts, "plan", note)
    options = {"num_microbatches": "auto", "recompute": "auto", "devices": 4}
    one_mesh.plan_on_one_mesh(traced_step(weights, x), request, **options)
    assert len(set(planned_ways)) == len(planned_ways)
    assert any(repeats for _, repeats in planned_ways) is pays
