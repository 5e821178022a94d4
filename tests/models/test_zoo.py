"""The zoo of train steps is what its users assume: reproducible, small, learning, and well conditioned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from tests.zoo import ZOO

NOISE, BAR = 1e-6, 2e-5


@functools.cache
def compiled_example(name):
    """The jitted step of a zoo entry with its state and batch."""
    step, state, batch = ZOO[name]()
    return jax.jit(step), state, batch


def equation_count(jaxpr):
    """Equations of a jaxpr, those of the jaxprs inside it included."""
    return sum(1 + sum(map(equation_count, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def nudged(tree, seed):
    """The tree with noise of NOISE times the scale of each floating-point leaf."""
    draw = np.random.default_rng(seed)

    def nudge(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        noise = draw.uniform(-1, 1, leaf.shape).astype(np.float32)
        return leaf + NOISE * jnp.abs(leaf).max() * noise

    return jax.tree.map(nudge, tree)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ZOO)
def test_a_step_is_reproducible_keeps_its_state_s_structure_and_learns(name):
    compiled, state, batch = compiled_example(name)
    jax.tree.map(np.testing.assert_array_equal, (state, batch), ZOO[name].__wrapped__()[1:])
    first = compiled(state, batch)
    programs = compiled._cache_size()  # other tests may have run the step of the zoo on other arguments
    jax.tree.map(np.testing.assert_array_equal, first, compiled(state, batch))
    losses = []
    for _ in range(15):
        state, loss = compiled(state, batch)
        losses.append(float(loss))
    assert compiled._cache_size() == programs
    assert losses[-1] < 0.97 * losses[0], losses


@pytest.mark.parametrize("name", ZOO)
def test_a_step_is_small_and_has_no_type_but_float32_int32_and_bool(name):
    step, state, batch = ZOO[name]()
    jaxpr = jax.make_jaxpr(step)(state, batch).jaxpr
    assert 100 < equation_count(jaxpr) < 800, equation_count(jaxpr)
    values = [out.aval for eqn in jaxpr.eqns for out in eqn.outvars] + [var.aval for var in jaxpr.invars]
    assert max(aval.size for aval in values) * 4 <= 256 * 1024
    assert {str(aval.dtype) for aval in values} <= {"float32", "int32", "bool"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ZOO)
def test_rounding_moves_a_result_by_little_of_its_scale(name):
    """Nudges ten times the size of float32 rounding grow at most twentyfold: no tie is near, and no root of zero."""
    compiled, state, batch = compiled_example(name)
    expected = compiled(state, batch)
    for seed in range(5):
        moves = jax.tree.map(relative_move, compiled(nudged(state, seed), nudged(batch, seed)), expected)
        for path, move in jax.tree.leaves_with_path(moves):
            assert move < BAR, f"{jax.tree_util.keystr(path)} moved by {move:.1e} of its scale"


def relative_move(actual, expected):
    """Largest difference over the largest entry; entries under 1e-4 everywhere count as 1e-4."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-4)
