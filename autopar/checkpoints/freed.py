"""Return freed memory to the system during a restore, and between saves.

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
    """Counts the bytes that were freed since the heaps were last trimmed."""

    def __init__(self, most_bytes: int, *, trim: Callable[[], None] | None = None) -> None:
        """Trim the heaps by `trim` after `most_bytes` freed bytes; by default with the C library's `malloc_trim`."""
        self._most, self._since, self._trim = most_bytes, 0, trim or trim_heaps

    def add(self, freed_bytes: int) -> None:
        """Count bytes that were freed, and trim the heaps if they are many."""
        self._since += freed_bytes
        if self._since >= self._most:
            self._since = 0
            self._trim()


def trim_heaps() -> None:
    """Return the free memory in the heaps of all threads to the system."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


SAVED = Freed(TUNING.saved_bytes)
"""The bytes that the saves of this process freed."""
