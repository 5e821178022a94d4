"""A step that advances typed random keys layer by layer runs in microbatches and in stages, and returns the keys of `jit`.

Every microbatch draws the same numbers for its layers; keys are never split, and each microbatch has all of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.oracles import assert_trees_close

LAYERS, ROWS, WIDTH = 4, 8, 8


def stacked(state, batch):
    """A key per layer, advanced inside the scan; a unit is left out for all examples alike."""

    def loss_of(weights):
        def layer(x, of_layer):
            w, key = of_layer
            key, drawn = jax.random.split(key)
            return jnp.tanh(x @ w) * jax.random.bernoulli(drawn, 0.8, (WIDTH,)), key

        x, keys = jax.lax.scan(layer, batch["x"], (weights, state["key"]))
        return jnp.mean((x - batch["y"]) ** 2), keys

    return descended(state, loss_of)


def carried(state, batch):
    """One key through the scan, with a mask for every example; the last one is returned, and those of all layers."""

    def loss_of(weights):
        def layer(carry, w):
            x, key = carry
            key = jax.random.fold_in(key, 1)
            return (jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.8, x.shape), key), jax.random.split(key, 2)

        (x, key), _ = jax.lax.scan(layer, (batch["x"], state["key"]), weights)
        return jnp.mean((x - batch["y"]) ** 2), key

    return descended(state, loss_of)


def descended(state, loss_of):
    (loss, key), gradient = jax.value_and_grad(loss_of, has_aux=True)(state["w"])
    return {"w": state["w"] - 0.1 * gradient, "key": key}, loss


def state_and_batch(key):
    draw = np.random.default_rng(0)
    w, x, y = (
        draw.normal(size=shape).astype(np.float32) for shape in ((LAYERS, WIDTH, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH))
    )
    return {"w": jnp.asarray(w) / 3, "key": key}, {"x": x, "y": y}


STEPS = {
    "stacked": (stacked, lambda: jax.random.split(jax.random.key(1), LAYERS)),
    "stacked rbg": (stacked, lambda: jax.random.split(jax.random.key(1, impl="rbg"), LAYERS)),
    "carried": (carried, lambda: jax.random.key(1)),
}
WAYS = {
    "one mesh": {"mesh_shape": (2,), "num_microbatches": 4},
    "1f1b": {"num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"},
    "zb-h1": {"num_stages": 2, "num_microbatches": 4, "schedule": "zb-h1"},
    "recompute": {"num_stages": 2, "num_microbatches": 2, "schedule": "gpipe", "recompute": "layer"},
    "one microbatch": {"num_stages": 2, "num_microbatches": 1, "schedule": "gpipe"},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "one mesh") for name in STEPS),
        *((name, "1f1b") for name in STEPS),
        ("stacked", "zb-h1"),
        ("stacked", "recompute"),
        ("carried", "one microbatch"),
    ],
)
def test_keys_and_weights_are_those_of_jit_after_several_steps(name, way):
    step, key = STEPS[name]
    state, batch = state_and_batch(key())
    parallel = autopar.parallelize(step, **{"mesh_shape": (2,), **WAYS[way]})
    run, reference = jax.jit(step), state
    for _ in range(2):
        state, loss = parallel(state, batch)
        reference, expected = run(reference, batch)
        assert_trees_close((state["w"], loss), (reference["w"], expected))
        assert state["key"].dtype == reference["key"].dtype
        np.testing.assert_array_equal(jax.random.key_data(state["key"]), jax.random.key_data(reference["key"]))
    if way == "one mesh":
        assert parallel.plan(state, batch).num_microbatches == 4


def drawn_by_example(w, batch):
    """Every example brings a key."""

    def loss_of(w):
        def one(x, key):
            return jnp.tanh(x @ w) + jax.random.normal(key, (WIDTH,))

        return jnp.mean((jax.vmap(one)(batch["x"], batch["keys"]) - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(w)
    return w - 0.1 * gradient, loss


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "ways",
    [
        {"constraints": autopar.data_parallel(), "mesh_shape": (4,)},
        {"constraints": [autopar.data_parallel(), autopar.zero3()], "mesh_shape": (2,), "num_microbatches": 2},
        {"constraints": {"batch/keys": jax.P("x")}, "mesh_shape": (2,)},
    ],
    ids=["data parallel", "microbatches", "asked for"],
)
def test_keys_of_examples_are_whole_on_every_device_whatever_splits_the_batch(ways):
    state, batch = state_and_batch(jax.random.key(1))
    batch["keys"] = jax.random.split(state["key"], ROWS)
    parallel = autopar.parallelize(drawn_by_example, **ways)
    assert_trees_close(parallel(state["w"][0], batch), jax.jit(drawn_by_example)(state["w"][0], batch))
    layouts = {leaf.path: tuple(leaf.spec) for leaf in parallel.last_plan().inputs}
    assert not any(layouts["batch/keys"])
