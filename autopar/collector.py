"""Python's garbage collector while a step is planned.

A traced step is some million objects, all alive, and planning makes many more: whole collections would walk through all of them
again and again, for a sixth of the time that planning takes. In: nothing. Out: a context without them; young objects are
collected as ever. What can go wrong: another thread that makes old garbage in cycles meanwhile; it is collected afterwards.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

NEVER = 1_000_000
"""So many collections of younger objects come before a whole one."""


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """Within it the collector looks at young objects alone."""
    young, middle, whole = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, whole)
