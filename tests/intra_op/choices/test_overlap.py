"""What hides behind compute: which values are early, late or awaited, and what a plan's step waits for."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost_model.hardware import preset
from autopar.cost_model.machine import Overlap
from autopar.intra_op.choices.overlap import SUMS, Moved, Need, find_needs, hide, kind_of, window
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.counts import cut_into_microbatches
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.program import Program
from autopar.program.trace import trace
from autopar.simulate.plan_overlap import overlap_of
from autopar.simulate.reprice import reprice

SIZE, BATCH = 256, 64
WEIGHTS = {
    "first": jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32),
    "last": jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32),
}
EXAMPLES = jax.ShapeDtypeStruct((BATCH, SIZE), jnp.float32)
CLUSTER = preset("dgx-a100-80gb")


def loss_of(weights, x):
    return jnp.mean((jnp.tanh(x @ weights["first"]) @ weights["last"]) ** 2)


def step(weights, x):
    loss, gradients = jax.value_and_grad(loss_of)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def scanned_step(weights, x):
    """Two layers in a scan."""

    def loss_in_scan(stack):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0] ** 2)

    stack = jnp.stack([weights["first"], weights["last"]])
    loss, gradient = jax.value_and_grad(loss_in_scan)(stack)
    new = stack - 0.1 * gradient
    return {"first": new[0], "last": new[1]}, loss


def orthogonal_step(weights, x):
    """An optimizer that multiplies matrices."""
    gradients = jax.grad(loss_of)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g @ (g.T @ g), weights, gradients), jnp.zeros(())


def traced_of(fun):
    signature = CallSignature(fun, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, (WEIGHTS, EXAMPLES), {}))


def products(program: Program):
    return [eqn for eqn in program.walk() if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("fun", [step, scanned_step])
def test_weights_are_early_activations_awaited_and_gradients_late(fun, microbatches):
    traced = cut_into_microbatches(traced_of(fun), microbatches)
    needs = find_needs(traced)
    leaves = zip(traced.program.invars, traced.inputs, strict=True)
    assert {leaf.role: needs.of(v) for v, leaf in leaves} == {"state": Need.EARLY, "batch": Need.AWAITED}
    assert {needs.of(v) for v in traced.program.outvars} == {Need.LATE}
    made = [needs.of(eqn.outvars[0]) for eqn in products(traced.program)]
    per_layer = 1 if fun is scanned_step else 2
    assert made.count(Need.LATE) == per_layer  # the gradients of the weights
    assert made.count(Need.AWAITED) == len(made) - per_layer
    for eqn in products(traced.program):
        assert all(needs.of(v) is not Need.LATE for v in eqn.invars)


def test_gradients_that_an_optimizer_multiplies_are_awaited():
    traced = traced_of(orthogonal_step)
    needs = find_needs(traced)
    gradients = [eqn for eqn in products(traced.program)[2:5] if eqn.outvars[0].aval.shape == (SIZE, SIZE)]
    assert gradients
    assert all(needs.of(eqn.outvars[0]) is Need.AWAITED for eqn in gradients)


def test_what_stands_beside_a_collective():
    assert kind_of(Need.EARLY, "all-gather") == "zero3"
    assert kind_of(Need.AWAITED, "all-to-all") == "expert"
    assert window("expert", "all-to-all", times=1, microbatches=1) == 0
    assert window("data_parallel", "all-reduce", times=1, microbatches=4) == pytest.approx(2 / 3 / 4)
    assert window("data_parallel", "all-reduce", times=4, microbatches=4) == pytest.approx(2 / 3)
    assert window("data_parallel", "all-gather", times=1, microbatches=1) == pytest.approx(1 / 3)
    overlap = Overlap({"data_parallel": 0.5}, interference=0.1)
    (found,) = hide(
        [Moved("data_parallel", 0.5, 1.0), Moved("data_parallel", 0.5, 2.0)], compute_s=10.0, overlap=overlap
    ).values()
    assert found.total_s == 3.0
    assert found.exposed_s == pytest.approx(3.0 - 1.5 + 0.15)
    (found,) = hide([Moved("data_parallel", 0.5, 3.0)], compute_s=2.0, overlap=overlap).values()
    assert found.exposed_s == pytest.approx(3.0 - 1.0 + 0.1)  # the window is one second


def plan_of(cluster, batch=BATCH, **options):
    examples = jax.ShapeDtypeStruct((batch, SIZE), jnp.float32)
    return autopar.parallelize(step, devices=8, cluster=cluster, batch_argnums=1, **options).plan(WEIGHTS, examples)


def test_of_gradients_in_buckets_one_bucket_stands_alone_at_the_end():
    """Ten seconds in four buckets, whatever part the file estimates, unless that is none: launches block."""
    overlap = Overlap({"data_parallel": 0.5, "tensor": 0.5}, bucket_bytes=25.0)
    for compute_s, hidden_s in ((100.0, 7.5), (8.0, 3.0)):
        moves = [Moved("data_parallel", 0.5, 4.0, 40.0), Moved("data_parallel", 0.5, 6.0, 60.0)]
        (found,) = hide(moves, compute_s=compute_s, overlap=overlap).values()
        assert found.hidden_s == pytest.approx(hidden_s)
        (found,) = hide(moves, compute_s=compute_s, overlap=Overlap({}, bucket_bytes=25.0)).values()
        assert found.hidden_s == 0
    (found,) = hide([Moved("tensor", 0.5, 10.0, 100.0)], compute_s=100.0, overlap=overlap).values()
    assert found.hidden_s == pytest.approx(5.0)


@pytest.mark.parametrize("size", [1e3, 1e5, 1e9])
def test_a_plan_a_simulator_and_a_bound_know_the_buckets_of_a_cluster(size):
    cluster = dataclasses.replace(CLUSTER, overlap=Overlap({"data_parallel": 0.5, "zero3": 0.5}, 0.1, size))
    plan = plan_of(cluster, 65536, mesh_shape=(8,), constraints=autopar.data_parallel())
    assert plan.step_s == pytest.approx(reprice(plan, cluster).step_s, rel=1e-9)
    late = [item for item in plan.collectives if item.overlap == "data_parallel"]
    for is_sum in (True, False):
        moved = [item for item in late if (item.kind in SUMS) == is_sum]
        total_s, hidden_s = (
            sum(item.count * getattr(item, name) for item in moved) for name in ("predicted_s", "hidden_s")
        )
        buckets = math.ceil(sum(item.count * item.bytes for item in moved) / size)
        assert hidden_s == pytest.approx(0.9 * (1 - 1 / buckets) * total_s if moved else 0.0)
    assert late
    free = plan_of(cluster, 65536, mesh_shape=(8,))
    assert free.lower_bound_s <= free.step_s <= plan.step_s * (1 + 1e-9)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_plan_the_simulator_and_the_report_split_a_step_alike(microbatches):
    plan = plan_of(CLUSTER, mesh_shape=(8,), constraints=autopar.data_parallel(), num_microbatches=microbatches)
    again, kinds = reprice(plan, CLUSTER), overlap_of(plan, CLUSTER)
    assert plan.hidden_s > 0
    assert plan.comm_s == pytest.approx(sum(item.count * item.predicted_s for item in plan.collectives), rel=1e-12)
    assert plan.step_s == pytest.approx(again.step_s, rel=1e-9)
    assert plan.compute_s == pytest.approx(again.compute_s, rel=1e-9)
    assert plan.hidden_s == pytest.approx(sum(one.hidden_s for one in kinds.values()), rel=1e-9)
    assert "hidden behind compute" in autopar.explain.explain(plan)


def test_the_search_hides_what_the_simulator_hides():
    """With compute enough beside it, data parallelism wins where without overlap it loses."""
    exposed = dataclasses.replace(CLUSTER, overlap=Overlap())
    hidden = dataclasses.replace(CLUSTER, overlap=Overlap({"data_parallel": 1.0, "zero3": 1.0}))
    batch = 4096
    most = plan_of(hidden, batch, constraints=autopar.data_parallel(), mesh_shape=(8,))
    assert most.hidden_s == pytest.approx(most.comm_s, rel=0.05)
    free, paid = plan_of(hidden, batch), plan_of(exposed, batch)
    assert free.step_s < paid.step_s
    assert free.step_s <= most.step_s * (1 + 1e-6)
    assert paid.hidden_s == 0.0
    assert reprice(paid, hidden, planned_for=exposed).step_s >= free.step_s * (1 - 1e-6)


def test_a_search_that_took_too_much_hiding_for_granted_searches_again():
    """A few examples: the compute beside the gradients' reduction hides next to nothing of it."""
    cluster = dataclasses.replace(CLUSTER, overlap=Overlap({"data_parallel": 1.0, "zero3": 1.0}))
    mesh = (LogicalMesh.of((8,)),)
    found = plan_of(cluster, 8, mesh_shape=mesh[0].shape)
    by_hand = [
        plan_of(cluster, 8, mesh_shape=(8,), constraints=rules)
        for rules in (
            autopar.data_parallel(),
            {"weights/*": jax.sharding.PartitionSpec("x")},
            {"weights/*": autopar.Replicated()},
        )
    ]
    exposed = plan_of(dataclasses.replace(CLUSTER, overlap=Overlap()), 8, mesh_shape=(8,))
    assert found.step_s <= min(one.step_s for one in by_hand) * (1 + 1e-6)
    assert found.step_s <= exposed.step_s * (1 + 1e-6)
    assert found.lower_bound_s <= found.step_s
