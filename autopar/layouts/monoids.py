"""The operations that combine partial results: how two are combined, with which neutral element, by which collective.

In: a monoid's name, and arrays. Out: arrays of the same type. What can go wrong: a monoid that XLA has no collective for, so
truth values are combined as bytes; a NaN that a collective's maximum leaves out, so floats are compared as whole numbers.
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
    if monoid == "sum":
        return _sum(array, names)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return _extreme(array, names, monoid)
    if jnp.finfo(array.dtype).bits < 16:  # these have a NaN in the place of -0.0, or none; two bytes hold them all
        return all_reduce(array.astype(jnp.bfloat16), names, monoid).astype(array.dtype)
    return _from_ordered(_extreme(_to_ordered(array, monoid), names, monoid), array.dtype)


def _sum(array: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The sum of each place; of complex numbers by parts, as XLA ends the process where it simplifies the sum of a constant."""
    if not jnp.issubdtype(array.dtype, jnp.complexfloating):
        total: jax.Array = jax.lax.psum(array, names)
        return total
    real, imaginary = jnp.unstack(jax.lax.psum(jnp.stack([array.real, array.imag]), names))
    return jax.lax.complex(real, imaginary)


def _extreme(array: jax.Array, names: tuple[str, ...], monoid: str) -> jax.Array:
    """The greatest, or the least, element of each place."""
    result: jax.Array = jax.lax.pmax(array, names) if monoid == "max" else jax.lax.pmin(array, names)
    return result


def _to_ordered(array: jax.Array, monoid: str) -> jax.Array:
    """Floats as signed integers of their width, in the same order, with NaN beyond the infinity that the monoid prefers.

    The maximum of a collective, on a CPU or a GPU, may be a number where an operand is NaN; that of whole numbers is exact. In
    two's complement the bits of positive floats are in order, and those of negative ones are once all bits but the sign's flip.
    """
    sign = 1 if monoid == "max" else -1
    nan = jnp.copysign(jnp.asarray(jnp.nan, array.dtype), jnp.asarray(sign, array.dtype))
    return _flip_below_zero(_bits_of(jnp.where(jnp.isnan(array), nan, array)))


def _from_ordered(ordered: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The floats that `_to_ordered` turned into integers."""
    return jax.lax.bitcast_convert_type(_flip_below_zero(ordered), dtype)


def _bits_of(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"int{jnp.finfo(array.dtype).bits}"))


def _flip_below_zero(bits: jax.Array) -> jax.Array:
    """All bits but the sign's, of integers below zero: its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def neutral_element(monoid: str, dtype: DTypeLike) -> jax.Array:
    """The value that changes nothing when combined: of truths the greatest is "or", the least "and".

    To a sum of floats that is -0.0, as 0.0 would make 0.0 of it; the types of a byte need not have it.
    """
    if monoid in ("or", "and") or dtype == jnp.bool_:
        return jnp.asarray(monoid in ("and", "min"), dtype)
    if monoid == "sum":
        if not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).bits < 16:
            return jnp.zeros((), dtype)
        return -jnp.zeros((), dtype)
    infinite = np.array(-np.inf if monoid == "max" else np.inf)
    if jnp.issubdtype(dtype, jnp.inexact) and np.isinf(infinite.astype(dtype).astype(np.float64)):
        return jnp.asarray(infinite, dtype)
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype)  # some 8-bit formats end at 448
    return jnp.asarray(info.min if monoid == "max" else info.max, dtype)
