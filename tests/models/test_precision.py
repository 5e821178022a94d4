"""Mixed precision: what is computed and kept in which type, and what a scaled loss does with infinities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from autopar.models import MODELS, build, precision
from autopar.models.precision import LossScale
from tests.models.conftest import SIZES, quick_jit

TINY = {"layers": 1, "hidden": 8, "inputs": 8, "outputs": 8, "batch": 8}


def equations(jaxpr):
    """Of a jaxpr and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


@functools.cache
def traced(name, **types):
    """(state, results, equations) of a model's step."""
    model = build(name, **SIZES[name], **types)
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    jaxpr, results = jax.make_jaxpr(model.train_step, return_shape=True)(state, model.batch_shape())
    return state, results, list(equations(jaxpr.jaxpr))


def floats_of(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)}


FAST = ("llama", "moe", "wide_resnet")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in FAST)]
)
def test_products_are_of_the_type_and_weights_losses_and_softmax_float32(name):
    state, (new_state, metrics), eqns = traced(name, dtype="bfloat16")
    products = {
        str(eqn.outvars[0].aval.dtype) for eqn in eqns if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    }
    assert products == {"bfloat16"}
    assert floats_of((state, new_state, metrics)) == {"float32"}
    assert jax.tree.map(lambda leaf: leaf.dtype, new_state) == jax.tree.map(lambda leaf: leaf.dtype, state)
    maxima = {str(eqn.outvars[0].aval.dtype) for eqn in eqns if eqn.primitive.name == "reduce_max"}
    assert maxima <= {"float32"}  # those that softmax subtracts


def test_weights_and_statistics_of_the_optimizer_may_be_of_a_half():
    state, (new_state, metrics), _ = traced("gpt", dtype="bfloat16", param_dtype="bfloat16")
    assert floats_of((state.params, state.opt_state, new_state.params, new_state.opt_state)) == {"bfloat16"}
    assert floats_of(metrics) == {"float32"}


@pytest.mark.parametrize(
    ("given", "told"),
    [({"dtype": "half"}, "float32, bfloat16, float16"), ({"param_dtype": "float16"}, "float32, bfloat16")],
)
def test_a_type_that_there_is_not_is_refused_with_those_that_there_are(given, told):
    with pytest.raises(ValueError, match=f"must be one of {told}$"):
        build("mlp", **given)


@functools.cache
def half_perceptron():
    """A small perceptron in float16: its compiled step, its first state and a batch."""
    model = build("mlp", **TINY, dtype="float16", learning_rate=0.01)
    return quick_jit(model.train_step), jax.jit(model.create_state)(jax.random.key(0)), next(model.data(0))


def kept(state):
    return state.params, state.opt_state


def test_an_update_with_infinities_is_left_out_and_halves_the_factor():
    step, state, batch = half_perceptron()
    broken = {**batch, "inputs": np.full_like(batch["inputs"], 1e6)}  # float16 ends at 65504
    after, _ = step(state, broken)
    jax.tree.map(np.testing.assert_array_equal, kept(after), kept(state))
    assert (float(after.loss_scale.factor), int(after.step)) == (precision.FIRST_FACTOR / 2, 1)
    onward, _ = step(after, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(kept(onward)))
    assert any(
        (a != b).any() for a, b in zip(jax.tree.leaves(onward.params), jax.tree.leaves(state.params), strict=True)
    )


def test_the_factor_changes_no_update_that_it_makes_possible():
    """It is a power of two, so gradients of float16 differ only where they leave its range."""
    step, state, batch = half_perceptron()
    results = [
        step(state.replace(loss_scale=state.loss_scale.replace(factor=jnp.float32(factor))), batch)[0].params
        for factor in (2.0**10, 2.0**12)
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), *results)


def test_a_gradient_too_small_for_float16_trains_with_the_factor_and_vanishes_without():
    step, state, batch = half_perceptron()
    faint = state.replace(params=jax.tree.map(lambda leaf: leaf * 2.0**-18, state.params))
    moved = {
        factor: step(faint.replace(loss_scale=state.loss_scale.replace(factor=jnp.float32(factor))), batch)[0].opt_state
        for factor in (1.0, precision.FIRST_FACTOR)
    }
    zeros = {
        factor: sum(int((leaf == 0).sum()) for leaf in jax.tree.leaves(state) if leaf.ndim)
        for factor, state in moved.items()
    }
    assert zeros[precision.FIRST_FACTOR] < zeros[1.0]


@pytest.mark.parametrize(
    ("factor", "good_steps", "finite", "expected"),
    [
        (8.0, 3, True, (8.0, 4)),
        (8.0, precision.GROWTH_STEPS - 1, True, (16.0, 0)),
        (8.0, 7, False, (4.0, 0)),
        (1.0, 7, False, (1.0, 0)),
        (2.0**24, precision.GROWTH_STEPS - 1, True, (2.0**24, 0)),
    ],
)
def test_the_factor_grows_after_good_steps_and_shrinks_after_a_bad_one(factor, good_steps, finite, expected):
    after = precision.next_loss_scale(LossScale(jnp.float32(factor), jnp.int32(good_steps)), jnp.array(finite))
    assert (float(after.factor), int(after.good_steps)) == expected
    assert (after.factor.dtype, after.good_steps.dtype) == (jnp.float32, jnp.int32)
