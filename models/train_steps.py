"""A model's loss -> pure train and evaluation steps over one frozen state (AdamW or SGD, clipping, dropout, BatchNorm).

`train_step(state, batch)` returns a state of the same structure, shapes and dtypes as the one it was given, so the
state may be donated. The step is a pure function: the dropout key of a step is `fold_in(state.dropout_key,
state.step)`, and the key itself never changes. What can go wrong is a field that changes type between the first state
and the next (a weakly typed counter, say): jit would then compile twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import optax

from autopar.models.config import ModelConfig

PyTree: TypeAlias = Any
Batch: TypeAlias = Mapping[str, jax.Array]
Metrics: TypeAlias = dict[str, jax.Array]


class TrainState(flax.struct.PyTreeNode):
    """All that a step reads and writes.

    Attributes:
        step: int32 scalar, the number of updates made.
        params: float32 leaves.
        opt_state: optax state of `optimizer(config)`.
        batch_stats: running statistics of BatchNorm; an empty dict without BatchNorm.
        dropout_key: uint32 (2,), raw key data, so that any checkpoint format can hold it.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    batch_stats: PyTree
    dropout_key: jax.Array


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


class Steps(NamedTuple):
    """The functions that a training loop calls; none has a side effect."""

    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    eval_step: Callable[[TrainState, Batch], Metrics]
    create_state: Callable[[jax.Array], TrainState]


def optimizer(config: ModelConfig) -> optax.GradientTransformation:
    """AdamW, or SGD with decay of weights, after clipping by the global norm of all gradients."""
    clip = optax.clip_by_global_norm(config.clip_norm)
    if config.sgd:
        return optax.chain(clip, optax.add_decayed_weights(config.weight_decay), optax.sgd(config.learning_rate))
    return optax.chain(clip, optax.adamw(config.learning_rate, weight_decay=config.weight_decay))


def make_steps(config: ModelConfig, objective: Objective) -> Steps:
    """Return the train step, the evaluation step and the state's constructor of one model."""
    update_rule = optimizer(config)

    def create_state(key: jax.Array) -> TrainState:
        params_key, dropout_key = jax.random.split(key)
        variables = objective.init(params_key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=variables["params"],
            opt_state=update_rule.init(variables["params"]),
            batch_stats=variables.get("batch_stats", {}),
            dropout_key=jax.random.key_data(dropout_key),
        )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        step_key = jax.random.fold_in(state.dropout_key, state.step)

        def loss_of(params: PyTree) -> tuple[jax.Array, Outcome]:
            return objective.loss(params, state.batch_stats, batch, dropout_key=step_key)

        (loss, outcome), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = update_rule.update(gradients, state.opt_state, state.params)
        new_state = state.replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            batch_stats=outcome.batch_stats,
        )
        return new_state, {"loss": loss, **outcome.metrics}

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        loss, outcome = objective.loss(state.params, state.batch_stats, batch, dropout_key=None)
        return {"loss": loss, **outcome.metrics}

    return Steps(train_step, eval_step, create_state)


def cross_entropy(
    config: ModelConfig, logits: jax.Array, labels: jax.Array, *, evaluating: bool, weights: jax.Array | None = None
) -> tuple[jax.Array, Metrics]:
    """The mean of -log softmax(logits (B, ..., classes)) at the labels (B, ...), and metrics.

    With weights (B, ...) all means are weighted ones: what has weight 0 counts neither above nor below the line.
    Metrics are "accuracy", the share of labels that have the largest logit, and "example_loss" (B,), as `config` and
    `evaluating` ask for them.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    metrics = _example_losses(config, losses, weights)
    if evaluating or config.aux_metrics:
        metrics["accuracy"] = _mean((jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32), weights)
    return _mean(losses, weights), metrics


def squared_error(
    config: ModelConfig, outputs: jax.Array, targets: jax.Array, *, evaluating: bool
) -> tuple[jax.Array, Metrics]:
    """The mean of (outputs - targets)^2, both (B, ...), and metrics: "absolute_error", its mean, "example_loss" (B,)."""
    errors = outputs - targets
    losses = errors**2
    metrics = _example_losses(config, losses, None)
    if evaluating or config.aux_metrics:
        metrics["absolute_error"] = jnp.mean(jnp.abs(errors))
    return jnp.mean(losses), metrics


def _example_losses(config: ModelConfig, losses: jax.Array, weights: jax.Array | None) -> Metrics:
    inner = tuple(range(1, losses.ndim))
    return {"example_loss": _mean(losses, weights, axes=inner)} if config.aux_metrics else {}


def _mean(values: jax.Array, weights: jax.Array | None, *, axes: tuple[int, ...] | None = None) -> jax.Array:
    """The mean over `axes`, over all without them; where all weights are 0 it is 0."""
    if weights is None:
        return jnp.mean(values, axis=axes)
    return jnp.sum(values * weights, axis=axes) / jnp.maximum(jnp.sum(weights, axis=axes), 1.0)
