"""Each model at a small size, compiled once per test session and shared by the tests of this folder."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.models import BuiltModel, build

SIZES: Mapping[str, dict[str, Any]] = {
    "mlp": {"layers": 2, "hidden": 32, "dropout": 0.1},
    "gpt": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8},
    "gpt_scan": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8},
    "moe": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8, "experts": 4, "group": 16},
    "wide_resnet": {"image_size": 8, "base_channels": 4, "width_factor": 2, "batch": 16},
}
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
        return jax.tree.map(jnp.copy, self.first_state)


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


@pytest.fixture(scope="session")
def small() -> Callable[[str], SmallModel]:
    """Give the small model of a name."""
    return small_model


@pytest.fixture(scope="session")
def jit() -> Callable[..., Any]:
    """Give `jax.jit` with the compiler's cheapest optimisation."""
    return quick_jit
