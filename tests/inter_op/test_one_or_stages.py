"""Where stages are left open: one mesh on a node with fast links, stages where they save communication, whichever is faster."""

import dataclasses
import math
import time
import types

import jax
import pytest

import autopar
from autopar.cost_model.hardware import preset
from autopar.errors import OutOfMemoryError
from autopar.explain import explain
from autopar.explain.units import seconds_text
from autopar.inter_op import one_or_stages
from autopar.inter_op.candidates.tuning import TUNING
from autopar.inter_op.one_or_stages import stages_may_pay
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.intra_op.tuning import TUNING as INSIDE
from autopar.layouts.mesh import LogicalMesh
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Alternative, Plan
from autopar.solver.budget import Budget
from tests.inter_op.test_search import arguments, request_on, step, traced_step
from tests.oracles import assert_same_as_jit


def node(bytes_per_s, devices=4):
    """One node whose devices are joined by links of this speed."""
    machine = preset("p3.16xlarge")
    link = dataclasses.replace(machine.tiers[-1], devices=devices, bytes_per_s=bytes_per_s, latency_s=5e-6, ports=1)
    return dataclasses.replace(machine, name="one node", tiers=(link,))


def planned(machine, *, width=1024, batch=256, layers=4, **options):
    weights, x = arguments(width, layers=layers, batch=batch)
    return autopar.parallelize(step, devices=4, cluster=machine, **options).plan(weights, x)


def test_on_a_node_with_slow_links_stages_are_found_and_compared_with_one_mesh():
    plan = planned(node(1e9))
    one = planned(node(1e9), num_stages=1)
    assert isinstance(plan, PipelinePlan)
    assert isinstance(one, Plan)
    assert plan.step_s < 0.6 * one.step_s
    assert [way.step_s for way in plan.compared if way.num_stages == 1] == [pytest.approx(one.step_s)]
    assert plan_from_json(plan.to_json()) == plan
    text = explain(plan)
    assert f"is the fastest of {len(plan.compared)} ways compared" in text
    assert f"one mesh would take {seconds_text(one.step_s)}, " in text


def test_stages_by_hand_are_not_better_than_those_found_on_one_node():
    best = planned(node(1e9), num_microbatches=8).step_s
    for stages in (2, 4):
        assert best <= 1.05 * planned(node(1e9), num_stages=stages, num_microbatches=8).step_s


def test_on_a_node_with_fast_links_one_mesh_is_taken_and_no_stages_are_searched():
    plan = planned(node(1e12), width=2048, batch=2048)
    assert isinstance(plan, Plan)
    assert plan.comm_s < TUNING.least_gain * plan.step_s  # so that nothing else can be gained
    assert plan.compared == ()


LAYER = 4 * 2048**2
"""Bytes of a layer's weights below; the step has four."""


def two_nodes(bytes_per_s, usable_bytes=math.inf):
    """Two nodes of two devices; the links within a node are fast, that between the nodes has this speed."""
    machine = preset("p3.16xlarge")
    inner, outer = (
        dataclasses.replace(machine.tiers[-1], devices=devices, bytes_per_s=speed, latency_s=5e-6, ports=1)
        for devices, speed in ((2, 1e12), (4, bytes_per_s))
    )
    device = dataclasses.replace(machine.device, memory_bytes=usable_bytes, reserved_bytes=0)
    return dataclasses.replace(machine, name="two nodes", device=device, tiers=(inner, outer))


@pytest.mark.parametrize(
    ("bytes_per_s", "node_bytes", "first"),
    [(1e12, 0, "mesh"), (1e7, 0, "stages"), (1e12, 10 * LAYER, "mesh"), (1e12, 7 * LAYER, "stages")],
    ids=["nodes with fast links", "nodes with slow links", "nodes with room", "nodes that the state nearly fills"],
)
def test_across_nodes_one_mesh_is_planned_first_where_gradients_are_reduced_in_little_time(
    bytes_per_s, node_bytes, first, monkeypatch
):
    class Planned(Exception):
        """Carries what was planned first, which is all that this test asks for."""

    def plan(called):
        raise Planned(called)

    monkeypatch.setattr(one_or_stages, "_plan_mesh_first", lambda _: plan("mesh"))
    monkeypatch.setattr(one_or_stages, "_plan_stages_first", lambda _: plan("stages"))
    with pytest.raises(Planned, match=first):
        planned(two_nodes(bytes_per_s, usable_bytes=node_bytes / 2 or math.inf), width=2048, batch=2048)


