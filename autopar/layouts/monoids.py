"""The operations that combine partial results: how two are combined, with which neutral element, by which collective.

In: a monoid's name, and arrays. Out: arrays of the same type. What can go wrong: a monoid that XLA has no collective for;
truth values are combined as bytes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

MONOIDS = ("sum", "max", "min", "or", "and")
COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum, "or": jnp.logical_or, "and": jnp.logical_and}
"""How two partial results are combined, by monoid."""


def all_reduce(array: jax.Array, names: tuple[str, ...], monoid: str) -> jax.Array:
    """The partial results of all devices along the named mesh axes, combined on each of them."""
    if monoid in ("or", "and"):
        kind = "max" if monoid == "or" else "min"
        return all_reduce(array.astype(jnp.uint8), names, kind).astype(jnp.bool_)
    result: jax.Array
    match monoid:
        case "sum":
            result = jax.lax.psum(array, names)
        case "max":
            result = jax.lax.pmax(array, names)
        case _:
            result = jax.lax.pmin(array, names)
    return result


def neutral_element(monoid: str, dtype: DTypeLike) -> jax.Array:
    """The value that changes nothing when combined: of truths the greatest is "or", the least "and"."""
    if monoid in ("or", "and") or dtype == jnp.bool_:
        return jnp.asarray(monoid in ("and", "min"), dtype)
    if monoid == "sum":
        return jnp.zeros((), dtype)
    infinite = np.array(-np.inf if monoid == "max" else np.inf)
    if jnp.issubdtype(dtype, jnp.inexact) and np.isinf(infinite.astype(dtype).astype(np.float64)):
        return jnp.asarray(infinite, dtype)
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype)  # some 8-bit formats end at 448
    return jnp.asarray(info.min if monoid == "max" else info.max, dtype)
