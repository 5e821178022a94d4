"""Dropout by explicit keys, so that a step is a pure function and a layer's mask depends on its number alone."""

from typing import Any, cast

import flax.linen as nn
import jax


def subkey(key: jax.Array | None, number: int) -> jax.Array | None:
    """The `number`-th key derived from `key`; None, which turns dropout off, stays None."""
    return None if key is None else jax.random.fold_in(key, number)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each value with probability `rate` and scale the others by 1/(1 - rate); the identity without a key."""
    dropped: Any = nn.Dropout(rate, parent=None).apply({}, x, deterministic=key is None, rng=key)
    return cast(jax.Array, dropped)