@pytest.mark.parametrize(
    ("limit", "microbatches", "first"),
    [(10**9, "few", "mesh"), (220_000, "few", "mesh"), (220_000, "many", "stages")],
    ids=["a step that fits", "few microbatches", "many microbatches"],
)
def test_on_one_node_stages_come_first_where_a_large_step_needs_many_microbatches(limit, microbatches, first):
    """A clock that ends early must not find the search at work on one mesh in ever more microbatches."""
    comparison = one_or_stages._OneOrStages(
        traced=traced_step(*arguments(32, batch=4096)),
        wishes=PipelineWishes(num_stages=1),
        request=dataclasses.replace(
            request_on(node(1e12), limit),
            meshes=(LogicalMesh.of((4,)),),
            tuning=dataclasses.replace(INSIDE, large=0),
        ),
        devices=4,
        tuning=TUNING,
    )
    if comparison.excess:
        factor = 2 if microbatches == "few" else 0.5
        comparison = dataclasses.replace(
            comparison, tuning=dataclasses.replace(TUNING, many=factor * comparison.excess)
        )
    assert one_or_stages._is_for_one_mesh(comparison) == (first == "mesh")
    given = dataclasses.replace(comparison, wishes=PipelineWishes(num_stages=1, num_microbatches=8))
    assert one_or_stages._is_for_one_mesh(given), "nobody knows yet what eight microbatches take"


def test_across_nodes_fewer_microbatches_are_already_many():
    comparison = one_or_stages._OneOrStages(
        traced=traced_step(*arguments(32, batch=4096)),
        wishes=PipelineWishes(num_stages=1),
        request=dataclasses.replace(
            request_on(two_nodes(1e12), 220_000),
            meshes=(LogicalMesh.of((4,)),),
            tuning=dataclasses.replace(INSIDE, large=0),
        ),
        devices=4,
        tuning=TUNING,
    )
    excess = comparison.excess
    assert excess
    for most, is_for_one_mesh in ((2 * excess, True), (excess / 2, False)):
        tuning = dataclasses.replace(TUNING, many=math.inf, many_across=most)
        assert one_or_stages._is_for_one_mesh(dataclasses.replace(comparison, tuning=tuning)) == is_for_one_mesh


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:x has 64 examples")
@pytest.mark.parametrize("devices", [3, 5, pytest.param(6, marks=pytest.mark.slow)])
def test_stages_are_found_where_no_dimension_can_be_divided_among_the_devices(devices):
    weights, x = arguments(1024, layers=8, batch=64)

    def step_s(**options):
        return autopar.parallelize(step, devices=devices, **options).plan(weights, x).step_s

    by_hand = min(step_s(num_stages=stages) for stages in {3, devices} if devices % stages == 0)
    assert step_s() <= 1.05 * by_hand
    assert by_hand < 0.8 * step_s(num_stages=1), "so that there is something to find"


@pytest.mark.sweep
def test_where_stages_were_searched_and_are_slower_the_report_says_by_how_much():
    plan = planned(node(4e9), width=4096, batch=512)
    assert isinstance(plan, Plan)
    stages = [way for way in plan.compared if way.schedule]
    assert any(way.estimate_s is not None for way in stages)
    figures = [way.step_s or way.estimate_s or way.at_least_s for way in stages]
    assert all(figures)
    assert min(way.step_s for way in stages if way.step_s is not None) > plan.step_s, (
        "the best stages were planned as wholes"
    )
    text = explain(plan)
    assert "1 microbatch is the fastest" in text
    assert " in stages in schedule " in text
    assert Plan.from_json(plan.to_json()) == plan


def test_a_step_that_cannot_be_cut_into_stages_stays_on_one_mesh():
    weights, x = arguments(512, layers=1, batch=64)
    options = {"devices": 4, "cluster": node(1e5), "constraints": autopar.data_parallel()}
    parallel = autopar.parallelize(lambda w, x: (x @ w[0]).sum(0), **options)
    plan = parallel.plan(weights, x)
    assert isinstance(plan, Plan)
    assert plan.comm_s > plan.compute_s
    assert plan.compared == ()


def test_constraints_that_only_one_mesh_fulfils_leave_the_step_there():
    """One example a microbatch cannot be divided among the devices of a stage; four can be among those of one mesh."""
    plan = planned(node(1e9), batch=4, layers=2, constraints=autopar.data_parallel())
    assert isinstance(plan, Plan)
    assert plan.mesh_shape == (4,)


def test_a_step_of_stages_found_on_one_node_computes_what_jit_computes():
    weights, x = arguments(256, layers=4, batch=512)
    parallel = autopar.parallelize(step, devices=jax.devices()[:4], cluster=node(1e7))
    assert isinstance(parallel.plan(weights, x), PipelinePlan)
    assert_same_as_jit(step, parallel, weights, x)


