"""What JAX's context managers say in one thread holds in another one that is given the settings."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import PipelineError
from autopar.runtime.thread_settings import CARRIED, settings_here, under
from tests.oracles import assert_same_as_jit

OTHER = {
    "jax_debug_infs": True,
    "jax_debug_nans": True,
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_threefry_partitionable": False,
}


def seen_by_a_thread(settings):
    """What a new thread sees under the settings, and afterwards."""
    found = []

    def look():
        with under(settings):
            found.append(settings_here())
        found.append(settings_here())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize("name", CARRIED)
def test_a_setting_of_one_thread_holds_in_another_as_long_as_it_is_asked_for(name):
    usual = settings_here()
    assert usual[name] != OTHER[name]
    with CARRIED[name](OTHER[name]):
        settings = settings_here()
    assert settings == usual | {name: OTHER[name]}
    assert seen_by_a_thread(settings) == [settings, usual]


def in_two_stages(step):
    return autopar.parallelize(
        step, num_stages=2, num_microbatches=2, mesh_shape=(2,), constraints=autopar.data_parallel()
    )


def two_layers(dtype, last=jnp.square):
    """(step, weights, batch) of two products, each with a mask of random numbers, and `last` of what comes out."""
    draw = np.random.default_rng(0)
    weights = [jnp.asarray(draw.normal(size=(8, 8)), dtype) for _ in range(2)]

    def step(weights, batch):
        def loss(weights):
            x = batch
            for number, w in enumerate(weights):
                kept = jax.random.bernoulli(jax.random.key(number), 0.5, w.shape)
                x = jnp.tanh(x @ jnp.where(kept, w, 0))
            return jnp.mean(jnp.sum(last(x), axis=-1))

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    return step, weights, jnp.asarray(draw.normal(size=(8, 8)), dtype)


def test_a_pipeline_under_enable_x64_computes_in_64_bits():
    with jax.enable_x64(True):
        step, weights, batch = two_layers(np.float64)
        weights, loss = assert_same_as_jit(step, in_two_stages(step), weights, batch, rtol_of_scale=1e-13)
    assert {leaf.dtype for leaf in (*weights, loss)} == {np.dtype(np.float64)}


def test_a_pipeline_draws_the_random_numbers_of_the_caller_s_generator():
    """The two ways of threefry draw different numbers; which one holds is read when a program is lowered."""
    step, weights, batch = two_layers(np.float32)
    usual = jax.jit(step)(weights, batch)[1]
    with jax.threefry_partitionable(False):
        expected = jax.jit(step)(weights, batch)[1]
        assert abs(float(expected) - float(usual)) > 1e-3
        np.testing.assert_allclose(in_two_stages(step)(weights, batch)[1], expected, rtol=1e-6)


def test_a_nan_in_a_stage_stops_the_step_there_if_the_caller_looks_for_nans():
    step, weights, batch = two_layers(np.float32, last=jnp.log)
    parallel = in_two_stages(step)
    assert np.isnan(parallel(weights, batch)[1])
    words = r"^FloatingPointError: invalid value \(nan\) in what forward 1 returns.*\nStage 1, microbatch 0: the forward failed"
    with jax.debug_nans(True), pytest.raises(PipelineError, match=words):
        parallel(weights, batch)
