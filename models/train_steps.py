"""A model's loss -> pure train and evaluation steps over one frozen state (an optimizer of optax, clipping, dropout, BatchNorm).

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
from autopar.models.precision import (
    LossScale,
    all_finite,
    cast_floats,
    first_loss_scale,
    keep_if,
    next_loss_scale,
    scale_loss,
    unscale,
)


class TrainState(flax.struct.PyTreeNode):
    """All that a step reads and writes.

    Attributes:
        step: int32 scalar, the number of batches trained on.
        params: leaves of `config.param_dtype`.
        opt_state: optax state of `optimizer(config)`.
        batch_stats: running statistics of BatchNorm; an empty dict without BatchNorm.
        dropout_key: uint32 (2,), raw key data, so that any checkpoint format can hold it.
        loss_scale: the factor of a float16 loss; None in other types.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    batch_stats: PyTree
    dropout_key: jax.Array
    loss_scale: LossScale | None = None


class Steps(NamedTuple):
    """The functions that a training loop calls; none has a side effect."""

    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    eval_step: Callable[[TrainState, Batch], Metrics]
    create_state: Callable[[jax.Array], TrainState]


def optimizer(config: ModelConfig) -> optax.GradientTransformation:
    """The config's optimizer after clipping by the global norm of all gradients.

    Adafactor is told the decay of a step, which optax does not multiply by the learning rate there.
    """
    rate, decay = config.learning_rate, config.weight_decay
    clip = optax.clip_by_global_norm(config.clip_norm)
    match "sgd" if config.sgd else config.optimizer:
        case "sgd":
            return optax.chain(clip, optax.add_decayed_weights(decay), optax.sgd(rate))
        case "momentum":
            return optax.chain(clip, optax.add_decayed_weights(decay), optax.sgd(rate, momentum=0.9))
        case "adam":
            return optax.chain(clip, optax.adam(rate))
        case "adafactor":
            return optax.chain(clip, optax.adafactor(rate, weight_decay_rate=rate * decay))
        case "lion":
            return optax.chain(clip, optax.lion(rate, weight_decay=decay))
        case "lamb":
            return optax.chain(clip, optax.lamb(rate, weight_decay=decay))
        case "rmsprop":
            return optax.chain(clip, optax.rmsprop(rate))
    return optax.chain(clip, optax.adamw(rate, weight_decay=decay))


def make_steps(config: ModelConfig, objective: Objective) -> Steps:
    """Return the train step, the evaluation step and the state's constructor of one model."""
    update_rule = optimizer(config)

    def create_state(key: jax.Array) -> TrainState:
        params_key, dropout_key = jax.random.split(key)
        variables = objective.init(params_key)
        params = cast_floats(variables["params"], config.param_dtype)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=update_rule.init(params),
            batch_stats=variables.get("batch_stats", {}),
            dropout_key=jax.random.key_data(dropout_key),
            loss_scale=first_loss_scale(config),
        )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        step_key = jax.random.fold_in(state.dropout_key, state.step)

        def loss_of(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, Outcome]]:
            cast = cast_floats(params, config.dtype)
            loss, outcome = objective.loss(cast, state.batch_stats, batch, dropout_key=step_key)
            return scale_loss(loss, state.loss_scale), (loss, outcome)

        (_, (loss, outcome)), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        new_state = _updated(state, update_rule, gradients, outcome.batch_stats)
        return new_state, {"loss": loss, **outcome.metrics}

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        params = cast_floats(state.params, config.dtype)
        loss, outcome = objective.loss(params, state.batch_stats, batch, dropout_key=None)
        return {"loss": loss, **outcome.metrics}

    return Steps(train_step, eval_step, create_state)


def _updated(
    state: TrainState, update_rule: optax.GradientTransformation, gradients: PyTree, batch_stats: PyTree
) -> TrainState:
    """The state after an update; with a scaled loss, weights and statistics stay where a gradient is not finite."""
    scale = state.loss_scale
    if scale is not None:
        gradients = unscale(gradients, scale)
    updates, opt_state = update_rule.update(gradients, state.opt_state, state.params)
    new = state.replace(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        batch_stats=batch_stats,
    )
    if scale is None:
        return new
    finite = all_finite(gradients)
    kept = keep_if(finite, new, state)
    return kept.replace(step=new.step, loss_scale=next_loss_scale(scale, finite))
