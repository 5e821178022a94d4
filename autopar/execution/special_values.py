"""The checks of `jax.debug_nans` and `jax.debug_infs` for programs that consume their operands.

In: a compiled function and its operands. Out: its results, if they hold no NaN or infinity that the settings look for. What can
go wrong: JAX's own check runs the function again, operation by operation, to find the place, and fails because the operands are
gone. This check looks at the results only, and runs nothing again. JAX also checks what merely moves or cuts an array; a step may
be given NaNs that it leaves out, as under `jax.jit`, so `unchecked` turns the checks off there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

LOOKED_FOR: MappingProxyType[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"nan": np.isnan, "inf": np.isinf}
)
"""The values that `jax.debug_nans` and `jax.debug_infs` look for, by the words in their names."""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Open a context in which JAX looks for neither NaNs nor infinities, because arrays are moved and nothing is computed."""
    if not _looked_for():  # a setting costs microseconds, and most steps look for nothing
        yield
        return
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def _looked_for() -> list[str]:
    """The words of the values that the settings of JAX look for now."""
    return [word for word in LOOKED_FOR if getattr(jax.config, f"jax_debug_{word}s")]


def run_checked(name: str, run: Callable[..., Sequence[jax.Array]], operands: Sequence[object]) -> Sequence[jax.Array]:
    """Run a function on operands. Raises FloatingPointError if a result holds a value that the settings of JAX look for."""
    wanted = _looked_for()
    if not wanted:
        return run(*operands)
    with unchecked():
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
    """Return this process's parts of the arrays of floating-point and complex numbers."""
    for array in arrays:
        if jnp.issubdtype(array.dtype, jnp.inexact):
            yield from (np.asarray(shard.data) for shard in array.addressable_shards)
