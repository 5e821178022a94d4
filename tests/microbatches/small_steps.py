"""Traced steps and small inputs for tests of microbatches."""

import jax.numpy as jnp
import numpy as np

from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace


def traced_of(step, *args):
    signature = CallSignature(step, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, args, {}))


def linear(rows=8, width=6):
    generator = np.random.default_rng(0)
    weights = jnp.asarray(generator.normal(size=(width, width)), jnp.float32)
    batch = {
        "x": jnp.asarray(generator.normal(size=(rows, width)), jnp.float32),
        "y": jnp.asarray(generator.normal(size=(rows, width)), jnp.float32),
        "mask": jnp.asarray(generator.integers(2, size=(rows,)), jnp.float32).at[0].set(1),
    }
    return weights, batch