def test_stages_are_searched_only_where_they_may_save_enough():
    plan = planned(node(1e12), num_stages=1)

    def may_pay(compute_s, comm_s, *, together_s=0.0, microbatches=64, equations=100, recompute=False):
        case = dataclasses.replace(plan, compute_s=compute_s, comm_s=comm_s, recompute=recompute)
        return stages_may_pay(case, together_s, microbatches, equations)

    assert may_pay(0.7, 0.3)
    assert not may_pay(0.95, 0.05), "little to save"
    assert not may_pay(0.7, 0.3, microbatches=1), "a third of the work is bubble"
    assert may_pay(0.95, 0.05, together_s=0.2), "work that stages divide"
    assert may_pay(0.95, 0.05, recompute=True), "stages may keep what one mesh has no room for"
    steps, search_s = TUNING.repaid_in_steps, TUNING.search_s
    wins_back = (0.3 * steps - search_s) / TUNING.search_s_per_equation
    assert not may_pay(0.7, 0.3, equations=wins_back), "the bubble takes a little of the 0.3"
    assert may_pay(0.7, 0.3, equations=0.9 * wins_back)
    assert not may_pay(0.7 * search_s / steps, 0.3 * search_s / steps, equations=0), "a step of a few milliseconds"


def alternative(stages, microbatches, estimate_s=None):
    return Alternative(num_stages=stages, num_microbatches=microbatches, estimate_s=estimate_s)


ROWS = (
    alternative(3, 8, 1.0),
    alternative(1, 4),
    alternative(1, 16, 4.0),
    alternative(1, 8, 5.0),
    alternative(1, 8, 3.0),
)


@pytest.mark.parametrize(
    ("rows", "alone_fits", "step_s", "microbatches"),
    [
        (ROWS, None, 6.0, 8),
        (ROWS[:3], None, 6.0, 16),
        (ROWS, None, 3.0, None),
        (ROWS, None, 3.0 * (1 + TUNING.worth / 2), None),
        (ROWS[:2], None, 6.0, None),
        ((), None, 6.0, None),
        (ROWS[:2], (96, 4.0), 6.0, 96),
        (ROWS, (96, 4.0), 6.0, 8),
        ((), (96, 6.0), 6.0, None),
    ],
    ids=[
        "the least estimate",
        "the only estimate",
        "no better than stages",
        "hardly better than stages",
        "no estimate",
        "nothing compared",
        "where it fits",
        "an estimate is less",
        "where it fits it is no better",
    ],
)
def test_one_mesh_is_planned_first_in_the_number_of_microbatches_in_which_one_stage_promises_most(
    rows, alone_fits, step_s, microbatches, monkeypatch
):
    """The search for stages knows which number fits by the sum of layers; one mesh alone would guess."""
    plan = types.SimpleNamespace(step_s=step_s, not_compared=())
    found = one_or_stages.SearchedPipeline(
        pipeline=types.SimpleNamespace(plan=plan),
        promised_s=step_s,
        one_stage_s=math.inf,
        by_layers_s=(),
        alone_s={4: 0.5 * step_s},
        alone_fits=alone_fits,
    )
    monkeypatch.setattr(one_or_stages.SearchedPipeline, "compared", rows)
    asked = []

    class Comparison:
        request = types.SimpleNamespace(budget=Budget())
        excess = 1.0
        tuning = TUNING

        def search_stages(self):
            return found

        def has_time_for_one_mesh(self, stages_s):
            return True

        def plan_mesh_below(self, beat_s, promising):
            asked.append((beat_s, promising and promising.microbatches))
            raise OutOfMemoryError("nothing fits")

    assert one_or_stages._plan_stages_first(Comparison()) is found.pipeline
    assert asked == [(step_s, microbatches)]


@pytest.mark.parametrize(
    ("left_s", "stages_s", "is_over", "has_time"),
    [
        (math.inf, 0.0, False, True),
        (0.001, 0.0, False, False),
        (1.0, 0.0, True, False),
        (4.9, 10.0, False, False),
        (5.1, 10.0, False, True),
    ],
)
def test_one_mesh_is_begun_only_where_the_clock_leaves_half_of_what_stages_took_and_more_than_its_excess(
    monkeypatch, left_s, stages_s, is_over, has_time
):
    monkeypatch.setattr(one_or_stages, "far_excess", lambda *_: time.sleep(0.01) or 2.0)
    budget = types.SimpleNamespace(is_over=is_over, seconds_left=left_s)
    comparison = one_or_stages._OneOrStages(
        traced=None,
        wishes=types.SimpleNamespace(num_microbatches="auto", recompute="auto"),
        request=types.SimpleNamespace(budget=budget),
        devices=4,
        tuning=TUNING,
    )
    assert comparison.has_time_for_one_mesh(stages_s) is has_time
