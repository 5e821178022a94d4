"""The models of Alpa's end-to-end runs as train steps, in the paper's precision and with its optimizers.

In: a row of `data/alpa_configs.csv`. Out: a `Subject`: the step, and the shapes of its state and batch. GPTs and mixtures compute
in float16 with weights and statistics in float32, under Adam and Adafactor; Wide-ResNets compute in float32, under momentum.
No dropout, as in Alpa's scripts, and a constant factor of the loss in place of a dynamic one. What can go wrong: a model of
another size than Alpa's; `tests/benchmarks/test_weak_scaling.py` counts parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from autopar.commands.arguments.subject import Subject
from autopar.models import gpt, moe, wide_resnet
from autopar.models.objective import Objective
from autopar.models.precision import cast_floats
from autopar.models.sizes import GPTConfig, MoEConfig, WideResNetConfig

CLASSES = 1024
LOSS_FACTOR = 2.0**15
Config = GPTConfig | MoEConfig | WideResNetConfig


class State(flax.struct.PyTreeNode):
    """Weights, the optimizer's state, and running statistics, which only residual networks have."""

    params: Any
    opt_state: Any
    batch_stats: Any


def config_of(row: Mapping[str, str], **changes: int) -> Config:
    """The sizes of a configuration; `changes` of fields make it smaller, for trials."""
    size = int(row["hidden_or_channels"])
    if row["family"] == "wide_resnet":
        images: dict[str, Any] = {
            "batch": int(row["batch"]),
            "image_size": int(row["seq_or_image"]),
            "channels": 3,
            "classes": CLASSES,
            "depth": int(row["layers"]),
            "base_channels": size,
            "width_factor": int(row["width_factor"]),
            "imagenet_stem": True,
            "narrow_entry": True,
        }
        return WideResNetConfig(**images | changes)
    text: dict[str, Any] = {
        "batch": int(row["batch"]),
        "seq": int(row["seq_or_image"]),
        "hidden": size,
        "layers": int(row["layers"]),
        "heads": int(row["heads"]),
        "vocab": int(row["vocab"]),
        "dropout": 0.0,
        "dtype": "float16",
    }
    if row["family"] == "gpt":
        return GPTConfig(**text | changes)
    experts = {"experts": int(row["experts"]), "group": int(row["expert_group"]), "capacity_factor": 1.0}
    return MoEConfig(**text | experts | {"ffn_factor": 8} | changes)


def subject_of(config: Config) -> Subject:
    """The train step of a model, with the shapes of its state and batch."""
    objective, optimizer = _objective(config), _optimizer(config)

    def create_state(key: jax.Array) -> State:
        variables = objective.init(key)
        params = cast_floats(variables["params"], config.param_dtype)
        return State(params, optimizer.init(params), variables.get("batch_stats", {}))

    def train_step(state: State, batch: Mapping[str, jax.Array]) -> tuple[State, jax.Array]:
        factor = LOSS_FACTOR if config.dtype == "float16" else 1.0

        def scaled_loss(params: Any) -> tuple[jax.Array, Any]:
            cast, key = cast_floats(params, config.dtype), jnp.zeros(2, jnp.uint32)
            loss, outcome = objective.loss(cast, state.batch_stats, batch, dropout_key=key)
            return loss * factor, outcome.batch_stats

        (loss, batch_stats), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(state.params)
        gradients = jax.tree.map(lambda gradient: gradient / factor, gradients) if factor > 1 else gradients
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state, batch_stats), loss / factor

    state = jax.eval_shape(lambda: create_state(jax.random.key(0)))
    module = wide_resnet if isinstance(config, WideResNetConfig) else gpt
    return Subject(train_step, state, module.batch_shape(config))  # type: ignore[arg-type]


def count_parameters(subject: Subject) -> int:
    """Parameters of a model."""
    state: Any = subject.state
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


def _optimizer(config: Config) -> optax.GradientTransformation:
    if isinstance(config, WideResNetConfig):
        return optax.sgd(0.1, momentum=0.9, nesterov=True)
    return optax.adafactor(1e-3) if isinstance(config, MoEConfig) else optax.adamw(1e-3)


def _objective(config: Config) -> Objective:
    if isinstance(config, WideResNetConfig):
        return wide_resnet.objective(config)
    return moe.objective(config) if isinstance(config, MoEConfig) else gpt.objective(config)
