"""What is said of operations that run, but not as a reader of the step would think: once, with the user's line."""

import inspect
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.errors import AutoparWarning
from autopar.rules.python_calls import call_with_arrays
from autopar.testing import run_with_random_strategies

W, X = jnp.ones((8, 8)), jnp.ones((16, 8))
OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device", offload_dst="pinned_host"
)


def said_of(step):
    """The texts of the warnings while a step is planned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autopar.parallelize(step, devices=4, mesh_shape=(4,)).plan(W, X)
    return [str(w.message) for w in caught if issubclass(w.category, AutoparWarning)]


def line_of(function, offset=1):
    return f"{Path(__file__).name}:{inspect.getsourcelines(function)[1] + offset}"


def calls_python(x):
    return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def offloads(w, x):
    def forward(w):
        return jnp.tanh(checkpoint_name(jnp.sin(x @ w), "kept") @ w.T)

    return jax.value_and_grad(lambda w: jnp.mean(jax.checkpoint(forward, policy=OFFLOAD)(w) ** 2))(w)


def moves(x):
    y, z = jax.device_put((x, x * 2))
    return (y + jax.device_put(z, jax.devices()[0])).sum(0)


def test_a_callback_is_warned_of_as_one_call_on_each_device():
    (message,) = said_of(lambda w, x: (w, calls_python(x @ w).sum()))
    assert "the step calls Python: pure_callback at " in message
    assert line_of(calls_python) in message
    assert "Every device gets the whole operands" in message


def test_a_callback_on_large_arrays_beside_collectives_ends():
    """JAX's own waits for ever on a CPU that is several devices, for a thread of a device that waits for the others."""
    seen = []

    def double(x):
        seen.append(type(x))
        return np.asarray(x) * 2

    def step(w, x):
        shown = jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return w - 0.1 * (x.T @ shown), jnp.sum(shown @ w)

    x = jax.random.normal(jax.random.key(0), (512, 64))
    parallel = autopar.parallelize(step, mesh_shape=(8,), constraints=autopar.data_parallel())
    with pytest.warns(AutoparWarning, match="the step calls Python: pure_callback"):
        actual = parallel(jnp.eye(64), x)
    expected = jnp.eye(64) - 0.1 * (x.T @ (2 * x)), jnp.sum(2 * x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), actual, expected)
    assert len(seen) == 8
    assert all(issubclass(kind, jax.Array) for kind in seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64", "uint32", "float16"])
def test_a_callback_is_given_equal_arrays_of_jax(dtype):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for given in (values, values[:, ::2], values[..., :0], values[0, 0, 0]):
        (same,) = call_with_arrays(lambda x: [x + 0 if x.dtype != bool else x], [np.asarray(given)])
        np.testing.assert_array_equal(same, given)
        assert same.dtype == given.dtype


def test_a_policy_that_offloads_is_warned_of_and_computes_the_same():
    (message,) = said_of(lambda w, x: offloads(w, x)[::-1])
    assert "the step puts values into the host's memory: device_put at " in message
    assert "stay in the memory of the devices" in message
    for seed in range(2):
        actual = run_with_random_strategies(offloads, W, X, mesh_shape=(4,), seed=seed)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, jax.jit(offloads)(W, X)
        )


def test_a_value_that_is_put_somewhere_is_the_value_and_stays_split():
    assert said_of(lambda w, x: (w, moves(x @ w))) == []
    step = autopar.parallelize(
        lambda x: moves(x), mesh_shape=(4,), batch_argnums=0, constraints=autopar.data_parallel()
    )
    np.testing.assert_array_equal(step(X), moves(X))
    assert [c.kind for c in step.last_plan().collectives] == ["all-reduce"]


def test_a_mean_over_a_named_batch_axis_keeps_the_batch_split():
    def center(x):
        return jax.vmap(lambda v: v - jax.lax.pmean(v, "batch"), axis_name="batch")(x)

    step = autopar.parallelize(center, mesh_shape=(4,), batch_argnums=0, constraints=autopar.data_parallel())
    plan = step.plan(X)
    assert [(c.kind, c.operand) for c in plan.collectives] == [("all-reduce", "float32[8]")]
