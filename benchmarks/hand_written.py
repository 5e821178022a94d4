"""A data-parallel train step as one writes it by hand with `jax.shard_map`; `baselines_real.py` runs it beside plans.

In: a model of the registry. Out: a step from (state, batch) to (state, metrics) on all devices: each computes the gradients of
its examples, one psum adds them up, and each updates its copy of the state. What can go wrong: a model whose loss is not the mean
of the losses of parts of its batch, such as one that normalises over the batch; `has_equal_parts` says which those are not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from autopar.models import BuiltModel
from autopar.models.registry import MODELS
from autopar.models.train_steps import TrainState, optimizer


def has_equal_parts(built: BuiltModel) -> bool:
    """Whether the loss of a batch is the mean of the losses of its parts: there are no statistics over the batch."""
    state = jax.eval_shape(built.create_state, jax.random.key(0))
    return not jax.tree.leaves(state.batch_stats)


def data_parallel_step(built: BuiltModel) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """Make the step of a model whose batch has equal parts, for all devices; it takes the memory of its state."""
    mesh, rule = Mesh(np.array(jax.devices()), ("data",)), optimizer(built.config)
    module = importlib.import_module(f"autopar.models.{MODELS[built.name].module}")
    objective = module.objective(built.config)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.fold_in(state.dropout_key, state.step), jax.lax.axis_index("data"))

        def loss_of(params: Any) -> jax.Array:
            return objective.loss(params, state.batch_stats, batch, dropout_key=key)[0]

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        loss, gradients = jax.lax.pmean((loss, gradients), "data")
        updates, opt_state = rule.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": loss}

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=False)
    return jax.jit(mapped, donate_argnums=0)
