"""Memory that was freed goes back to the system while a restore goes on, and between saves.

TensorStore reads, encodes and decodes in threads, each of which has a heap of its own under glibc. What was freed in one of them
stays there for the next time, so that a restore would hold some chunks for each thread beside the state: a quarter of a process's
share of 192 MiB; and a run with many saves some tens of MiB. In: how many bytes were let go of. Out: the heaps are trimmed each
time these are many. What can go wrong: another C library has no `malloc_trim`; then nothing is done.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from autopar.checkpoints.tuning import TUNING


class Freed:
    """How many bytes were let go of since the heaps were last trimmed."""

    def __init__(self, most_bytes: int, *, trim: Callable[[], None] | None = None) -> None:
        """`most_bytes`: after so many the heaps are trimmed, by `trim`; by default with the C library's `malloc_trim`."""
        self._most, self._since, self._trim = most_bytes, 0, trim or trim_heaps

    def add(self, freed_bytes: int) -> None:
        """Bytes were let go of."""
        self._since += freed_bytes
        if self._since >= self._most:
            self._since = 0
            self._trim()


def trim_heaps() -> None:
    """Give what is free in the heaps of all threads back to the system."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


SAVED = Freed(TUNING.saved_bytes)
"""What the saves of this process let go of."""
