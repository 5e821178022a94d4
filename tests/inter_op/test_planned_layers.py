"""Layers planned by several processes at once, and ahead of what is asked, are those that one process plans when asked."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_model.hardware import preset
from autopar.errors import ConstraintError
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.plan_stage import plan_program
from autopar.inter_op.planned_layers import PlannedLayers, layer_meshes
from autopar.intra_op.compare_meshes import MeshComparison
from autopar.intra_op.planner import plan_way
from autopar.intra_op.shared_search import SharedSearch
from autopar.stages.time_loops import make_time_loop
from tests.inter_op.test_search import request_on, traced_step

LAYERS = 6


def layers_of(processes, planner, microbatches=4):
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    request = request_on(preset("cpu"), processes=processes)
    loop = make_time_loop(traced_step(weights, x), microbatches)
    places = LayerCosts(lambda _: loop, microbatches, request, [(1, 1)]).of(microbatches).places
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


def test_a_layer_alone_has_all_processes_and_several_have_one_each():
    given = []

    def planner(program, request):
        given.append((request.meshes[0].size, request.processes))
        return plan_program(program, request)

    layers = layers_of(2, planner)
    layers.plan({2}, others=())
    assert given == [(2, 2)]
    given.clear()
    layers.plan({1, 4}, others=())
    assert {processes for _, processes in given} == {1}, "forks do not fork"
    alone = layers_of(1, planner)
    alone.plan({2}, others=())
    assert alone.figures(alone.common, 2) == layers.figures(layers.common, 2)


@pytest.mark.parametrize("processes", [1, 2])
def test_meshes_of_a_layer_are_looked_at_side_by_side_and_those_of_a_small_step_one_after_the_other(
    monkeypatch, processes
):
    raw, together = MeshComparison._look_at, []

    def look_at(comparison, meshes):
        together.append(len(meshes))
        raw(comparison, meshes)

    monkeypatch.setattr(MeshComparison, "_look_at", look_at)
    layers = layers_of(processes, plan_program)
    layers.plan({4}, others=())
    assert together[0] == processes
    program = layers._program(layers.common)
    request = dataclasses.replace(layers._request, meshes=layer_meshes(4, layers._request.cluster, 2))
    together.clear()
    plan_way(program.step, request, SharedSearch())
    assert {*together} <= {0, 1}


@pytest.mark.parametrize(("joined", "useful"), [(32, 4), (48, 4), (1536, 12)])
def test_devices_that_divide_little_of_a_layer_s_work_are_of_no_use_to_it(joined, useful):
    """Three divide two products of ten, which are a quarter of the work, or most of it."""

    def step(weights, x):
        def loss_of(weights):
            y = x
            for wide, narrow, square in weights:
                y = (y @ wide) @ narrow
                for _ in range(8):
                    y = jnp.tanh(y @ square)
            return jnp.mean(y**2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, gradients), loss

    three = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, joined), (joined, 32), (32, 32)))
    loop = make_time_loop(traced_step([three] * LAYERS, jax.ShapeDtypeStruct((1024, 32), jnp.float32), step), 4)
    request = request_on(preset("cpu"))
    places = LayerCosts(lambda _: loop, 4, request, [(1, 1)]).of(4).places
    layers = PlannedLayers(loop, places, request)
    assert layers.useful_devices(1, 4) == 4
    assert layers.useful_devices(1, 12) == useful


def test_weights_in_16_bits_count_in_every_layer():
    """They are made once, and are there as long as the loop over microbatches runs."""

    def step(weights, xs):
        def loss_of(weights):
            x = xs.astype(jnp.bfloat16)
            for weight in weights:
                x = jnp.tanh(x @ weight.astype(jnp.bfloat16))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, gradients), loss

    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * LAYERS
    loop = make_time_loop(traced_step(weights, jax.ShapeDtypeStruct((8, 64), jnp.float32), step), 4)
    request = request_on(preset("cpu"))
    places = LayerCosts(lambda _: loop, 4, request, [(1, 1)]).of(4).places
    layers = PlannedLayers(loop, places, request)
    figures = [layers.figures(n, 1) for n in range(len(layers))]
    size = 64 * 64 * 4
    standing = [(one.kept_bytes, one.looped_bytes) for one in figures]  # weights; their sums, and themselves in 16 bits
    assert standing.count((size, 1.5 * size)) == LAYERS - 1


def test_what_a_layer_launches_is_of_one_microbatch_however_many_there_are():
    """It was that of all, so that smaller microbatches seemed to take as long as large ones."""
    few, many = layers_of(1, plan_program, microbatches=2), layers_of(1, plan_program, microbatches=8)
    assert 0 < many.launches_s(many.common) <= few.launches_s(few.common)
    few.plan({1}, others=())
    figures = few.figures(few.common, 1)
    assert few.launches_s(few.common) < figures.forward_s + figures.backward_s + figures.once_s
