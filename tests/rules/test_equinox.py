"""Primitives of equinox, which diffrax's loops are made of: here with the names and the meaning that they have there."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autopar
from autopar.program.from_jaxpr import program_of
from autopar.rules.table import rule_for
from autopar.testing import run_with_random_strategies


def primitive(name, compute, aval):
    made = Primitive(name)
    made.def_impl(compute)
    made.def_abstract_eval(aval)
    mlir.register_lowering(made, mlir.lower_fun(compute, multiple_results=False))
    return made


def truth(x):
    return jax.core.ShapedArray((), jnp.bool_)


IDENTITY = [
    primitive(name, lambda x: x, lambda x: x) for name in ("nonbatchable", "nondifferentiable_backward", "nontraceable")
]
SELECT = primitive("select_if_vmap", lambda pred, x, y: x, lambda pred, x, y: x)
ANY, ALL = primitive("unvmap_any", jnp.any, truth), primitive("unvmap_all", jnp.all, truth)
MAX = primitive("unvmap_max", jnp.max, lambda x: jax.core.ShapedArray((), x.dtype))
X = jnp.asarray(np.random.default_rng(0).integers(-50, 50, size=(8, 4)), jnp.int32)


def run(x):
    y = x
    for identity in IDENTITY:
        y = identity.bind(y * 2)
    kept = SELECT.bind(x[0, 0] > 0, y, x)
    return kept, ANY.bind(x > 48), ALL.bind(x < 50), MAX.bind(x), ANY.bind(x > 50)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_they_compute_the_same_on_shards(mesh_shape):
    for seed in range(3):
        actual = run_with_random_strategies(run, X, mesh_shape=mesh_shape, seed=seed)
        jax.tree.map(np.testing.assert_array_equal, actual, run(X))


def test_all_of_them_can_be_split():
    program, _ = program_of(jax.make_jaxpr(run)(X))
    names = {eqn.primitive.name: rule_for(eqn) for eqn in program.equations}
    split = [names[p.name].shardable() for p in (*IDENTITY, SELECT, ANY, ALL, MAX)]
    assert split == [("a", "b")] * 7


def scaled(x, w):
    """tanh(x) w, by a primitive as lineax and equinox's loops make theirs: mapped, it becomes a `vprim`."""
    return SCALED.bind(x, w)[0]


def scaled_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, map(jax.interpreters.ad.instantiate_zeros, tangents)
    return SCALED.bind(x, w), [(1 - jnp.tanh(x) ** 2) * dx * w + jnp.tanh(x) * dw]


SCALED = eqxi.create_vprim("scaled", lambda x, w: [jnp.tanh(x) * w], lambda x, w: [x], scaled_jvp, None)


def vprim_step(w, batch):
    def loss_of(w):
        made = jax.vmap(jax.vmap(scaled, in_axes=(0, 0)), in_axes=(0, None))(batch["x"], w)
        return jnp.mean((made - batch["y"]) ** 2) + scaled(w.sum(), w[0])

    loss, gradient = jax.value_and_grad(loss_of)(w)
    return w - 0.1 * gradient, loss


@pytest.mark.parametrize(
    "way", [{"constraints": autopar.data_parallel()}, {"num_microbatches": 2}], ids=["data parallel", "microbatches"]
)
def test_a_primitive_that_equinox_maps_is_planned_as_what_it_computes(way):
    """Without the warning of an unknown primitive, which is an error here."""
    batch = {"x": X.astype(jnp.float32) / 50, "y": jnp.ones((8, 4), jnp.float32)}
    step = autopar.parallelize(vprim_step, mesh_shape=(2,), **way)
    actual, expected = step(jnp.arange(4.0) / 4, batch), jax.jit(vprim_step)(jnp.arange(4.0) / 4, batch)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)
