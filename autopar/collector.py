"""Python's garbage collector while a step is planned.

A traced step is some million objects, all alive, and planning makes many more: the collector would walk through all of them again
and again, for a sixth of the time that planning takes. In: nothing. Out: a context in which what is there already is left alone.
What can go wrong: a program that freezes objects itself; then nothing is changed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

BY_PYTHON = 10_000
"""The interpreter itself freezes some hundred objects."""


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """Within it the collector does not look at objects that were there before; nested ones change nothing."""
    if gc.get_freeze_count() > BY_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
