"""A multi-layer perceptron: `layers` x (Dense, bias, relu, dropout) and a linear head, for classes or real values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.models.config import ModelConfig
from autopar.models.dropout import dropout, subkey
from autopar.models.train_steps import Batch, Objective, Outcome, PyTree, cross_entropy, squared_error


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ModelConfig):
    """Sizes of the perceptron; `outputs` counts classes, or real values when `regression` is set."""

    inputs: int = 32
    hidden: int = 64
    layers: int = 6
    outputs: int = 8
    dropout: float = 0.0
    regression: bool = False

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("inputs", "hidden", "layers", "outputs")
        yield from self._not_a_rate("dropout")


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
    model = MLP(config)

    def loss(
        params: PyTree, batch_stats: PyTree, batch: Batch, *, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Outcome]:
        key = dropout_key if config.dropout else None
        outputs: Any = model.apply({"params": params}, batch["inputs"], key)
        measure = squared_error if config.regression else cross_entropy
        mean_loss, metrics = measure(config, outputs, batch["targets"], evaluating=dropout_key is None)
        return mean_loss, Outcome(metrics, batch_stats)

    return Objective(
        init=lambda key: model.init(key, jnp.zeros((config.batch, config.inputs), jnp.float32), None),
        loss=loss,
    )
