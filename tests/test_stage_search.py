"""The search over stages: layers are planned once, one mesh stays a candidate, and what is chosen runs like jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import layer_costs, staging
from autopar.catalogue import PlannerOptions
from autopar.cost_model.hardware import preset
from autopar.errors import OutOfMemoryError
from autopar.layer_costs import machine_shape
from autopar.options import Constraints
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.planner import PlanRequest, plan_step
from autopar.stage_search import ROOM, search_stages
from autopar.staging import time_loop
from autopar.timetables import Timetable
from autopar.trace import CallSignature, bind_arguments, trace
from tests.oracles import assert_same_as_jit


def two_nodes(devices_per_node=2):
    """A machine of small nodes with a slow network between them."""
    machine = preset("p3.16xlarge")
    inner, *outer = machine.tiers
    return dataclasses.replace(
        machine, name="two nodes", tiers=(dataclasses.replace(inner, devices=devices_per_node), *outer)
    )


def step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def arguments(width, layers=4, batch=8):
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32) for _ in range(layers)]
    return weights, jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)


def searched(width, devices, machine, limit=None, batch=8, **options):
    weights, x = arguments(width, batch=batch)
    signature = CallSignature(step, (1,), (), "auto")
    traced = trace(signature, bind_arguments(signature, (weights, x), {}))
    request = PlanRequest((), machine, limit, Constraints(), PlannerOptions())
    options = {"timetables": [Timetable(4, "1f1b")], **options}
    return search_stages(lambda count: time_loop(traced, count), request, devices=devices, **options)


def test_devices_of_a_machine_are_counted_in_nodes():
    assert machine_shape(two_nodes(), 4) == (2, 2)
    assert machine_shape(two_nodes(), 2) == (1, 2)
    assert machine_shape(preset("cpu"), 8) == (1, 8)


def test_the_chosen_stages_use_all_devices_and_cut_between_layers():
    found = searched(64, 4, two_nodes())
    assert sum(found.sizes) == 4
    assert len(found.cuts) == len(found.sizes) - 1
    assert list(found.cuts) == sorted(set(found.cuts))


def test_a_given_number_of_stages_is_kept():
    assert len(searched(64, 4, two_nodes(), num_stages=2).sizes) == 2


def test_weights_that_one_device_cannot_hold_are_cut_and_too_small_a_limit_names_the_stage():
    with pytest.raises(OutOfMemoryError, match="stage"):
        searched(64, 4, two_nodes(), limit=1000)


def test_across_nodes_the_faster_of_one_mesh_and_stages_is_taken_and_runs_like_jit():
    weights, x = arguments(256)
    parallel = autopar.parallelize(step, devices=jax.devices()[:4], cluster=two_nodes(), num_microbatches=4)
    plan = parallel.plan(weights, x)
    one = autopar.parallelize(
        step, devices=jax.devices()[:4], cluster=two_nodes(), num_microbatches=4, num_stages=1
    ).plan(weights, x)
    assert plan.step_s <= one.step_s
    assert isinstance(plan, PipelinePlan), (
        "gradients of 256 KB a layer over the slow network cost more than activations"
    )
    assert plan_from_json(plan.to_json()) == plan
    assert_same_as_jit(step, parallel, weights, x)


def test_stages_that_are_equal_are_planned_once_and_run_like_jit(monkeypatch):
    planned = []

    def counted(traced, request):
        planned.append(traced.fingerprint)
        return plan_step(traced, request)

    monkeypatch.setattr(staging, "plan_step", counted)
    weights, x = arguments(32, layers=4)
    parallel = autopar.parallelize(step, devices=4, num_stages=4, num_microbatches=4, mesh_shape=[(1,)] * 4)
    plan = parallel.plan(weights, x)
    assert len(planned) == len(set(planned)) == 3, "the first, one of the two in the middle, the last"
    assert [stage.leaves for stage in plan.stages] == [(f"weights/{i}",) for i in range(4)]
    assert_same_as_jit(step, parallel, weights, x)


def test_the_search_recomputes_where_activations_alone_are_too_large():
    weights, x = arguments(16, layers=4, batch=4096)
    signature = CallSignature(step, (1,), (), "auto")
    traced = trace(signature, bind_arguments(signature, (weights, x), {}))

    def found(limit, recompute):
        request = PlanRequest((), two_nodes(), limit, Constraints(), PlannerOptions())
        return search_stages(
            lambda count: time_loop(traced, count),
            request,
            devices=4,
            timetables=[Timetable(4, "gpipe")],
            num_stages=2,
            recompute=recompute,
        )

    def fits(limit):
        try:
            found(limit, (False,))
        except OutOfMemoryError:
            return False
        return True

    free = found(None, (False, True))
    assert not free.recompute
    assert found(None, (True,)).choice.step_s > free.choice.step_s, "backward takes a forward more"
    need = max(stage.peak_bytes for stage in free.choice.stages) / ROOM
    limit = next(int(need * part) for part in np.arange(1.0, 0.1, -0.02) if not fits(int(need * part)))
    short = found(limit, (False, True))
    assert short.recompute
    assert short.choice.step_s > free.choice.step_s


def test_a_submesh_of_several_nodes_is_planned_only_where_it_may_pay(monkeypatch):
    """Even perfect division over two nodes gains less than the slow network costs; then four devices are never planned."""
    sizes = []

    def counted(program, request):
        sizes.extend(mesh.size for mesh in request.meshes)
        return staging.measured_stage(program, request)

    monkeypatch.setattr(layer_costs, "measured_stage", counted)
    assert searched(64, 4, two_nodes(), num_stages=2).sizes == (2, 2)
    assert set(sizes) == {1, 2}


def test_a_submesh_of_several_nodes_is_chosen_where_communication_is_free():
    """Its bound, perfect division, must not keep it from being planned: one stage has no bubble."""
    machine = two_nodes()
    free = tuple(dataclasses.replace(tier, latency_s=0.0, bytes_per_s=1e18) for tier in machine.tiers)
    assert searched(512, 4, dataclasses.replace(machine, tiers=free), batch=8192).sizes == (4,)
