"""Whether a thread is in a Python function that a running step has called, for which a device waits.

In: every call of a user's function by a device, within `inside_callback`. Out: `is_inside_callback`, which keeps steps from being
called there: they would wait for the device, and the device for them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_HERE = threading.local()


def is_inside_callback() -> bool:
    """Whether this thread is in a callback of a step."""
    return getattr(_HERE, "is_inside", False)


@contextlib.contextmanager
def inside_callback() -> Iterator[None]:
    """A context for a call of a user's function by a device."""
    _HERE.is_inside = True
    try:
        yield
    finally:
        _HERE.is_inside = False


def as_callback(fun: Callable[P, T]) -> Callable[P, T]:
    """The function within `inside_callback`."""

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with inside_callback():
            return fun(*args, **kwargs)

    return call
