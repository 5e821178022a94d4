"""The checks of `jax.debug_nans` and `jax.debug_infs` for programs whose operands are gone afterwards.

In: a compiled function and its operands. Out: its results, if they have no NaN or infinity that is looked for. What can go wrong:
JAX's own check runs a function again, operation by operation, to find the place, and fails on operands that it has consumed. Here
the results are looked at, and nothing runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

LOOKED_FOR: MappingProxyType[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"nan": np.isnan, "inf": np.isinf}
)
"""What `jax.debug_nans` and `jax.debug_infs` look for, by the words in their names."""


def run_checked(name: str, run: Callable[..., Sequence[jax.Array]], operands: Sequence[object]) -> Sequence[jax.Array]:
    """What `run` returns. Raises FloatingPointError for values that the caller's settings of JAX look for."""
    wanted = [word for word in LOOKED_FOR if getattr(jax.config, f"jax_debug_{word}s")]
    if not wanted:
        return run(*operands)
    with jax.debug_nans(False), jax.debug_infs(False):
        results = run(*operands)
    for part in _parts(results):
        for word in wanted:
            if np.any(LOOKED_FOR[word](part)):
                raise FloatingPointError(
                    f"invalid value ({word}) in what {name} returns, found by jax.debug_{word}s. The undecorated function under "
                    "the same setting and jax.jit names the operation."
                )
    return results


def _parts(arrays: Iterable[jax.Array]) -> Iterable[np.ndarray]:
    """What this process has of the arrays of floating-point and complex numbers."""
    for array in arrays:
        if jnp.issubdtype(array.dtype, jnp.inexact):
            yield from (np.asarray(shard.data) for shard in array.addressable_shards)
