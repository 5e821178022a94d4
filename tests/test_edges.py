"""Edges that must simply work: empty trees, no arguments or results, dimensions of size 0, scalars."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.testing import run_with_random_strategies
from tests.refusals import make_batch, make_state


def test_steps_and_functions_whose_arguments_are_all_empty_run():
    def step(w, x):
        return w - x.T @ x @ w, (x @ w).sum()

    args = jnp.zeros((0, 4)), jnp.zeros((8, 0))
    random = [run_with_random_strategies(step, *args, mesh_shape=(8,), seed=seed) for seed in range(2)]
    for weights, total in (autopar.parallelize(step, batch_argnums=())(*args), *random):
        assert (weights.shape, total) == ((0, 4), 0)


def test_empty_arguments_beside_others_go_through():
    step = autopar.parallelize(lambda w, x: (x @ w).sum(axis=0), batch_argnums=())
    assert step(jnp.ones((8, 4)), jnp.zeros((0, 8))).tolist() == [0.0] * 4


def test_empty_trees_go_through():
    assert autopar.parallelize(lambda state, batch: (state, batch))({}, {}) == ({}, {})


def test_a_step_without_arguments_runs():
    assert autopar.parallelize(lambda: jnp.arange(8.0).sum())() == 28


def test_a_step_without_results_runs():
    assert autopar.parallelize(lambda state, batch: None)(make_state(), make_batch()) is None


def test_a_step_that_returns_a_python_number_runs():
    assert autopar.parallelize(lambda state, batch: (state, 3.0))(make_state(), make_batch())[1] == 3


@pytest.mark.parametrize(("weight", "examples"), [((8, 0), 16), ((8, 4), 0), ((0, 4), 16)], ids=str)
def test_dimensions_of_size_zero_work(weight, examples):
    def step(state, batch):
        return {"w": 2 * state["w"], "count": state["count"] + 1}, (batch @ state["w"]).sum(axis=0)

    def arguments():
        return {"w": jnp.ones(weight), "count": jnp.int32(0)}, jnp.ones((examples, weight[0]))

    state, total = autopar.parallelize(step)(*arguments())
    expected, expected_total = jax.jit(step)(*arguments())
    np.testing.assert_array_equal(state["w"], expected["w"])
    np.testing.assert_array_equal(total, expected_total)


@pytest.mark.parametrize(
    "arguments",
    [(jnp.float32(3), jnp.float32(2)), (3, 2.0), (np.float32(3), np.float64(2))],
    ids=["jax", "python", "numpy"],
)
def test_scalars_alone_work(arguments):
    total, product = autopar.parallelize(lambda state, batch: (state + batch, state * batch))(*arguments)
    assert (total, product) == (5, 6)
    assert total.dtype == jnp.float32
