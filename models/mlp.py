"""A multi-layer perceptron: `layers` x (Dense, bias, relu, dropout) and a linear head, for classes or real values."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.models.dropout import dropout, subkey
from autopar.models.objective import Objective, cross_entropy, squared_error, supervised
from autopar.models.sizes import MLPConfig


class MLP(nn.Module):
    """Hidden layers and a linear head."""

    config: MLPConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map (batch, inputs) to (batch, outputs)."""
        for layer in range(self.config.layers):
            x = nn.relu(nn.Dense(self.config.hidden)(x))
            x = dropout(x, self.config.dropout, subkey(key, layer))
        return nn.Dense(self.config.outputs)(x)


def batch_shape(config: MLPConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one batch of `data.teacher_batches`."""
    targets = (
        jax.ShapeDtypeStruct((config.batch, config.outputs), jnp.float32)
        if config.regression
        else jax.ShapeDtypeStruct((config.batch,), jnp.int32)
    )
    return {"inputs": jax.ShapeDtypeStruct((config.batch, config.inputs), jnp.float32), "targets": targets}


def objective(config: MLPConfig) -> Objective:
    """Mean cross-entropy over the classes, or the mean squared error for regression."""
    measure = squared_error if config.regression else cross_entropy
    return supervised(MLP(config), config, batch_shape(config), inputs=("inputs",), measure=measure)
