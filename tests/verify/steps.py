"""A train step that is planned and compiled in a second, and the ways in which it is verified."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import autopar

WIDTH, LAYERS, BATCH = 32, 4, 16


def train_step(state, batch):
    """One step of gradient descent of a perceptron."""

    def loss_of(params):
        x = batch["x"]
        for layer in params:
            with jax.named_scope("layer"):
                x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss


@functools.cache
def arguments():
    """State and batch."""
    draw = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(draw.normal(scale=WIDTH**-0.5, size=shape).astype(np.float32))

    state = [{"kernel": normal(WIDTH, WIDTH), "bias": normal(WIDTH)} for _ in range(LAYERS)]
    return state, {"x": normal(BATCH, WIDTH), "y": normal(BATCH, WIDTH)}


def shapes():
    """The shapes of these."""
    return jax.eval_shape(lambda *given: given, *arguments())


@functools.cache
def step_in(mode):
    """The step in one of the modes of the corpus."""
    return autopar.parallelize(train_step, **modes()[mode])


def modes():
    """Imported late, because the modes name constraints."""
    from tests.libraries.modes import MODES

    return MODES
