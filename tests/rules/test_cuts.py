"""Slices and paddings along divided dimensions take their neighbours' rows, and give the numbers of `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.rules.table import rule_for
from autopar.testing import run_with_random_strategies
from tests.oracles import assert_predicted_bytes_are_real, assert_same_as_jit

ROWS = 16


def cut(first, last, stride=1):
    return lambda x: lax.slice_in_dim(x, first, last, stride)


def padded(low, high, between=0):
    return lambda x: lax.pad(x, jnp.zeros((), x.dtype), ((low, high, between), (0, 0, 0)))


DIVIDED = {
    "even rows": cut(0, ROWS, 2),
    "odd rows": cut(1, ROWS, 2),
    "every fourth row from the third": cut(2, ROWS, 4),
    "the middle": cut(2, 14),
    "all but the last": cut(0, 12),
    "all but the first": cut(4, ROWS),
    "every second row of the middle": cut(1, 15, 2),
    "between zeros": padded(1, 1),
    "behind zeros": padded(4, 0),
    "later": padded(1, -1),
    "much later": padded(5, -5),
    "earlier": padded(-3, 3),
    "with holes": padded(0, 1, 1),
    "with holes before": padded(1, 0, 1),
    "with holes and later": padded(3, -2, 1),
}
WHOLE = {"a half": cut(0, 8), "one row": cut(3, 4), "twice as long": padded(8, 8), "between": padded(1, 2, 2)}
VALUES = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)


def rule_of(fun):
    (eqn,) = jax.make_jaxpr(fun)(VALUES).jaxpr.eqns
    return rule_for(eqn)


@pytest.mark.parametrize("name", DIVIDED)
def test_what_takes_few_rows_of_others_is_divided(name):
    assert len(rule_of(DIVIDED[name]).together) == 1


@pytest.mark.parametrize("name", WHOLE)
def test_what_leaves_out_much_and_what_does_not_line_up_stays_whole(name):
    assert rule_of(WHOLE[name]).together == ()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(jnp.int4, marks=pytest.mark.slow)])
def test_cuts_and_their_gradients_are_those_of_jit_under_random_strategies(seed, dtype):
    values = VALUES.astype(dtype)

    def all_of(x):
        made = [fun(x) for fun in DIVIDED.values()]
        if dtype != np.float32:
            return made
        return made, [jax.grad(lambda y, fun=fun: (fun(y) ** 3).sum())(x) for fun in DIVIDED.values()]

    actual = run_with_random_strategies(all_of, values, mesh_shape=((2, 2), (4,))[seed % 2], seed=seed)
    jax.tree.map(np.testing.assert_array_equal, actual, jax.jit(all_of)(values))


def test_a_padding_that_is_not_zero_stays_whole():
    for value in (1.0, -0.0):
        assert rule_of(lambda x, value=value: lax.pad(x, np.float32(value), ((1, 1, 0), (0, 0, 0)))).together == ()


def test_a_step_on_the_middle_of_rows_that_are_split_sends_what_was_predicted():
    def step(state, batch):
        def loss_of(w):
            middle = cut(2, 22)(jnp.tanh(batch @ w))
            return jnp.mean((middle[0::2] * middle[1::2]) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(state)
        return state - 0.1 * gradient, loss

    state, batch = np.eye(4, dtype=np.float32), np.random.default_rng(1).normal(size=(24, 4)).astype(np.float32)
    parallel = autopar.parallelize(
        step,
        mesh_shape=(2,),
        constraints={"batch": P("x")},
        collectives=("collective-permute", "all-reduce"),
        num_microbatches=1,
        recompute="none",
    )
    compiled = parallel.compile(state, batch)
    assert "collective-permute" in {one.kind for one in compiled.plan.collectives}
    assert_predicted_bytes_are_real(compiled)
    assert_same_as_jit(step, parallel, state, batch, steps=1, rtol_of_scale=1e-5)
