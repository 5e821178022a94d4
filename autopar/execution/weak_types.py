"""Results of a compiled function that stay weakly typed, as `jax.jit` leaves them.

In: a function of arrays, and which of its results are weakly typed in the step as it was traced. Out: the function with those
types. A result of `jax.shard_map` never is weakly typed, so a learning rate that began as 0.1 would come back as a float32
array that decides types, and bfloat16 weights would be float32 after the next step. What can go wrong: JAX's public
`convert_element_type` makes types strong again; only the primitive takes `weak_type`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax

from autopar.program.call import PyTree


def keep_weak_types(fun: Callable[..., PyTree], weak: Sequence[bool]) -> Callable[..., PyTree]:
    """The function with its first results weakly typed where `weak` says so; XLA runs the same operations."""
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
