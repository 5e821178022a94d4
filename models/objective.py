"""A model and a batch -> the mean loss and what else is reported: an `Objective`, which `train_steps` trains.

`supervised` makes it of any model whose outputs are measured against targets in the batch; a model that adds to its loss,
or keeps statistics, writes its own. Means over weighted examples divide by the sum of the weights in the batch, so that
what has weight 0 counts nowhere. Losses are at least float32 whatever the model computes in. What can go wrong is a mean of
means: weights are summed over the whole batch at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from autopar.models.config import ModelConfig
from autopar.models.precision import cast_floats
from autopar.models.sizes import DropoutConfig

PyTree: TypeAlias = Any
Batch: TypeAlias = Mapping[str, jax.Array]
BatchShape: TypeAlias = dict[str, jax.ShapeDtypeStruct]
Metrics: TypeAlias = dict[str, jax.Array]


class Outcome(NamedTuple):
    """What an objective reports beside the loss: more metrics, and the batch statistics to keep."""

    metrics: Metrics
    batch_stats: PyTree


class LossFunction(Protocol):
    """The mean loss of a batch."""

    def __call__(
        self, params: PyTree, batch_stats: PyTree, batch: Batch, *, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Outcome]:
        """Return the loss; `dropout_key` None means evaluation: no dropout, running statistics, unchanged."""
        ...


@dataclass(frozen=True)
class Objective:
    """A model as its train step sees it.

    Attributes:
        init: key -> variables, a mapping with "params" and, with BatchNorm, "batch_stats".
        loss: the loss function.
    """

    init: Callable[[jax.Array], Mapping[str, PyTree]]
    loss: LossFunction


def _widen(outputs: jax.Array) -> jax.Array:
    """In float32, or in what is wider."""
    return outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))


def cross_entropy(
    config: ModelConfig, logits: jax.Array, labels: jax.Array, *, evaluating: bool, weights: jax.Array | None = None
) -> tuple[jax.Array, Metrics]:
    """The mean of -log softmax(logits (B, ..., classes)) at the labels (B, ...), and metrics.

    With weights (B, ...) all means are weighted ones: what has weight 0 counts neither above nor below the line.
    Metrics are "accuracy", the share of labels that have the largest logit, and "example_loss" (B,), as `config` and
    `evaluating` ask for them.
    """
    logits = _widen(logits)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    metrics = _example_losses(config, losses, weights)
    if evaluating or config.aux_metrics:
        metrics["accuracy"] = _mean((jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32), weights)
    return _mean(losses, weights), metrics


def squared_error(
    config: ModelConfig, outputs: jax.Array, targets: jax.Array, *, evaluating: bool, weights: jax.Array | None = None
) -> tuple[jax.Array, Metrics]:
    """The mean of (outputs - targets)^2, both (B, ...), and metrics: "absolute_error", its mean, "example_loss" (B,)."""
    errors = _widen(outputs) - targets
    losses = errors**2
    metrics = _example_losses(config, losses, weights)
    if evaluating or config.aux_metrics:
        metrics["absolute_error"] = _mean(jnp.abs(errors), weights)
    return _mean(losses, weights), metrics


def _example_losses(config: ModelConfig, losses: jax.Array, weights: jax.Array | None) -> Metrics:
    inner = tuple(range(1, losses.ndim))
    return {"example_loss": _mean(losses, weights, axes=inner)} if config.aux_metrics else {}


def _mean(values: jax.Array, weights: jax.Array | None, *, axes: tuple[int, ...] | None = None) -> jax.Array:
    """The mean over `axes`, over all without them; where all weights are 0 it is 0."""
    if weights is None:
        return jnp.mean(values, axis=axes)
    return jnp.sum(values * weights, axis=axes) / jnp.maximum(jnp.sum(weights, axis=axes), 1.0)


class Measure(Protocol):
    """`cross_entropy` or `squared_error`."""

    def __call__(
        self,
        config: ModelConfig,
        outputs: jax.Array,
        targets: jax.Array,
        /,
        *,
        evaluating: bool,
        weights: jax.Array | None,
    ) -> tuple[jax.Array, Metrics]:
        """Return the mean loss of the outputs, and metrics."""
        ...


def supervised(
    model: nn.Module,
    config: DropoutConfig,
    shapes: BatchShape,
    *,
    inputs: Sequence[str] = ("tokens",),
    measure: Measure = cross_entropy,
    targets: str = "targets",
) -> Objective:
    """The objective of a model that is called as model(*inputs, key of the dropout or None).

    `inputs` and `targets` are names in the batch, whose leaves have these `shapes`; its "weights", if it has any, count.
    """

    def loss(
        params: PyTree, batch_stats: PyTree, batch: Batch, *, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Outcome]:
        key = dropout_key if config.dropout else None
        examples = cast_floats([batch[name] for name in inputs], config.dtype)
        outputs: Any = model.apply({"params": params}, *examples, key)
        evaluating, weights = dropout_key is None, batch.get("weights")
        mean_loss, metrics = measure(config, outputs, batch[targets], evaluating=evaluating, weights=weights)
        return mean_loss, Outcome(metrics, batch_stats)

    def init(key: jax.Array) -> Mapping[str, PyTree]:
        examples = (jnp.zeros(shapes[name].shape, shapes[name].dtype) for name in inputs)
        return model.init(key, *examples, None)

    return Objective(init, loss)
