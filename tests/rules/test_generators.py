"""Every generator of JAX gives the numbers of `jax.jit`, however its bits, and those of arrays of keys, are divided."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.program.from_jaxpr import program_of
from autopar.rules.table import rule_for
from autopar.testing import run_with_random_strategies
from tests.oracles import assert_trees_close

HASHES = ("threefry2x32", "threefry4x32", "philox2x32", "philox4x32")
GENERATORS = (*HASHES, "rbg", "unsafe_rbg")
QUICK = ("threefry2x32", "philox4x32", "rbg")
"""One of each kind: JAX's own, those that differ in their words and rounds alone, and those that draw in one operation."""
KEYS = 8


def draw(key, x, *, generator):
    """Bits of all widths, of one key and of an array of keys, and keys that are made on the way."""
    first, second, third = jax.random.split(key, 3)
    keys = jax.random.split(third, KEYS)
    folded = jax.vmap(jax.random.fold_in)(keys, jnp.arange(KEYS))
    seeded = jax.random.key(x.sum().astype(jnp.int32), impl=generator)
    return (
        [jax.random.key_data(one) for one in (keys, folded, seeded)],
        [jax.random.bits(first, (4, 6), dtype) for dtype in (jnp.uint8, jnp.uint16, jnp.uint32)],
        jax.vmap(lambda one: jax.random.bits(one, (6,)))(folded),
        x * jax.random.bernoulli(second, 0.5, x.shape),
    )


def assert_same(fun, generator, seed):
    arguments = jax.random.key(3, impl=generator), np.ones((8, 4), np.float32)
    actual = run_with_random_strategies(fun, *arguments, mesh_shape=(2, 2), seed=seed)
    jax.tree.map(np.testing.assert_array_equal, actual, jax.jit(fun)(*arguments))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("generator", "seed"),
    [
        pytest.param(name, seed, marks=[] if seed == 0 and name in QUICK else pytest.mark.slow)
        for name, seed in itertools.product(GENERATORS, range(8))
    ],
)
def test_bits_and_keys_of_every_generator_are_those_of_jit(generator, seed):
    assert_same(functools.partial(draw, generator=generator), generator, seed)


@pytest.mark.parametrize(
    "generator", ["rbg", *(pytest.param(name, marks=pytest.mark.slow) for name in GENERATORS if name != "rbg")]
)
def test_samples_that_are_drawn_until_one_is_accepted_are_those_of_jit(generator):
    def gammas(key, x):
        return jax.random.gamma(key, 2 * x[:, 0])

    arguments = jax.random.key(3, impl=generator), np.ones((8, 4), np.float32)
    actual = run_with_random_strategies(gammas, *arguments, mesh_shape=(2, 2), seed=0)
    assert_trees_close(actual, jax.jit(gammas)(*arguments), rtol_of_scale=1e-5)


@pytest.mark.parametrize("generator", HASHES)
def test_bits_of_an_array_of_keys_are_divided_by_keys_and_by_positions(generator):
    keys = jax.random.split(jax.random.key(3, impl=generator), KEYS)
    closed = jax.make_jaxpr(jax.vmap(lambda one: jax.random.bits(one, (6,))))(keys)
    hashes = [eqn for eqn in program_of(closed)[0].equations if eqn.primitive.name == generator]
    assert {v.aval.shape for eqn in hashes for v in eqn.outvars} == {(KEYS, 6)}
    assert not any(rule_for(eqn).whole for eqn in hashes)


def test_a_step_with_a_key_of_philox_trains_as_with_jit():
    def step(state, batch):
        key, drawn = jax.random.split(state["key"])
        loss, gradient = jax.value_and_grad(
            lambda w: jnp.mean((batch * jax.random.bernoulli(drawn, 0.5, batch.shape) @ w) ** 2)
        )(state["w"])
        return {"key": key, "w": state["w"] - 0.1 * gradient}, loss

    state = {"key": jax.random.key(1, impl="philox4x32"), "w": jnp.eye(4)}
    batch = np.ones((8, 4), np.float32)
    plan = {"mesh_shape": (4,), "constraints": autopar.data_parallel(), "donate_argnums": ()}
    actual, expected = autopar.parallelize(step, **plan)(state, batch), jax.jit(step)(state, batch)
    np.testing.assert_array_equal(*(jax.random.key_data(made["key"]) for made, _ in (actual, expected)))
    assert_trees_close((actual[0]["w"], actual[1]), (expected[0]["w"], expected[1]), rtol_of_scale=1e-6)
