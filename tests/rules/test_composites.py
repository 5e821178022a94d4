"""Operations that JAX defines by others, and generic ones: they are divided, and random strategies change no result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

from autopar.layouts.monoids import all_reduce
from autopar.program.from_jaxpr import program_of
from autopar.rules.table import has_rule, rule_for
from autopar.testing import run_with_random_strategies
from tests.oracles import assert_trees_close
from tests.rules.examples import MATRICES, floats

SIDES = floats(8, 4, 12)


def sparse_matrices():
    """A matrix in JAX's two sparse formats, made without a compilation."""
    dense = np.asarray(floats(8, 12))
    places = np.argwhere(dense > 0.5)
    entries, ends = jnp.asarray(dense[dense > 0.5]), np.cumsum([0, *(dense > 0.5).sum(axis=1)])
    sorted_once = {"indices_sorted": True, "unique_indices": True}
    by_place = sparse.BCOO((entries, jnp.asarray(places.astype(np.int32))), shape=dense.shape, **sorted_once)
    row_ends = jnp.asarray(ends.astype(np.int32))
    by_row = sparse.BCSR((entries, by_place.indices[:, 1], row_ends), shape=dense.shape, **sorted_once)
    return by_place, by_row


SPARSE, ROWS = sparse_matrices()
COUNTS = jnp.asarray([3, 0, 7, 2], jnp.int32)


def gradients_of_ragged_dot(x, w):
    return jax.grad(lambda x, w: jnp.sum(lax.ragged_dot(x, w, COUNTS) ** 2), argnums=(0, 1))(x, w)


def gradient_of_sparse_product(data, x):
    product = sparse.BCOO((data, SPARSE.indices), shape=SPARSE.shape)
    return jax.grad(lambda d, x: jnp.sum((sparse.BCOO((d, product.indices), shape=product.shape) @ x) ** 2))(data, x)


def largest_with_its_place(x, places):
    def larger(a, b):
        return jax.tree.map(lambda u, v: jnp.where(a[0] > b[0], u, v), a, b)

    return lax.reduce((x, places), (np.float32(-1), np.int32(0)), larger, (1,))


PROGRAMS = {
    "bcoo": (lambda m, x: m @ x, SPARSE, floats(12, 8)),
    "bcoo_gradient": (gradient_of_sparse_product, SPARSE.data, floats(12, 8)),
    "bcoo_transposed": (lambda m: m.T.todense(), SPARSE),
    "bcsr": (lambda m, x: m @ x, ROWS, floats(12, 8)),
    "conjugate_gradients": (lambda a, b: jax.scipy.sparse.linalg.cg(a, b)[0], MATRICES[0], SIDES[0, :, 0]),
    "gamma_gradient": (
        lambda key, a: jax.grad(lambda a: jax.random.gamma(key, a).sum())(a),
        jax.random.key(0),
        3 * floats(4, 6),
    ),
    "linear_call": (
        lambda x: jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, c: r * c, floats(8, 6), x),
        floats(8, 6),
    ),
    "ragged_dot_gradients": (gradients_of_ragged_dot, floats(12, 8), floats(4, 8, 6)),
    "reduce_of_two": (largest_with_its_place, floats(8, 12), jnp.arange(96, dtype=jnp.int32).reshape(8, 12)),
    "solve": (jnp.linalg.solve, MATRICES, SIDES),
    "solve_gradient": (jax.grad(lambda a, b: jnp.linalg.solve(a, b).sum()), MATRICES, SIDES),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "gamma_gradient" else name for name in PROGRAMS]
)
def test_random_strategies_change_no_result(name):
    fun, *arguments = PROGRAMS[name]
    expected = jax.tree.leaves(jax.jit(fun)(*arguments))
    for seed, mesh_shape in enumerate(((2, 2), (3, 2))):
        actual = run_with_random_strategies(fun, *arguments, mesh_shape=mesh_shape, seed=seed)
        assert_trees_close(jax.tree.leaves(actual), expected)


@pytest.mark.parametrize("name", ["bcoo", "bcsr", "linear_call", "ragged_dot_gradients", "solve", "solve_gradient"])
def test_every_operation_has_a_rule_and_some_can_be_divided(name):
    fun, *arguments = PROGRAMS[name]
    program, _ = program_of(jax.make_jaxpr(fun)(*arguments))
    equations = [eqn for eqn in program.equations if eqn.primitive.name != "fan_out"]
    assert all(has_rule(eqn) for eqn in equations)
    assert any(rule_for(eqn).shardable() for eqn in equations)


def test_the_sum_of_a_complex_constant_over_devices_does_not_end_the_process():
    """It ends with `jax.lax.psum` of the constant: XLA's simplifier knows no product of a complex constant and a number."""
    mesh, spec = jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec()

    def add(x):
        return x + all_reduce(jnp.full((1, 9), 0.5 - 1j, x.dtype), ("x",), "sum")

    total = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    np.testing.assert_array_equal(total(jnp.ones((1, 9), jnp.complex64)), np.full((1, 9), 2 - 2j))
