"""What JAX's context managers say in one thread holds in another one that is given the settings."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import compat
from autopar.compat import settings_of_traces
from autopar.errors import PipelineError
from autopar.runtime.thread_settings import CARRIED, WITHOUT_EFFECT, settings_here, under
from tests.oracles import assert_same_as_jit

OTHER = {
    "jax_debug_infs": True,
    "jax_debug_nans": True,
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_enable_x64": True,
    "jax_error_checking_behavior_nan": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_random_seed_offset": 1,
    "jax_softmax_custom_jvp": True,
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


@pytest.mark.parametrize("name", OTHER)
def test_a_setting_of_one_thread_holds_in_another_as_long_as_it_is_asked_for(name):
    usual = settings_here()
    assert usual[name] != OTHER[name]
    with CARRIED[name](OTHER[name]):
        settings = settings_here()
    assert settings == usual | {name: OTHER[name]}
    assert seen_by_a_thread(settings) == [settings, usual]


def test_all_settings_by_which_jax_tells_traces_apart_are_carried():
    """Each can be set to what it is. The others make no other program on the devices of a step."""
    of_traces = {name for name in settings_of_traces() if name not in WITHOUT_EFFECT}
    assert {*OTHER} - {"jax_debug_infs", "jax_debug_nans", "jax_default_prng_impl"} <= of_traces <= {*CARRIED}
    usual = settings_here()
    for name, value in usual.items():
        with CARRIED[name](value):
            assert settings_here() == usual


def test_a_version_of_jax_that_does_not_name_them_has_the_best_known_ones(monkeypatch):
    config = compat.private_config
    monkeypatch.delattr(config, "trace_context_names")
    assert "jax_random_seed_offset" in settings_of_traces()
    assert compat.users_contexts() == ()


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


@pytest.mark.parametrize(
    "make", [in_two_stages, functools.partial(autopar.parallelize, mesh_shape=(2,))], ids=["stages", "one mesh"]
)
def test_a_step_that_was_called_before_takes_an_offset_of_all_seeds(make):
    step, weights, batch = two_layers(np.float32)
    parallel = make(step)
    usual = float(parallel(weights, batch)[1])
    with CARRIED["jax_random_seed_offset"](3):
        weights = two_layers(np.float32)[1]
        expected = jax.jit(step)(weights, batch)[1]
        np.testing.assert_allclose(parallel(weights, batch)[1], expected, rtol=1e-6)
    assert abs(float(expected) - usual) > 1e-3
    np.testing.assert_allclose(parallel(two_layers(np.float32)[1], batch)[1], usual, rtol=1e-6)


def test_a_context_of_the_user_s_own_makes_another_program():
    factor = jax.make_user_context(1.0)
    step = autopar.parallelize(lambda total, batch: (total + factor.value * batch.sum(), batch), mesh_shape=(2,))
    assert float(step(jnp.float32(0), jnp.ones(8))[0]) == 8
    with factor(2.0):
        assert float(step(jnp.float32(0), jnp.ones(8))[0]) == 16
    assert float(step(jnp.float32(0), jnp.ones(8))[0]) == 8


def test_a_nan_in_a_stage_stops_the_step_there_if_the_caller_looks_for_nans():
    step, weights, batch = two_layers(np.float32, last=jnp.log)
    parallel = in_two_stages(step)
    assert np.isnan(parallel(weights, batch)[1])
    words = r"^FloatingPointError: invalid value \(nan\) in what forward 1 returns.*\nStage 1, microbatch 0: the forward failed"
    with jax.debug_nans(True), pytest.raises(PipelineError, match=words):
        parallel(weights, batch)
