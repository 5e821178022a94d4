"""Python's garbage collector while a step is planned.

A traced step is some million objects, all alive, and planning makes many more: whole collections would walk through all of them
again and again, for a sixth of the time that planning takes. Collections of young objects are too many as well, since JAX has
XLA look for garbage at each. In: nothing. Out: a context without whole collections and with fewer young ones. What can go
wrong: another thread that makes old garbage in cycles meanwhile; it is collected afterwards.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG = 50_000
"""So many new objects come before a collection of young ones; Python's own number is some hundreds."""
NEVER = 1_000_000
"""So many collections of younger objects come before a whole one."""


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """Within it the collector looks at young objects alone, and less often; one that is off stays off."""
    young, middle, whole = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG) if young else 0, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, whole)
