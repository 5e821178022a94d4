"""Results of a compiled function that stay weakly typed, as `jax.jit` leaves them.

In: a function of arrays, and which of its results are weakly typed in the traced step. Out: the function with those types. A
result of `jax.shard_map` is never weakly typed. So a learning rate that began as 0.1 would come back as a strongly typed float32
array, and bfloat16 weights would be float32 after the next step. What can go wrong: JAX's public `convert_element_type` makes
types strong again; only the primitive takes `weak_type`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax

from autopar.program.call import PyTree


def keep_weak_types(fun: Callable[..., PyTree], weak: Sequence[bool]) -> Callable[..., PyTree]:
    """Make the first results of a function weakly typed where `weak` says so. XLA runs the same operations."""
    if not any(weak):
        return fun

    @functools.wraps(fun)
    def call(*arrays: jax.Array) -> PyTree:
        results, tree = jax.tree.flatten(fun(*arrays))
        first = [_make_weak(x) if is_weak else x for x, is_weak in zip(results, weak, strict=False)]
        return jax.tree.unflatten(tree, [*first, *results[len(weak) :]])

    return call


def _make_weak(array: jax.Array) -> jax.Array:
    weak: jax.Array = jax.lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)
    return weak
