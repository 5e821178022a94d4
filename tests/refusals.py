"""A small step, and what tests of bad input share: a plan that is expected to fail, and a check of the message's words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar


def make_state(width=16):
    draw = np.random.default_rng(0)
    up, down = draw.normal(size=(8, width)), draw.normal(size=(width, 8))
    return {
        "params": {"up": jnp.asarray(up, jnp.float32), "down": jnp.asarray(down, jnp.float32)},
        "count": jnp.int32(0),
    }


def make_batch(examples=16):
    draw = np.random.default_rng(1)
    return {name: jnp.asarray(draw.normal(size=(examples, 8)), jnp.float32) for name in ("x", "y")}


def train_step(state, batch):
    def loss_of(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
    return {"params": params, "count": state["count"] + 1}, loss


def planned(state=None, batch=None, **options):
    """A plan of the train step on 8 devices in one row; what the tests below expect to fail."""
    options = {"mesh_shape": (8,), "devices": 8} | options
    return autopar.parallelize(train_step, **options).plan(state or make_state(), batch or make_batch())


def refused(error, call, *words):
    """The message of `call`'s error, which contains all words."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    return message


def loss_only(state, batch):
    return jnp.sum(batch["x"] @ state["params"]["up"])
