"""A user's `jax.shard_map` inside a step: opened to whole arrays it computes what `jax.jit` computes on the user's own mesh."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compat import make_mesh
from autopar.errors import UnsupportedProgramError
from tests.oracles import assert_trees_close

X = jax.random.normal(jax.random.key(0), (16, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 3
RING = [(i, (i + 1) % 4) for i in range(4)]


def mesh():
    return make_mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("d", "m"))


def mapped(body, in_specs, out_specs, **settings):
    return jax.shard_map(body, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, **settings)


def in_scan(x):
    return lax.scan(lambda c, _: (jnp.sin(c) + lax.pmean(c, "d") * 0.1, None), x, None, length=2)[0]


def in_while(x):
    return lax.while_loop(lambda c: lax.pmax(jnp.max(jnp.abs(c)), ("d", "m")) > 0.5, lambda c: c * 0.7, x)


def in_branches(x):
    return lax.cond(lax.axis_index("d") % 2 == 0, jnp.sin, lambda v: v * lax.axis_size("d"), x)


def in_a_call(x):
    return jax.checkpoint(lambda v: jax.nn.relu(lax.psum(v, "m") * v))(x)


def shifted_on_two_axes(x):
    return lax.ppermute(lax.ppermute(x, "d", RING), "m", [(0, 1)])


def with_random_bits(x):
    key = jax.random.fold_in(jax.random.key(3), lax.axis_index("d"))
    return x * jax.random.bernoulli(key, 0.5, x.shape)


def inside_another(x):
    return jax.shard_map(lambda v: v * 2 + lax.axis_index("m"), in_specs=P(None, "m"), out_specs=P(None, "m"))(x)


ROWS, BOTH = P("d"), P("d", "m")
BODIES = {
    "elementwise": (lambda x: x * 2, BOTH, BOTH, {}),
    "sums": (lambda x: lax.psum(x, "d") - lax.psum(jnp.sum(x), ("d", "m")), BOTH, P(None, "m"), {}),
    "extremes": (lambda x: lax.pmax(x, "d") + lax.pmin(x, ("m", "d")), BOTH, P(), {"check_vma": False}),
    "gather": (lambda x: lax.all_gather(x, "d", tiled=True) * lax.axis_index("d"), ROWS, ROWS, {}),
    "gather of both": (lambda x: lax.all_gather(x, ("d", "m")).sum(0), BOTH, BOTH, {"check_vma": False}),
    "scatter": (lambda x: lax.psum_scatter(x, "d", scatter_dimension=1, tiled=True), ROWS, P("d", None), {}),
    "scatter over both": (
        lambda x: lax.psum_scatter(x, ("m", "d"), scatter_dimension=1, tiled=True),
        P(("d", "m")),
        P(None, ("m", "d")),
        {},
    ),
    "all to all": (lambda x: lax.all_to_all(x, "d", 1, 0, tiled=True), ROWS, ROWS, {}),
    "permute": (shifted_on_two_axes, BOTH, BOTH, {}),
    "scan": (in_scan, BOTH, BOTH, {}),
    "while": (in_while, BOTH, BOTH, {"check_vma": False}),
    "branches": (in_branches, BOTH, BOTH, {}),
    "call": (in_a_call, BOTH, BOTH, {}),
    "one dimension cut by both axes": (lambda x: jnp.cumsum(x, 0), P(("m", "d")), P(("d", "m")), {}),
    "random bits": (with_random_bits, ROWS, ROWS, {}),
    "one axis alone": (lambda x: jnp.cumsum(x, 0), ROWS, ROWS, {"axis_names": {"d"}}),
    "inside another": (inside_another, ROWS, ROWS, {"axis_names": {"d"}, "check_vma": False}),
}
NOT_DIFFERENTIABLE = {"while", "extremes"}


def all_islands(w, x):
    """What every body computes, with its gradient where it has one."""
    results = {}
    for name, (body, in_spec, out_spec, settings) in BODIES.items():
        island = mapped(body, in_spec, out_spec, **settings)

        def loss(w, island=island):
            y = island(jnp.tanh(x @ w))
            return jnp.mean(y**2), y

        run = loss if name in NOT_DIFFERENTIABLE else jax.value_and_grad(loss, has_aux=True)
        results[name] = run(w)
    return w, results


@pytest.mark.slow  # programs of eight devices take XLA's CPU seconds to compile
def test_islands_compute_what_jit_computes_on_their_mesh():
    expected = jax.jit(all_islands)(W, X)
    step = autopar.parallelize(all_islands, mesh_shape=(4,), constraints={"x": P("x")}, donate_argnums=())
    assert_trees_close(step(W, X), expected)


def train(w, x):
    """A layer of which a sum over the user's axis is in the middle."""

    def loss(w):
        body = mapped(lambda x, w: lax.psum(jnp.tanh(x @ w), "m"), (BOTH, P("m")), ROWS)
        return jnp.mean((body(x, w) @ w.T) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def test_a_step_with_an_island_is_split_as_others_are():
    step = autopar.parallelize(train, mesh_shape=(2,), constraints=autopar.data_parallel(), num_microbatches=2)
    assert_trees_close(step(jnp.copy(W), X), jax.jit(train)(W, X))
    assert {c.kind for c in step.last_plan().collectives} == {"all-reduce"}


def grouped_sum(x):
    return lax.psum(x, "d", axis_index_groups=[[0, 1], [2, 3]])


def foreign_bits(x):
    return x + jax.random.uniform(jax.random.key(lax.axis_index("d"), impl="rbg"), x.shape)


@pytest.mark.parametrize(("body", "operation"), [(grouped_sum, "psum"), (foreign_bits, "random_bits")])
def test_an_island_that_has_no_meaning_for_whole_arrays_is_refused_at_its_line(body, operation):
    island = mapped(body, ROWS, ROWS, check_vma=False)
    with pytest.raises(UnsupportedProgramError, match=r"calls jax.shard_map at ") as caught:
        autopar.parallelize(lambda w, x: (w, island(x)), mesh_shape=(4,)).plan(W, X)
    text, calls = str(caught.value), inspect.currentframe().f_lineno - 1
    assert f"{Path(__file__).name}:{calls}:" in text
    assert f" with {operation} at " in text
