"""Optimizers and building blocks of the small train steps in plain JAX."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Tree: TypeAlias = Any
Step: TypeAlias = Callable[[Tree, Tree], tuple[Tree, jax.Array]]
Example: TypeAlias = tuple[Step, Tree, Tree]

BATCH, SEQ, HIDDEN, HEADS, WIDE, VOCAB = 8, 8, 32, 8, 96, 48


def sgd_step(loss_of: Callable[[Tree, Tree], jax.Array], rate: float = 0.1) -> Step:
    """State {"params"}: params - rate * gradient."""

    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        return {"params": jax.tree.map(lambda p, g: p - rate * g, state["params"], gradients)}, loss

    return step


def adam_state(params: Tree) -> Tree:
    """State {"params", "first", "second", "count"} for `adam_step`."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "first": zeros, "second": jax.tree.map(jnp.copy, zeros), "count": jnp.int32(0)}


def adam_step(loss_of: Callable[[Tree, Tree], jax.Array], rate: float = 3e-3, epsilon: float = 3e-3) -> Step:
    """Adam with bias correction."""

    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        count = state["count"] + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, state["second"], gradients)
        scale_first, scale_second = 1 / (1 - 0.9**count), 1 / (1 - 0.99**count)

        def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p - rate * m * scale_first / (jnp.sqrt(v * scale_second) + epsilon)

        params = jax.tree.map(updated, state["params"], first, second)
        return {"params": params, "first": first, "second": second, "count": count}, loss

    return step


class Draw:
    """Parameters and data from one seeded numpy generator, in the order of the calls."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def weight(self, *shape: int, fan_in: int | None = None) -> jax.Array:
        """Gaussian with deviation 1/sqrt(fan_in), by default the first dimension."""
        return jnp.asarray(self._numbers(*shape, fan_in=fan_in))

    def _numbers(self, *shape: int, fan_in: int | None = None) -> np.ndarray:
        """The same in NumPy, whose arithmetic needs no compilation for a new shape."""
        scale = 1 / math.sqrt(fan_in or shape[0])
        return self.generator.normal(scale=scale, size=shape).astype(np.float32)

    def integers(self, below: int, *shape: int) -> jax.Array:
        """Uniform int32 in [0, below)."""
        return jnp.asarray(self.generator.integers(below, size=shape).astype(np.int32))

    def norm(self, size: int) -> Tree:
        """Scale near 1 and bias near 0, both with gradients that matter."""
        return {"scale": jnp.asarray(1 + 0.1 * self._numbers(size)), "bias": jnp.asarray(0.1 * self._numbers(size))}

    def attention(self) -> Tree:
        """Query, key, value and output projections, split by heads, without biases."""
        depth = HIDDEN // HEADS
        into = {name: self.weight(HIDDEN, HEADS, depth) for name in ("query", "key", "value")}
        return into | {"out": self.weight(HEADS, depth, HIDDEN, fan_in=HIDDEN)}

    def dense(self, inputs: int, outputs: int) -> Tree:
        """Kernel and bias."""
        return {"kernel": self.weight(inputs, outputs), "bias": jnp.asarray(0.1 * self._numbers(outputs))}


def dense(p: Tree, x: jax.Array) -> jax.Array:
    """x W + b."""
    return x @ p["kernel"] + p["bias"]


def layer_norm(p: Tree, x: jax.Array) -> jax.Array:
    """Normalise the last dimension, then scale and shift."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def attend(p: Tree, x: jax.Array, memory: jax.Array, bias: jax.Array | float) -> jax.Array:
    """Multi-head attention of x (b, q, h) to memory (b, k, h), `bias` added to the scores (b, n, q, k)."""
    query, key, value = (
        jnp.einsum("bsh,hnd->bsnd", source, p[name])
        for name, source in (("query", x), ("key", memory), ("value", memory))
    )
    scores = jnp.einsum("bqnd,bknd->bnqk", query, key) / math.sqrt(query.shape[-1])
    mixed = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores + bias), value)
    return jnp.einsum("bqnd,ndh->bqh", mixed, p["out"])


def token_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits (..., v)) at the labels (...)."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]


def causal_bias(length: int) -> jax.Array:
    """0 on and below the diagonal, -1e9 above: (length, length)."""
    return jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)
