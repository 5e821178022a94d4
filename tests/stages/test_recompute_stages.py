"""Recomputation changes what stays between forward and backward, and no result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.pipeline_plan import plan_from_json
from tests.oracles import assert_same_as_jit

TWO_STAGES = {"devices": 4, "num_stages": 2, "num_microbatches": 4, "mesh_shape": (2,)}


def arguments(width=16, layers=4, batch=16):
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32) for _ in range(layers)]
    return (weights, jax.random.key(1)), jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)


def step(state, x):
    """A perceptron with dropout after every layer, whose masks come from a key in the state."""
    weights, key = state

    def loss(weights):
        h = x
        for number, w in enumerate(weights):
            h = jnp.tanh(h @ w)
            h = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, h.shape), h / 0.7, 0)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return (jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), jax.random.fold_in(key, 7)), value


def planned(recompute, **options):
    return autopar.parallelize(step, recompute=recompute, **TWO_STAGES, **options).plan(*arguments())


def test_a_stage_that_recomputes_keeps_less_works_more_and_computes_the_same():
    before, after = planned("none"), planned("layer")
    assert (before.recompute, after.recompute) == (False, True)
    assert after.stages[0].peak_bytes < before.stages[0].peak_bytes
    assert after.stages[0].plan.compute_s > before.stages[0].plan.compute_s
    assert plan_from_json(after.to_json()) == after
    assert_same_as_jit(step, autopar.parallelize(step, recompute="layer", **TWO_STAGES), *arguments())


def test_a_plan_that_recomputes_can_be_used_again():
    restored = autopar.parallelize(step, plan=planned("layer"))
    assert_same_as_jit(step, restored, *arguments(), steps=1)


def test_what_needs_no_recomputation_does_none():
    assert not planned("auto").recompute


def test_only_known_kinds_of_recomputation_are_accepted():
    with pytest.raises(ArgumentError, match=r"recompute='some': one of 'auto', 'none', 'layer' is expected"):
        autopar.parallelize(step, recompute="some")
