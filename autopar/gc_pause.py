"""Python's garbage collector while a step is planned.

A traced step consists of about a million objects, all alive, and planning makes many more. Full collections would walk through
all of them again and again, for a sixth of the planning time. Collections of young objects are too frequent as well, since JAX
has XLA look for garbage at each. What can go wrong: another thread may make old garbage in cycles meanwhile; it is collected
afterwards. Pauses of several threads overlap, and the last one to end puts the
thresholds back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
from collections.abc import Iterator

YOUNG = 50_000
"""Number of new objects before a collection of young ones; Python's own is some hundreds. `benchmarks/planner_time.py`."""
NEVER = 1_000_000
"""Number of collections of younger objects before a full one."""


@dataclasses.dataclass
class _Pauses:
    """How many threads are in a pause, and the collector's thresholds before the first of them."""

    count: int = 0
    before: tuple[int, int, int] = (0, 0, 0)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_PAUSES = _Pauses()


@contextlib.contextmanager
def pause_full_collections() -> Iterator[None]:
    """A context in which the collector looks at young objects alone, and less often; one that is off stays off."""
    with _PAUSES.lock:
        if not _PAUSES.count:
            young, middle, _ = _PAUSES.before = gc.get_threshold()
            gc.set_threshold(max(young, YOUNG) if young else 0, middle, NEVER)
        _PAUSES.count += 1
    try:
        yield
    finally:
        with _PAUSES.lock:
            _PAUSES.count -= 1
            if not _PAUSES.count:
                gc.set_threshold(*_PAUSES.before)
