"""Attention whose sequence is split over all devices goes around a ring, equals `jax.jit`, and its plan can be kept in a file."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import autopar

SHAPE = (8, 64, 4, 8)


def step(state, batch):
    def loss_fn(w):
        q = (batch["x"] @ w).reshape(SHAPE)
        return jnp.mean(autopar.dot_product_attention(q, 2 * q, 3 * q, is_causal=True) ** 2)

    loss, gradient = jax.value_and_grad(loss_fn)(state["w"])
    return {"w": state["w"] - 0.1 * gradient}, loss


def test_a_ring_over_eight_devices_equals_jit_and_its_plan_is_kept_in_a_file():
    state = {"w": 0.1 * jax.random.normal(jax.random.key(0), (32, 32))}
    batch = {"x": jax.random.normal(jax.random.key(1), (8, 64, 32))}
    wishes = {
        "mesh_shape": (8,),
        "constraints": {"batch/x": P(None, "x")},
        "collectives": ("collective-permute", "all-reduce"),
    }
    plan = autopar.parallelize(step, **wishes).plan(state, batch)
    exchanged = [item for item in plan.collectives if item.overlap == "within"]
    assert exchanged
    assert {item.kind for item in exchanged} == {"collective-permute"}

    kept = autopar.plan_from_json(plan.to_json())
    assert kept == plan
    expected = jax.jit(step)(state, batch)
    found = autopar.parallelize(step, plan=kept, **wishes)(jax.tree.map(jnp.copy, state), batch)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
