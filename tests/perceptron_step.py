"""A three-layer perceptron with momentum as a step, for tests of `parallelize` as users call it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests import oracles

assert_same_as_jit = functools.partial(oracles.assert_same_as_jit, steps=2)
SPLIT_STATE = {"state/params/*": autopar.Split()}


def make_state(key=None, dtype=jnp.float32, sizes=(8, 16, 16, 8)):
    """A three-layer perceptron with momentum; a function of a key, so that it can make its state sharded."""
    keys = jax.random.split(jax.random.key(0) if key is None else key, len(sizes) - 1)
    params = [
        {"kernel": jax.random.normal(k, (a, b), dtype) * a**-0.5, "bias": jnp.zeros(b, dtype)}
        for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "count": jnp.int32(0)}


def make_batch(examples=16, features=8, seed=1):
    draw = np.random.default_rng(seed)
    return {name: jnp.asarray(draw.normal(size=(examples, features)), jnp.float32) for name in ("x", "y")}


def forward(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def loss_of(params, batch):
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def updated(state, gradients, rate=0.1):
    momentum = jax.tree.map(lambda m, g: (0.9 * m + g).astype(m.dtype), state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - rate * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "count": state["count"] + 1}


def train_step(state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    return updated(state, gradients), loss


def shardings_of(tree):
    return [leaf.sharding for leaf in jax.tree.leaves(tree)]
