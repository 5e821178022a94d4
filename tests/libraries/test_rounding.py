"""The yardstick of the corpus: it excuses what rounding does to a step, and no wrong number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.libraries.corpus import BATCH, noise
from tests.libraries.rounding import moved_by_rounding, spread_of_rounding, two_steps

FEATURES = 6


@jax.jit
def normed(step_size, params, x):
    """Gradient descent through a norm whose variance is the difference of two means: the bias in front of it has no gradient."""

    def loss_of(params):
        h = x @ params["w"] + params["b"]
        mean = h.mean(-1, keepdims=True)
        variance = (h * h).mean(-1, keepdims=True) - mean * mean
        return (jnp.tanh((h - mean) / jnp.sqrt(variance + 1e-6)) * params["out"]).sum()

    return jax.tree.map(lambda leaf, slope: leaf - step_size * slope, params, jax.grad(loss_of)(params)), None


@pytest.fixture(scope="module")
def example():
    """(params, x, what jit returns, the spread) with activations around 30, so that the difference of means cancels."""
    params = {"w": noise(3, FEATURES), "b": jnp.full(FEATURES, 30.0), "out": noise(FEATURES)}
    x = noise(BATCH, 3)
    run = functools.partial(normed, 0.1)
    expected = two_steps(run, params, x)
    return params, x, expected, spread_of_rounding(run, params, x, expected)


def test_the_spread_bounds_the_error_of_jit_itself(example):
    params, x, expected, spread = example
    with jax.enable_x64(True):
        exact = normed(0.1, *jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (params, x)))
    for name, wanted in exact[0].items():
        error = np.abs(np.asarray(expected[0][0][name], np.float64) - np.asarray(wanted)).max()
        assert error <= 8 * spread[0][f"[0]['{name}']"], name


def test_the_spread_is_far_above_the_last_place_only_where_the_step_cancels(example):
    params, x, _, spread = example
    ulp = float(jnp.finfo(jnp.float32).eps)
    assert spread[0]["[0]['w']"] > 20 * ulp * float(jnp.abs(params["w"]).max())
    run = jax.jit(lambda params, x: (params * 0.9 + x.mean(), None))
    plain = spread_of_rounding(run, params["w"], x, two_steps(run, params["w"], x))
    assert plain[1]["[0]"] < 4 * ulp * float(jnp.abs(params["w"]).max())


def test_a_wrong_number_is_far_outside_of_the_spread(example):
    params, x, expected, spread = example
    wrong = normed(0.1 * 1.02, params, x)
    for name in ("w", "out"):
        error = np.abs(np.asarray(expected[0][0][name]) - np.asarray(wrong[0][name])).max()
        assert error > 8 * spread[0][f"[0]['{name}']"], name


def test_numbers_move_by_their_last_place_and_nothing_else_moves():
    tree = {"x": noise(64), "n": jnp.arange(4), "key": jax.random.key(0), "half": jnp.ones(64, jnp.bfloat16)}
    moved = moved_by_rounding(tree, 0)
    assert {name: leaf.dtype for name, leaf in moved.items()} == {name: leaf.dtype for name, leaf in tree.items()}
    assert 0 < float(jnp.abs(moved["x"] / tree["x"] - 1).max()) <= 2.5e-7
    assert 0 < float(jnp.abs(moved["half"] - 1).max()) <= 2**-7
    assert (moved["n"] == tree["n"]).all()
    assert moved["key"] is tree["key"]
    assert moved_by_rounding({"count": 3}, 0) == {"count": 3}
