"""On a cluster of unlike nodes the stages lie where they take equally long, and the step computes what it computes elsewhere."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import autopar
from autopar.cost_model.device import Device, MatrixEfficiency, fastest_device, slowest_device
from autopar.cost_model.machine import Cluster, NodeKind
from autopar.cost_model.tiers import Tier
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from tests import pipeline_steps


def device(name, flops_per_s, memory_bytes=1e9):
    return Device(
        name=name, peak_flops_per_s={"float32": flops_per_s}, memory_bytes=memory_bytes, memory_bytes_per_s=1e12
    )


INSIDE = Tier(name="inside", devices=4, topology="switch", latency_s=1e-8, bytes_per_s=1e11)
BETWEEN = Tier(name="between", devices=None, topology="switch", latency_s=1e-7, bytes_per_s=1e9)


def mixed(slow=2e7, fast=6e7, **memory):
    """Four devices of one kind, listed first, and four that are three times faster."""
    kinds = (
        NodeKind("old", 1, device("old", slow, memory.get("old", 1e9)), (INSIDE,)),
        NodeKind("new", 1, device("new", fast, memory.get("new", 1e9)), (INSIDE,)),
    )
    weakest = slowest_device([kind.device for kind in kinds])
    return Cluster(name="mixed", device=weakest, tiers=(INSIDE, BETWEEN), node_kinds=kinds)


def six_layers():
    return pipeline_steps.trained_on(pipeline_steps.mean_error, pipeline_steps.layers(6), pipeline_steps.rows())


def planned(cluster, devices=8, **options):
    step, state, batch = six_layers()
    parallel = autopar.parallelize(step, devices=devices, cluster=cluster, **options)
    return parallel, parallel.plan(state, batch), state, batch


def places(plan):
    """(kind of node, numbers of its devices) of each mesh."""
    found = plan.stages if isinstance(plan, PipelinePlan) else [plan]
    sizes = [stage.plan.num_devices if isinstance(plan, PipelinePlan) else plan.num_devices for stage in found]
    return [(one.node_kind, range(one.first_device, one.first_device + n)) for one, n in zip(found, sizes, strict=True)]


def assert_trains_like_jit(parallel, state, batch):
    step = jax.jit(six_layers()[0])
    expected, expected_loss = step(state, batch)
    expected, expected_loss = step(expected, batch)
    found, _ = parallel(state, batch)
    found, loss = parallel(found, batch)
    np.testing.assert_allclose(np.asarray(loss), expected_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("slow", [2e7, 5e7])
def test_faster_nodes_have_more_layers_and_the_step_computes_what_jit_does(slow):
    cluster = mixed(slow=slow)
    parallel, plan, state, batch = planned(cluster)
    assert {kind for kind, _ in places(plan)} == {"old", "new"}
    by_kind = dict(places(plan))
    assert set(by_kind["old"]) == set(range(4))
    assert set(by_kind["new"]) == set(range(4, 8))
    leaves = {stage.node_kind: len(stage.leaves) for stage in plan.stages}
    assert leaves["new"] > leaves["old"]
    assert plan.lower_bound_s <= plan.step_s
    found = assert_trains_like_jit(parallel, state, batch)
    order = jax.devices()
    used = [{order.index(device) for device in leaf.sharding.device_set} for leaf in jax.tree.leaves(found)]
    assert {frozenset(one) for one in used} == {frozenset(range(4)), frozenset(range(4, 8))}


@pytest.mark.sweep
def test_a_plan_is_faster_than_all_devices_as_the_slowest_and_than_one_kind_alone():
    for slow in (2e7, 5e7):
        cluster = mixed(slow=slow)
        _, plan, state, batch = planned(cluster)
        alike = dataclasses.replace(cluster, node_kinds=())
        others = [(alike, 8), *((cluster.of_kind(kind.name), 4) for kind in cluster.node_kinds)]
        for other, devices in others:
            beside = autopar.parallelize(six_layers()[0], devices=devices, cluster=other).plan(state, batch)
            assert plan.step_s < beside.step_s


@pytest.mark.sweep
def test_where_slow_nodes_would_only_hold_the_others_up_they_idle():
    cluster = mixed(slow=1e6)
    parallel, plan, state, batch = planned(cluster)
    assert places(plan) == [("new", range(4, 8))]
    alone = autopar.parallelize(six_layers()[0], devices=4, cluster=cluster.of_kind("new")).plan(state, batch)
    assert plan.step_s == alone.step_s
    found = assert_trains_like_jit(parallel, state, batch)
    assert {d for leaf in jax.tree.leaves(found) for d in leaf.sharding.device_set} <= set(jax.devices()[4:8])
    assert "the new nodes of cluster mixed" in str(plan)


@pytest.mark.parametrize(("slow", "kinds"), [(2e7, {"old", "new"}), (1e6, {"new"})])
def test_without_time_for_more_the_kinds_share_the_work_where_that_pays(slow, kinds):
    _, plan, _, _ = planned(mixed(slow=slow), planning_seconds=1e-3)
    assert {kind for kind, _ in places(plan)} == kinds
    assert plan.ended_early


def test_however_late_the_plan_is_no_slower_than_on_the_faster_nodes_alone():
    """Stages on all nodes are planned first, and found to wait for the links between these."""
    between = dataclasses.replace(BETWEEN, bytes_per_s=1e4)
    cluster = dataclasses.replace(mixed(), tiers=(INSIDE, between))
    _, plan, state, batch = planned(cluster, planning_seconds=1e-3)
    alone = autopar.parallelize(six_layers()[0], devices=4, cluster=cluster.of_kind("new"), planning_seconds=1e-3)
    assert places(plan) == [("new", range(4, 8))]
    assert plan.step_s == alone.plan(state, batch).step_s


@pytest.mark.sampled(2)
@pytest.mark.parametrize("slow", [2e7, 1e6])
def test_a_plan_of_kinds_is_read_again_and_used(slow):
    cluster = mixed(slow=slow)
    _, plan, state, batch = planned(cluster)
    again = plan_from_json(plan.to_json())
    assert again == plan
    parallel = autopar.parallelize(six_layers()[0], devices=8, cluster=cluster, plan=again)
    parallel.plan(state, batch)
    assert places(parallel.last_plan()) == places(plan)
    assert_trains_like_jit(parallel, state, batch)


@pytest.mark.sweep
def test_each_kind_has_its_own_memory_unless_the_user_gives_a_limit():
    room = mixed(new=2e9)
    _, plan, _, _ = planned(room)
    limits = {stage.node_kind: stage.plan.memory_limit_bytes for stage in plan.stages}
    assert limits == {"old": int(1e9), "new": int(2e9)}
    _, plan, _, _ = planned(room, memory_limit_bytes=1_500_000)
    assert {stage.plan.memory_limit_bytes for stage in plan.stages} == {1_500_000}
    assert all(stage.peak_bytes <= 1_500_000 for stage in plan.stages)


def test_a_plan_in_stages_is_used_again_where_memory_has_no_limit():
    cluster = Cluster.uniform((1e-9, 1e-9), (1e-12, 1e-12), flops_per_s=1e9)
    _, plan, state, batch = planned(cluster, devices=4, num_stages=2)
    again = autopar.parallelize(six_layers()[0], devices=4, cluster=cluster, plan=plan_from_json(plan.to_json()))
    again.plan(state, batch)
    assert places(again.last_plan()) == [("", range(2)), ("", range(2, 4))]


def test_some_devices_of_a_mixed_cluster_count_as_the_slowest():
    _, plan, _, _ = planned(mixed(), devices=4)
    assert [kind for kind, _ in places(plan)] == [""] * len(places(plan))


@pytest.mark.sweep
def test_a_report_says_the_kind_of_node_of_each_stage():
    _, plan, _, _ = planned(mixed())
    text = str(plan)
    for kind, devices in places(plan):
        assert f"{devices[0]}-{devices[-1]} {kind}" in text
    assert plan.devices_by_kind() == {"old": 4, "new": 4}
    assert plan.flops / plan.at_peak_s == pytest.approx(4 * 2e7 + 4 * 6e7)


def test_the_fastest_device_does_nothing_slower_than_any():
    a = dataclasses.replace(
        device("a", 10.0), matrix_efficiency={"float32": MatrixEfficiency(0.5, (8.0, 1.0, 1.0))}, launch_s=2e-6
    )
    b = dataclasses.replace(
        device("b", 6.0), matrix_efficiency={"float32": MatrixEfficiency(0.9, (1.0, 8.0, 4.0))}, launch_s=1e-6
    )
    best = fastest_device([a, b])
    for one, sizes in itertools.product((a, b), itertools.product((1, 16, 1000), repeat=3)):
        rate = best.peak_of("float32") * best.efficiency_of("float32").of(*sizes)
        assert rate >= one.peak_of("float32") * one.efficiency_of("float32").of(*sizes) * (1 - 1e-12)
        assert best.sustained_bytes_per_s >= one.sustained_bytes_per_s
        assert best.launch_s <= one.launch_s
