"""Weights of layers in a scan, and examples for them."""

import jax.numpy as jnp
import numpy as np

LAYERS, ROWS, WIDTH = 4, 8, 8


def weights_and_examples(*layers):
    draw = np.random.default_rng(0)
    weights = draw.normal(size=(*layers, WIDTH, WIDTH)) / 3, draw.normal(size=(*layers, WIDTH))
    return tuple(jnp.asarray(w, jnp.float32) for w in weights), draw.normal(size=(2 * ROWS, WIDTH)).astype(np.float32)
