"""What tests/launch/training.py trains: four layers with momentum, on batches that any process can make."""

import jax
import jax.numpy as jnp
import numpy as np

ROWS, WIDTH = 24, 16


def init_state():
    draw = np.random.default_rng(0)
    params = {f"w{n}": draw.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for n in range(4)}
    return {"params": params, "momentum": {name: np.zeros_like(w) for name, w in params.items()}}


def batch(number):
    draw = np.random.default_rng(1000 + number)
    return {name: draw.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x", "y")}


def train_step(state, batch):
    def loss_of(params):
        x = batch["x"]
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    return {"params": jax.tree.map(lambda p, m: p - 0.3 * m, state["params"], momentum), "momentum": momentum}, loss


def losses_of_one_device(steps):
    """The losses of so many steps, by `jax.jit`."""
    state, step, found = init_state(), jax.jit(train_step), []
    for number in range(steps):
        state, loss = step(state, batch(number))
        found.append(float(loss))
    return found
