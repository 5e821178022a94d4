"""Carry JAX's settings of one thread to another.

Context managers such as `jax.enable_x64` change settings for the calling thread alone. Programs are traced, lowered and
checked where they are first called, so without this module a step of 64-bit numbers in stages would be lowered for 32. What
can go wrong: a setting of JAX that is not in the table below holds in the calling thread only. The table has those by which JAX
itself tells traces apart.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import MappingProxyType

import jax

from autopar.compat import settings_of_traces

CHECKS: MappingProxyType[str, Callable[..., AbstractContextManager[object]]] = MappingProxyType(
    {"jax_debug_infs": jax.debug_infs, "jax_debug_nans": jax.debug_nans}
)
"""Checks of the results of a program. The same program runs with and without them."""
WITHOUT_EFFECT = frozenset(
    {
        "jax_default_device",
        "jax_disable_jit",
        "jax_enable_pgle",
        "jax_hlo_source_file_canonicalization_regex",
        "jax_no_execution",
        "jax_pgle_profiling_runs",
        "jax_xla_profile_version",
    }
)
"""Settings by which JAX tells traces apart, and which change nothing of what a step computes on the devices that it is given."""
CARRIED: MappingProxyType[str, Callable[..., AbstractContextManager[object]]] = MappingProxyType(
    {
        **CHECKS,
        "jax_default_prng_impl": jax.default_prng_impl,
        **{name: context for name, context in sorted(settings_of_traces().items()) if name not in WITHOUT_EFFECT},
    }
)
"""Settings that decide what a program computes and which checks it makes, by their names in `jax.config`."""
OF_PROGRAMS = tuple(name for name in CARRIED if name not in CHECKS)


_read_of_programs = operator.attrgetter(*OF_PROGRAMS)  # each call of a step asks for them


def settings_here() -> dict[str, object]:
    """Return the settings of the calling thread."""
    return {name: getattr(jax.config, name) for name in CARRIED}


def program_settings_here() -> dict[str, object]:
    """Return the settings of the calling thread that decide what a step computes. Under others it is another program."""
    return dict(zip(OF_PROGRAMS, _read_of_programs(jax.config), strict=True))


@contextlib.contextmanager
def under(settings: dict[str, object]) -> Iterator[None]:
    """Open a context with the settings of another thread. Settings that hold here already are not touched."""
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(CARRIED[name](value))
        yield
