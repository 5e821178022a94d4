"""Results of a compiled function that stay weakly typed, as `jax.jit` leaves them.

In: a function of arrays, and which of its results are weakly typed in the step as it was traced. Out: the function with those
types. A result of `jax.shard_map` never is weakly typed, so a learning rate that began as 0.1 would come back as a float32
array that decides types, and bfloat16 weights would be float32 after the next step. What can go wrong: `convert_element_type`
of JAX's public functions makes strong types again; only the primitive says `weak_type`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax


def weakly_typed(fun: Callable[..., Any], weak: Sequence[bool]) -> Callable[..., Any]:
    """The function with those of its first results weakly typed for which `weak` says so; XLA runs the same operations."""
    if not any(weak):
        return fun

    @functools.wraps(fun)
    def call(*arrays: Any) -> Any:
        results, tree = jax.tree.flatten(fun(*arrays))
        first = [_weak(x) if is_weak else x for x, is_weak in zip(results, weak, strict=False)]
        return jax.tree.unflatten(tree, [*first, *results[len(weak) :]])

    return call


def _weak(array: Any) -> Any:
    return jax.lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)
