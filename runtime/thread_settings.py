"""Carry JAX's settings of one thread to another.

Context managers such as `jax.enable_x64` change settings for the calling thread alone. Programs are traced, lowered and
checked where they are first called, so without this module a step of 64-bit numbers in stages would be lowered for 32. What
can go wrong: a setting of JAX that is not in the table below holds in the calling thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import MappingProxyType

import jax

CARRIED: MappingProxyType[str, Callable[..., AbstractContextManager[object]]] = MappingProxyType(
    {
        "jax_debug_infs": jax.debug_infs,
        "jax_debug_nans": jax.debug_nans,
        "jax_default_matmul_precision": jax.default_matmul_precision,
        "jax_default_prng_impl": jax.default_prng_impl,
        "jax_enable_x64": jax.enable_x64,
        "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
        "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
        "jax_threefry_partitionable": jax.threefry_partitionable,
    }
)
"""Settings that decide what a program computes and which checks it makes, by their names in `jax.config`."""
CHECKS = ("jax_debug_infs", "jax_debug_nans")
"""Checks of the results of a program. The same program runs with and without them."""
OF_PROGRAMS = tuple(name for name in CARRIED if name not in CHECKS)


def settings_here() -> dict[str, object]:
    """Return the settings of the calling thread."""
    return {name: getattr(jax.config, name) for name in CARRIED}


def program_settings_here() -> dict[str, object]:
    """Return the settings of the calling thread that decide what a step computes. Under others it is another program."""
    return {name: getattr(jax.config, name) for name in OF_PROGRAMS}


@contextlib.contextmanager
def under(settings: dict[str, object]) -> Iterator[None]:
    """Open a context with the settings of another thread. Settings that hold here already are not touched."""
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(CARRIED[name](value))
        yield
