"""Each model at a small size, compiled once per test session and shared by the tests of this folder."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from autopar.models import BuiltModel, build

SIZES: Mapping[str, dict[str, Any]] = {
    "mlp": {"layers": 2, "hidden": 32, "dropout": 0.1},
    "gpt": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8},
    "gpt_scan": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8},
    "moe": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8, "experts": 4, "group": 16},
    "wide_resnet": {"image_size": 8, "base_channels": 4, "width_factor": 2, "batch": 16},
    "bert": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8},
    "t5": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "target_seq": 12, "batch": 8},
    "llama": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": 16, "batch": 8},
    "unet": {"image_size": 8, "base_channels": 4, "groups": 2, "batch": 8},
    "densenet": {"image_size": 8, "layers": 4, "blocks": 2, "growth": 8, "groups": 2, "batch": 32},
}
VARIANTS = (
    ({"scan_layers": True, "remat": True},),
    pytest.param(({"remat": True}, {"scan_layers": True}), marks=pytest.mark.slow),
)
"""Ways to write the layers of a model: both at once, wrong if either is; and each alone."""
# Small programs spend their time in the compiler, not in the code it makes.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}


def quick_jit(function: Callable[..., Any], **options: Any) -> Any:
    """Return `jax.jit(function)` with the compiler's cheapest optimisation."""
    return jax.jit(function, compiler_options=QUICK_COMPILE, **options)


@dataclass(frozen=True)
class SmallModel:
    """A built model with its first state and compiled steps; `train_step` takes the state's buffers."""

    model: BuiltModel
    train_step: Any
    eval_step: Any
    first_state: Any

    def state(self) -> Any:
        """Return a copy of the first state, to be given away."""
        return jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), self.first_state)


@functools.cache
def small_model(name: str) -> SmallModel:
    """Build and compile one model."""
    model = build(name, **SIZES[name], learning_rate=3e-3)
    return SmallModel(
        model=model,
        train_step=quick_jit(model.train_step, donate_argnums=0),
        eval_step=quick_jit(model.eval_step),
        first_state=quick_jit(model.create_state)(jax.random.key(0)),
    )


def parameter_count_of(name: str, **sizes: Any) -> int:
    """Count the parameters of a model without making them."""
    params = jax.eval_shape(build(name, **sizes).create_state, jax.random.key(0)).params
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@functools.cache
def compiled_loss_and_gradients(make_objective: Any, config: Any) -> Any:
    """The compiled function of parameters, batch and key; a constant batch or key would be folded at great length."""
    objective = make_objective(config)

    def loss_of(params: Any, batch: Any, key: Any) -> Any:
        return objective.loss(params, {}, batch, dropout_key=key)[0]

    return quick_jit(jax.value_and_grad(loss_of))


def loss_and_gradients_of(make_objective: Any, config: Any, params: Any, batch: Any, key: Any) -> Any:
    """The loss of a config's objective in training and its gradients."""
    return compiled_loss_and_gradients(make_objective, config)(params, batch, key)


def check_close_to_scale(actual: Any, expected: Any) -> None:
    """Assert that leaves differ by less than 1e-5 of the largest entry of each."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(float(np.abs(b).max()), 1e-3)),
        actual,
        expected,
    )


@pytest.fixture(scope="session")
def parameter_count() -> Callable[..., int]:
    """Give the number of parameters of a model at a size."""
    return parameter_count_of


@pytest.fixture(scope="session")
def loss_and_gradients() -> Callable[..., Any]:
    """Give loss and gradients of a config's objective."""
    return loss_and_gradients_of


@pytest.fixture(scope="session")
def assert_close_to_scale() -> Callable[..., None]:
    """Give the comparison of two trees."""
    return check_close_to_scale


@pytest.fixture(scope="session")
def small() -> Callable[[str], SmallModel]:
    """Give the small model of a name."""
    return small_model


@pytest.fixture(scope="session")
def jit() -> Callable[..., Any]:
    """Give `jax.jit` with the compiler's cheapest optimisation."""
    return quick_jit
