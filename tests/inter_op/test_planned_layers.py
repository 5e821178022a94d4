"""Layers planned by several processes at once, and ahead of what is asked, are those that one process plans when asked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_model.hardware import preset
from autopar.errors import ConstraintError
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.plan_stage import plan_program
from autopar.inter_op.planned_layers import PlannedLayers
from autopar.stages.time_loops import make_time_loop
from tests.inter_op.test_search import request_on, traced_step

LAYERS = 6


def layers_of(processes, planner):
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    request = request_on(preset("cpu"), processes=processes)
    loop = make_time_loop(traced_step(weights, x), 4)
    places = LayerCosts(lambda _: loop, 4, request, [(1, 1)]).of(4).places
    return PlannedLayers(loop, places, request, planner=planner)


class NotOnFour:
    """Refuses to plan on four devices, and keeps the numbers of devices that this process planned on."""

    def __init__(self):
        self.asked = []

    def __call__(self, program, request):
        size = request.meshes[0].size
        self.asked.append(size)
        if size == 4:
            raise ConstraintError("not on four")
        return plan_program(program, request)


def test_what_was_planned_ahead_is_what_is_planned_when_asked():
    planner = NotOnFour()
    one, two = layers_of(1, planner), layers_of(2, planner)
    one.plan({1}, perhaps=2)
    assert 2 not in planner.asked, "one process has no time to spare"
    two.plan({1}, perhaps=2)
    planner.asked.clear()
    assert two.figures(two.common, 2) is not None
    assert planner.asked == [], "known already"
    for layers in (one, two):
        layers.plan({1, 2})
    figures = [[[layers.figures(n, size) for n in range(len(layers))] for size in (1, 2)] for layers in (one, two)]
    assert figures[0] == figures[1]


def test_an_error_of_what_nobody_asked_for_is_raised_when_somebody_does():
    layers = layers_of(2, NotOnFour())
    layers.plan({1}, perhaps=4)
    with pytest.raises(ConstraintError, match="not on four"):
        layers.plan({1, 4})


class Noting:
    """Plans, and notes which layer it planned on how many devices."""

    def __init__(self):
        self.planned = []

    def __call__(self, program, request):
        self.planned.append((program.stage, request.meshes[0].size))
        return plan_program(program, request)


def test_other_layers_are_planned_where_they_are_asked_for_and_change_like_the_one_that_repeats_elsewhere():
    options = [(1, 1), (1, 2), (1, 4)]
    planner = Noting()
    weights, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * LAYERS, jax.ShapeDtypeStruct((8, 64), jnp.float32)
    loop = make_time_loop(traced_step(weights, x), 4)
    costs = LayerCosts(lambda _: loop, 4, request_on(preset("p3.16xlarge")), options, planner=planner)
    estimated = costs.table(4, options)
    common = costs.of(4).common
    others = {layer for layer, _ in planner.planned} - {common}
    assert sorted(size for layer, size in planner.planned if layer == common) == [1, 2, 4]
    assert others
    assert {size for layer, size in planner.planned if layer != common} == {4}
    assert all(costs.is_planned(4, option) for option in options)
    layers = costs.of(4)
    for place, size in enumerate((1, 2)):
        usual, large = layers.figures(common, size), layers.figures(common, 4)
        for layer in others:
            own = layers.figures(layer, 4)
            expected = (
                own.forward_s * usual.forward_s / large.forward_s + own.backward_s * usual.backward_s / large.backward_s
            )
            assert estimated.seconds[place, layer, layer + 1] == pytest.approx(expected)
    assert not costs.plan_more(4, [(1, 4)])
    assert costs.plan_more(4, [(1, 2), (1, 4)]), "all layers are planned on what was chosen"
    assert costs.plan_rest(4)
    assert not costs.plan_rest(4)
    known = costs.table(4, options)
    assert {(layer, size) for layer, size in planner.planned} >= {
        (layer, size) for layer in others for size in (1, 2, 4)
    }
    for place, size in enumerate((1, 2, 4)):
        for layer in range(len(layers)):
            figures = layers.figures(layer, size)
            assert known.seconds[place, layer, layer + 1] == pytest.approx(figures.forward_s + figures.backward_s)
    assert (known.seconds[2] == estimated.seconds[2]).all(), "what was planned stays as it was"


def test_latency_is_carried_over_from_other_devices_in_seconds():
    """On one device a layer takes longer than on four. Its latency takes no longer, so that it is a smaller share."""
    options = [(1, 1), (1, 4)]
    weights, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * LAYERS, jax.ShapeDtypeStruct((8, 64), jnp.float32)
    traced = traced_step(weights, x)
    loops = {count: make_time_loop(traced, count) for count in (4, 2)}
    costs = LayerCosts(loops.__getitem__, 4, request_on(preset("p3.16xlarge")), options)
    assert costs.plan_more(2, [(1, 4)])
    seconds = costs.table(2, options).seconds
    common = costs.of(4).common
    four, two = (costs.of(count).figures(common, 4) for count in (4, 2))
    one = costs.of(4).figures(common, 1)
    expected = 0.0
    for name in ("forward_s", "backward_s"):
        latency_s = min(max((4 * getattr(four, name) - 2 * getattr(two, name)) / 2, 0.0), getattr(four, name))
        own_s = getattr(one, name)
        share = min(latency_s / own_s, 1.0)
        expected += own_s * (share + (1 - share) * 4 / 2)
    assert seconds[0, common, common + 1] == pytest.approx(expected)
