"""A move and a barrier as operations on one device's shard.

In: a planned move and a local array, under `jax.shard_map`. Out: the array after JAX's collective. What can go wrong: a sum of
truth values, for which XLA has no collective; they are added as bytes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autopar.avals import is_opaque
from autopar.layouts.mesh import LogicalMesh
from autopar.layouts.monoids import all_reduce, neutral_element
from autopar.layouts.moves import Move, permutation


def perform_move(move: Move, array: jax.Array, mesh: LogicalMesh) -> jax.Array:
    """One move on this device's shard."""
    if array.dtype == jnp.bool_ and move.monoid == "sum":  # one term at most is true, and XLA adds numbers only
        return perform_move(move, array.astype(jnp.uint8), mesh).astype(jnp.bool_)
    if is_shorter_than_a_byte(array):
        return perform_move(move, array.astype(jnp.int8), mesh).astype(array.dtype)
    names = mesh.names(move.axes)
    result: jax.Array
    match move.kind:
        case "all-reduce":
            result = all_reduce(array, names, move.monoid)
        case "reduce-scatter":
            result = jax.lax.psum_scatter(array, names[0], scatter_dimension=move.to_dim, tiled=True)
        case "all-gather":
            result = jax.lax.all_gather(array, names, axis=move.from_dim, tiled=True)
        case "all-to-all":
            result = jax.lax.all_to_all(array, names[0], move.to_dim, move.from_dim, tiled=True)
        case "collective-permute":
            result = jax.lax.ppermute(array, mesh.axis_names, permutation(move.source, move.target, mesh))
        case "slice":
            size = array.shape[move.to_dim] // mesh.shape[move.axes[0]]
            result = jax.lax.dynamic_slice_in_dim(array, mesh.index(move.axes[0]) * size, size, axis=move.to_dim)
        case "mask":
            neutral = neutral_element(move.monoid, array.dtype)
            result = jnp.where(mesh.index(move.axes[0]) == 0, array, neutral)
        case _:
            raise AssertionError(f"no move is called {move.kind}")
    return result


def is_shorter_than_a_byte(array: jax.Array) -> bool:
    """Whether it holds integers of two or four bits, which XLA's CPU collectives count as packed, and end the process."""
    return bool(jnp.issubdtype(array.dtype, jnp.integer) and jnp.iinfo(array.dtype).bits < 8)


def after_value(late: jax.Array, array: jax.Array) -> jax.Array:
    """The same array, but no part of it before `late` is there, and nothing made of it merged with what is made of `array`.

    XLA's CPU compiler of JAX 0.10 drops barriers, and runs at once whatever has its operands. So the array depends on a
    condition that is never true, a square below -1, which XLA does not know.
    """
    if is_opaque(jax.typeof(array)):
        words = after_value(late, jax.random.key_data(array))
        key: jax.Array = jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
        return key
    number = jnp.ravel(late)[0]
    return jnp.where(number * number < -1, jnp.zeros_like(array), array)
