"""Which dimensions a reduction reduces, however its primitive names them, and that a plan for GPUs can ask for it."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.rules.reductions import reduced_dimensions

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def reduce_by_function(x):
    return jax.lax.reduce(x, jnp.float32(0), lambda a, b: a + b * b, (1,))


def reduce_all(x):
    from equinox.internal import unvmap_any

    return jnp.where(unvmap_any(x > 0), x.sum(), 0.0)


@pytest.mark.parametrize(
    ("fun", "primitive", "dimensions"),
    [
        (lambda x: x.sum(0), "reduce_sum", {0}),
        (lambda x: x.argmax(1), "argmax", {1}),
        (reduce_by_function, "reduce", {1}),
        (reduce_all, "unvmap_any", {0, 1}),
    ],
    ids=["sum", "argmax", "by a function", "of all"],
)
def test_the_dimensions_of_a_reduction_by_hand_and_in_a_plan_for_gpus(fun, primitive, dimensions):
    (eqn,) = (eqn for eqn in jax.make_jaxpr(fun)(X).eqns if eqn.primitive.name == primitive)
    assert reduced_dimensions(eqn) == dimensions
    assert autopar.parallelize(fun, devices=8, cluster="dgx-a100", batch_argnums=()).plan(X).step_s > 0
