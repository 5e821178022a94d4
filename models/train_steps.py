"""A model's loss -> pure train and evaluation steps over one frozen state (AdamW or SGD, clipping, dropout, BatchNorm).

`train_step(state, batch)` returns a state of the same structure, shapes and dtypes as the one it was given, so the
state may be donated. The step is a pure function: the dropout key of a step is `fold_in(state.dropout_key,
state.step)`, and the key itself never changes. What can go wrong is a field that changes type between the first state
and the next (a weakly typed counter, say): jit would then compile twice.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from autopar.models.config import ModelConfig
from autopar.models.objective import Batch, Metrics, Objective, Outcome, PyTree


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
