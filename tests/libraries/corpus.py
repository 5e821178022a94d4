"""A corpus of train steps of models that other packages ship, each with what it needs to be compared with `jax.jit`.

`CORPUS[name].build()` returns (step, state, batch) with `step(state, batch) -> (state, metrics)`. The code of a model
is its package's; the step around it is what that package's tutorials write. Packages are imported when a step is built,
so that one that is not installed costs nothing. Sizes are tiny: 16 examples, widths of 8 to 32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class LibraryStep:
    """One train step.

    Attributes:
        build: () -> (step, state, batch).
        packages: what it imports beside JAX, optax and flax.
        refused: for modes that cannot run the step, a pattern of the reason that the error gives.
        told: parts of the warnings that it gives in any mode.
    """

    build: Callable[[], tuple[Callable[..., Any], Any, Any]]
    packages: tuple[str, ...]
    refused: Mapping[str, str]
    told: tuple[str, ...]

    def told_in(self, mode):
        """Parts of the warnings that may come in a mode. Steps as small as these have few layers and few operations to cut at."""
        small = {"recompute": ("finds no layers",), "stages": ("of the forward work is one operation",)}
        return (*self.told, *small.get(mode, ()))


CORPUS: dict[str, LibraryStep] = {}


def library_step(*packages, refused=None, told=()):
    """Register a function that builds a step, under its name."""

    def register(build):
        CORPUS[build.__name__] = LibraryStep(build=build, packages=packages, refused=refused or {}, told=told)
        return build

    return register


def mixes_examples(reason):
    """The modes that cut the batch, which refuse a step for this reason."""
    return {"microbatches": reason, "stages": reason}


def noise(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def integers(below, *shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).integers(0, below, shape), jnp.int32)


def labelled(*shape, classes=4):
    """Inputs (BATCH, *shape) and their classes."""
    return {"x": noise(BATCH, *shape), "y": integers(classes, BATCH)}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def trained(loss_of, params, batch, tx=None, **kept):
    """A step over {"params", "opt", ...} from `loss_of(params, batch)`, by plain gradient descent unless `tx` says otherwise."""
    tx = tx or optax.sgd(0.1)

    def step(state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step, {"params": params, "opt": tx.init(params), **kept}, batch


def perceptron(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def of_sizes(*sizes):
    inputs, hidden, outputs = sizes
    return {"in": noise(inputs, hidden, scale=0.3), "out": noise(hidden, outputs, scale=0.3)}
