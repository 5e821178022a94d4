"""The models of the acceptance cases: ordinary flax and optax, no word about devices. Here is what they share, and perceptrons.

Each function gives a `Problem`: a train step, a state and a batch. The sizes are arguments, because the cases set them
so that another plan is best each time. Letters: B batch, S sequence, H hidden, E experts, C channels.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state


@dataclasses.dataclass(frozen=True)
class Problem:
    """`step(state, batch)` -> (new state, loss)."""

    step: Callable[[Any, Any], Any]
    state: Any
    batch: Any

    def leaf_bytes(self):
        """Bytes of each parameter leaf."""
        return [leaf.nbytes for leaf in jax.tree.leaves(self.state.params)]


def first_variables(model, *inputs):
    """What the model begins with. From numpy: to compile its initialisation takes as long as to compile its step."""
    generator = np.random.default_rng(0)

    def first(path, leaf):
        if leaf.ndim < 2:
            return np.full(leaf.shape, path[-1].key in ("scale", "var"), leaf.dtype)
        deviation = math.sqrt(leaf.shape[-1] / math.prod(leaf.shape))
        return (deviation * generator.standard_normal(leaf.shape)).astype(leaf.dtype)

    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    return jax.device_put(jax.tree_util.tree_map_with_path(first, shapes))


def create_state(cls, model, params, tx, **more):
    """A train state before its first step."""
    first = jnp.zeros((), jnp.int32)
    return cls(step=first, apply_fn=model.apply, params=params, tx=tx, opt_state=jax.jit(tx.init)(params), **more)


def regression(model, inputs, outputs_shape, tx=None):
    """Mean squared error of `model(*inputs)` against noise; Adam unless `tx` says otherwise."""
    batch = {"inputs": inputs, "targets": noise(*outputs_shape, seed=2)}
    params = first_variables(model, *inputs)["params"]

    def step(state, batch):
        def loss_of(params):
            out = state.apply_fn({"params": params}, *batch["inputs"])
            return jnp.mean((out - batch["targets"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    return Problem(step, create_state(train_state.TrainState, model, params, tx or optax.adam(1e-2)), batch)


def widened(tree):
    """The tree with float64 for float32; to be used where 64 bits are enabled."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if leaf.dtype == jnp.float32 else leaf, tree)


def in_float64(problem):
    """The same problem with float64 for float32."""
    return dataclasses.replace(problem, state=widened(problem.state), batch=widened(problem.batch))


def noise(*shape, seed=1):
    """Standard normal float32."""
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape, np.float32))


# --- perceptrons ------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """`layers` x (Dense, bias, relu), without the last relu."""

    layers: int
    hidden: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers - 1):
            x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.hidden)(x)


def mlp(batch, hidden, layers=6, tx=None):
    """6 x (Dense + bias + relu) on (B, H)."""
    return regression(MLP(layers, hidden), (noise(batch, hidden),), (batch, hidden), tx)


class DropoutMLP(nn.Module):
    """Dense, dropout, Dense; returns the dropped activations too."""

    hidden: int

    @nn.compact
    def __call__(self, x, key):
        x = nn.Dense(self.hidden, use_bias=False)(x)
        x = nn.Dropout(0.1, deterministic=False)(x, rng=key)
        return nn.Dense(self.hidden, use_bias=False)(x), x


def dropout_mlp(batch=32, seq=32, hidden=16):
    """A step that returns, beside the loss, which activations were dropped."""
    model = DropoutMLP(hidden)
    x, y = noise(batch, seq, hidden), noise(batch, seq, hidden, seed=2)
    params = first_variables(model, x, jax.random.key(3))["params"]

    def step(state, batch):
        def loss_of(params):
            out, dropped = state.apply_fn({"params": params}, batch["x"], batch["key"])
            return jnp.mean((out - batch["y"]) ** 2), dropped == 0

        (loss, mask), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), loss, mask

    state = create_state(train_state.TrainState, model, params, optax.sgd(1e-2))
    return Problem(step, state, {"x": x, "y": y, "key": jax.random.key(7)})


class GatherMLP(nn.Module):
    """Dense, the first 16 columns by index, Dense."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, use_bias=False)(x)
        return nn.Dense(16, use_bias=False)(x[:, jnp.arange(16)])


def gather_mlp(batch=256):
    """x[:, arange(16)] between two layers, so a gather forward and a scatter backward."""
    return regression(GatherMLP(), (noise(batch, 32),), (batch, 16), optax.sgd(1e-2))
