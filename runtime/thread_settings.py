"""JAX's settings of one thread, carried to another.

In: the settings under which the calling thread runs, which context managers such as `jax.enable_x64` change for that thread
alone. Out: a context in which another thread runs under the same ones. Programs are traced, lowered and checked where they
are first called: without this, a step of 64-bit numbers in stages would be lowered for 32. What can go wrong: a setting of
JAX that is not in the table below; it holds in the calling thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import jax

# What a program computes and what is checked while it does, by the names under which `jax.config` gives the value.
CARRIED: MappingProxyType[str, Callable[[Any], AbstractContextManager[Any]]] = MappingProxyType(
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

# Checks of what a program has computed: the same program runs with them and without.
CHECKS = ("jax_debug_infs", "jax_debug_nans")
OF_PROGRAMS = tuple(name for name in CARRIED if name not in CHECKS)


def settings_here() -> dict[str, Any]:
    """The settings of the calling thread."""
    return {name: getattr(jax.config, name) for name in CARRIED}


def program_settings_here() -> dict[str, Any]:
    """Those of the calling thread that decide what a step computes: under others it is another program."""
    return {name: getattr(jax.config, name) for name in OF_PROGRAMS}


@contextlib.contextmanager
def under(settings: dict[str, Any]) -> Iterator[None]:
    """Run under the settings of another thread; those that hold here already are left alone."""
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(CARRIED[name](value))
        yield
