"""`layer_boundary` marks where stages may begin, and changes nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError
from tests.oracles import assert_same_as_jit, assert_trees_close


def marked_step(places, layers=4):
    """Layers of equal work, with boundaries before those in `places`."""

    def step(weights, x):
        def loss(weights):
            h = x
            for i in range(layers):
                h = autopar.layer_boundary(h) if i in places else h
                h = jnp.tanh(h @ weights[i])
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32) for _ in range(layers)]
    return step, weights, jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)


def test_a_boundary_is_the_identity_under_jit_grad_vmap_and_on_trees():
    tree = {"a": jnp.arange(3.0), "b": (jnp.ones((2, 2)),)}
    assert_trees_close(jax.jit(autopar.layer_boundary)(tree), tree)
    assert jax.grad(lambda x: jnp.sum(autopar.layer_boundary(x) ** 2))(3.0) == 6.0
    assert_trees_close(jax.vmap(autopar.layer_boundary)(tree["a"]), tree["a"])


@pytest.mark.parametrize(("places", "homes"), [((1,), [0, 1, 1, 1]), ((3,), [0, 0, 0, 1]), ((1, 2, 3), [0, 0, 1, 1])])
def test_stages_begin_at_boundaries_nearest_to_equal_work(places, homes):
    step, weights, x = marked_step(places)
    plan = autopar.parallelize(step, devices=2, num_stages=2, num_microbatches=2).plan(weights, x)
    assert [plan.stage_of(f"weights/{i}") for i in range(4)] == homes


def test_a_step_with_boundaries_runs_in_stages_like_jit():
    step, weights, x = marked_step((1, 3))
    assert_same_as_jit(step, autopar.parallelize(step, devices=2, num_stages=2, num_microbatches=2), weights, x)


def test_too_few_boundaries_are_an_error_that_counts_them():
    step, weights, x = marked_step((2,))
    with pytest.raises(ArgumentError, match="the step has 1 layer boundaries, 4 stages need 3"):
        autopar.parallelize(step, devices=4, num_stages=4, num_microbatches=2).plan(weights, x)
